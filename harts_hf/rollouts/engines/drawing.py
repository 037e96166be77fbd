"""Draws next tokens, and says with which probability each was drawn."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from harts_hf.rollouts.engines.engine import SamplingSettings


class Draw(NamedTuple):
    """A token that was drawn.

    Attributes:
        token: its id.
        logprob: log of the probability with which it was drawn.
        entropy: of the tempered distribution, before anything was cut off it, in nats; NaN unless asked for.
    """

    token: int
    logprob: float
    entropy: float


class TokenDrawer:
    """Draws from logits as the settings say: tempered, then cut by top-k, top-p and min-p, then renormalised."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._temperature = settings.temperature
        self._warpers: list[Any] = []
        if settings.top_k:
            self._warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p:
            self._warpers.append(MinPLogitsWarper(settings.min_p))

    @torch.no_grad()
    def draw(self, logits: Tensor, uniforms: Sequence[Sequence[float]], *, entropies: bool) -> list[list[Draw]]:
        """Draws one token for each number: the first whose cumulative probability exceeds it.

        Args:
            logits: ``[R, V]``.
            uniforms: for each row at least one number in (0, 1).
            entropies: whether entropies are wanted.

        Returns:
            For each row its draws. Logits that are not numbers give a ``logprob`` of NaN.
        """
        scores = logits.float() / self._temperature
        kept = scores
        for warper in self._warpers:  # none of them looks at the tokens before
            kept = warper(None, kept)
        logprobs = kept.log_softmax(-1)
        # float64: in float32 the sum of a large vocabulary would lose its unlikely tokens.
        cumulative = logprobs.double().exp().cumsum(-1)
        most = max(map(len, uniforms))
        padded = [[*row, *[0.5] * (most - len(row))] for row in uniforms]
        targets = torch.tensor(padded, dtype=torch.float64, device=logits.device) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
        # One transfer from the device; token ids are exact in float64.
        numbers = [tokens.double(), logprobs.gather(1, tokens).double()]
        if entropies:
            tempered = scores.log_softmax(-1)
            entropy = -(tempered.exp() * tempered.masked_fill(tempered == -math.inf, 0.0)).sum(-1, keepdim=True)
            numbers.append(entropy.expand_as(targets).double())
        tokens_of, logprobs_of, *entropies_of = torch.stack(numbers).tolist()
        return [
            [
                Draw(int(tokens_of[row][i]), logprobs_of[row][i], entropies_of[0][row][i] if entropies else math.nan)
                for i in range(len(numbers_of_row))
            ]
            for row, numbers_of_row in enumerate(uniforms)
        ]
