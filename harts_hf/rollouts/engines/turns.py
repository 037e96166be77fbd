"""A turn while it is sampled: its tokens so far, its own random numbers, and what ends it."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from harts_hf.rollouts.engines.drawing import Draw
from harts_hf.rollouts.engines.engine import SampledTurn, TurnRequest
from harts_hf.rollouts.engines.routes import ReadRoutes

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what tokenizers decode a part of a character to

# SplitMix64 (Steele, Lea and Flood 2014): in Python, so the same on every device, and one number of state a turn.
_STEP, _FIRST, _SECOND, _MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64 - 1


class Turn:
    """One continuation of a history.

    Args:
        request: that it answers; its random numbers depend on the request's seed and ``index``, on nothing else.
        index: which of the request's continuations it is.
        end_token_ids: tokens that end it.
        stop: finds the texts that end it; None for none.

    Attributes:
        entropies: whether they are wanted.
        token_ids: sampled so far.
        routes: when it is over, the experts of the tokens read; None where nobody notes them.
    """

    # There are many, and what has no dictionary costs the garbage collector less.
    __slots__ = (
        "_end_token_ids",
        "_ended",
        "_entropies",
        "_logprobs",
        "_max_tokens",
        "_random",
        "_routes_from",
        "_stop",
        "entropies",
        "routes",
        "token_ids",
    )

    def __init__(
        self, request: TurnRequest, index: int, *, end_token_ids: Collection[int], stop: "StopFinder | None"
    ) -> None:
        digest = hashlib.blake2b(f"{request.seed}/{index}".encode(), digest_size=8).digest()
        self._random = int.from_bytes(digest, "little")
        self._max_tokens = request.max_tokens
        self.entropies = request.entropies
        self._end_token_ids = end_token_ids
        self._stop = stop
        self._routes_from = request.routes_from
        self.routes: ReadRoutes | None = None
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] | None = [] if request.entropies else None
        self._ended: Literal["end_token", "stop_text", "length"] | None = None

    def uniform(self) -> float:
        """The next random number, in (0, 1)."""
        self._random = mixed = (self._random + _STEP) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
        # Of 48 bits, half a step off both ends, so that times a sum of float64 it stays below the sum.
        return (((mixed ^ (mixed >> 31)) >> 16) + 0.5) / 2**48

    def add(self, draw: Draw) -> bool:
        """Adds a token; returns whether the turn is over."""
        self.token_ids.append(draw.token)
        self._logprobs.append(draw.logprob)
        if self._entropies is not None:
            self._entropies.append(draw.entropy)
        if draw.token in self._end_token_ids:
            self._ended = "end_token"
        elif self._stop is not None and self._stop.found_in(self.token_ids):
            self._ended = "stop_text"
        elif len(self.token_ids) == self._max_tokens:
            self._ended = "length"
        return self._ended is not None

    def result(self) -> SampledTurn:
        """The turn when it is over."""
        assert self._ended is not None
        start, routes = self._routes_from, self.routes
        return SampledTurn(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            ended=self._ended,
            entropies=None if self._entropies is None else tuple(self._entropies),
            routed_experts=None if start is None or routes is None else routes.since(start),
        )


class StopFinder:
    """Looks for texts in a turn that grows by one token at a time, without decoding all of it each time.

    Args:
        tokenizer: decodes; special tokens are part of the text.
        texts: to be found, at least one, none empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._overlap = max(map(len, texts)) - 1
        self._tail = ""  # decoded before, as far as a text may begin in it
        # Tokens decode differently at the beginning of a text, so new ones are decoded behind the ones before them.
        self._context = 0
        self._decoded = 0

    def found_in(self, tokens: Sequence[int]) -> bool:
        """Whether the turn's text has come to hold one of the texts."""
        before = self._decode(tokens[self._context : self._decoded])
        text = self._decode(tokens[self._context :])
        seen = self._tail + text[len(before) :]
        if not text.endswith(_UNFINISHED):
            self._context, self._decoded = self._decoded, len(tokens)
            self._tail = seen[len(seen) - self._overlap :] if self._overlap < len(seen) else seen
        return any(wanted in seen for wanted in self._texts)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)) if tokens else ""
