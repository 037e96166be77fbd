"""``tree_logprobs``: log-probs of trajectories as a differentiable function of a model's parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import nn

from harts_hf.modeling import patch
from harts_hf.planner import PlannerConfig
from harts_hf.runtime.passes import HeadOptions, forward_microbatch, run_backward, score
from harts_hf.runtime.window import TreeWindow


def tree_logprobs(
    model: nn.Module,
    trajectories: Sequence[ArrayLike],
    planner: PlannerConfig | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Any:
    """Log-probs of every trajectory, each shared token computed once.

    Differentiable by the model's parameters. Where the trajectories need more than one microbatch, the forward runs
    without a graph and the backward runs each microbatch forward and backward in turn, so memory stays that of one.

    Args:
        model: a causal language model of a supported family, not wrapped for distributed training; it is patched if
            it is not yet.
        trajectories: 1-D integer arrays of token ids, ragged; at least one, none empty.
        planner: limits of the microbatches; the defaults if None.
        temperature: logits are divided by it; above 0.
        return_entropy: whether to return entropies too.

    Returns:
        A list with, for trajectory ``i`` of ``L`` tokens, a tensor ``[L - 1]``: entry ``t`` is the log-probability of
        token ``t + 1`` given the tokens before it (float32 or wider). With ``return_entropy``, that list and one of
        the entropies of the same distributions.

    Raises:
        UnsupportedModelError: a model that is not supported.
        ValueError: bad trajectories or a bad temperature.
    """
    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    vocab_size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    window = TreeWindow(trajectories, planner, vocab_size=vocab_size)
    patch(model)
    window.to(next(model.parameters()).device)
    options = HeadOptions(temperature=temperature)
    if len(window.batches) == 1:
        log_probs, entropy = _one_microbatch(model, window, options, return_entropy)
    else:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        log_probs, entropy = _ScheduledLogProbs.apply(model, window, options, return_entropy, *parameters)
    rows = [torch.from_numpy(window.label_rows(i)).to(log_probs.device) for i in range(len(trajectories))]
    if entropy is None:
        return [log_probs[r] for r in rows]
    return [log_probs[r] for r in rows], [entropy[r] for r in rows]


def _one_microbatch(
    model: nn.Module, window: TreeWindow, options: HeadOptions, return_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch = window.batches[0]
    out = forward_microbatch(model, batch, batch.labels, options, return_entropy=return_entropy)
    rows = batch.labels.tree_rows

    def per_tree_row(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(window.tree.num_tokens).index_put((rows,), values)

    return per_tree_row(out.log_probs), None if out.entropy is None else per_tree_row(out.entropy)


class _ScheduledLogProbs(torch.autograd.Function):
    """Scores in its forward; runs the schedule of forwards and backwards in its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        model: nn.Module,
        window: TreeWindow,
        options: HeadOptions,
        return_entropy: bool,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.run = (model, window, options)
        ctx.parameters = parameters
        ctx.versions = [parameter._version for parameter in parameters]
        ctx.set_materialize_grads(False)
        scores = score(model, window, options, return_entropy=return_entropy)
        return scores.log_probs, scores.entropy

    @staticmethod
    def backward(ctx: Any, log_prob_gradients: torch.Tensor | None, entropy_gradients: torch.Tensor | None) -> Any:
        model, window, options = ctx.run
        if [parameter._version for parameter in ctx.parameters] != ctx.versions:
            raise RuntimeError("the model's parameters were changed in place between tree_logprobs and its backward")
        if log_prob_gradients is None:
            assert entropy_gradients is not None
            log_prob_gradients = torch.zeros_like(entropy_gradients)
        # Sums over microbatches in fp32 or wider, like autograd's own sums within one microbatch's kernels.
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in ctx.parameters]

        def accumulate(scalar: torch.Tensor) -> None:
            for total, gradient in zip(
                sums, torch.autograd.grad(scalar, ctx.parameters, allow_unused=True), strict=True
            ):
                if gradient is not None:
                    total += gradient

        run_backward(model, window, log_prob_gradients, entropy_gradients, accumulate, options)
        return None, None, None, None, *(t.to(p.dtype) for t, p in zip(sums, ctx.parameters, strict=True))
