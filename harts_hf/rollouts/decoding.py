"""Token by token decoding of many conversations that fork, with the model's own cache.

All rows stand at the same position at any time: each step feeds one token to each row, whether the policy sampled it
or the environment said it. So nothing is ever padded after the prompts, and a recurrent state never sees a padding
token between two real ones (transformers issue 47086: padding inside a continued segment decays the state and
enters the convolution window). Prompts are padded on the left; there the state is still zero, and the padded hidden
states are zeroed by the model, so the state stays zero; attention layers get the mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


class LockstepDecoder:
    """Feeds tokens to a model row by row and keeps the cache; rows can be repeated, reordered and dropped.

    Attributes:
        num_forward_tokens: real tokens fed so far, what sampling has cost.
    """

    def __init__(self, model: PreTrainedModel, *, pad_token_id: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._cache = DynamicCache(config=model.config)
        self._mask = torch.empty(0, 0, dtype=torch.long)
        self.num_forward_tokens = 0

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begins with one row per prompt.

        Args:
            prompts: token ids, each at least one.

        Returns:
            ``[len(prompts), V]`` fp32 logits of each row's next token.
        """
        width = max(map(len, prompts))
        ids = [[self._pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._mask = torch.tensor(mask, device=self._model.device)
        self.num_forward_tokens += int(self._mask.sum())
        return self._forward(torch.tensor(ids, device=self._model.device))

    @torch.no_grad()
    def feed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Makes new rows out of the present ones and feeds each its next token.

        Args:
            tokens: ``[R]`` the token that each new row goes on with.
            parents: ``[R]`` the present row that each new row continues; a row may be named several times or never.

        Returns:
            ``[R, V]`` fp32 logits of each new row's next token.
        """
        if list(parents) != list(range(len(self._mask))):
            rows = torch.tensor(parents, device=self._model.device)
            self._cache.reorder_cache(rows)  # type: ignore[arg-type]
            self._mask = self._mask[rows]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self.num_forward_tokens += len(tokens)
        return self._forward(torch.tensor(tokens, device=self._model.device)[:, None])

    def _forward(self, ids: Tensor) -> Tensor:
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids,
            # Without padding no mask at all: the same kernels as for one conversation alone.
            attention_mask=None if bool(self._mask.all()) else self._mask,
            position_ids=positions,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


class TokenSampler:
    """Draws next tokens as TRL's arguments say, and reports the log-prob that TRL's loss will recompute.

    Args:
        args: a ``GRPOConfig`` (``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``).
        seed: of the generator; draws depend on nothing else but the logits.
        device: where the logits are.

    Raises:
        ValueError: a repetition penalty other than 1 (it depends on the tokens before, which is not computed here).
    """

    def __init__(self, args: Any, *, seed: int, device: torch.device) -> None:
        if args.repetition_penalty != 1.0:
            raise ValueError(f"expected repetition_penalty 1.0 for tree rollouts, got {args.repetition_penalty}")
        self._temperature = args.temperature
        self._warpers: list[Any] = []
        if args.top_k:
            self._warpers.append(TopKLogitsWarper(args.top_k))
        if args.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(args.top_p))
        if args.min_p is not None:
            self._warpers.append(MinPLogitsWarper(args.min_p))
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Draws one token per row.

        Args:
            logits: ``[R, V]`` fp32.

        Returns:
            ``[R]`` token ids and ``[R]`` log-probs under the tempered distribution *before* top-k, top-p and min-p
            cut it: the one that the loss uses.
        """
        scores = logits / self._temperature
        kept = scores
        for warper in self._warpers:  # none of them looks at the tokens before
            kept = warper(None, kept)
        drawn = torch.multinomial(kept.softmax(-1), 1, generator=self._generator)
        logprobs = scores.log_softmax(-1).gather(1, drawn)
        return drawn[:, 0].tolist(), logprobs[:, 0].tolist()
