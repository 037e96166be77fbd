"""``tree_logprobs``: log-probs of trajectories as a differentiable function of a model's parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import nn
from torch.autograd.function import once_differentiable

from harts_hf.modeling import handed_sizes, is_patched, patch, unpatch, vocab_size_of, with_handed_bytes
from harts_hf.planner import CostModel, PlannerConfig
from harts_hf.runtime.run import Coefficients, Context, HeadOptions, WindowRun
from harts_hf.runtime.window import TreeWindow


def tree_logprobs(
    model: nn.Module,
    trajectories: Sequence[ArrayLike],
    planner: PlannerConfig | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    *,
    deterministic: bool = False,
) -> Any:
    """Log-probs of every trajectory, each shared token computed once.

    Differentiable by the model's parameters, once. The forward runs without a graph (unless the plan's execution is
    "keep"), and the backward runs the planned forwards and backwards, so memory stays within the plan's limits. Both
    run under the autocast region of the call.

    Args:
        model: a causal language model of a supported family, not wrapped for distributed training; it is patched if
            it is not yet.
        trajectories: 1-D integer arrays of token ids, ragged; at least one, none empty.
        planner: limits of the microbatches; the defaults if None. Without a cost model, handed bytes are this model's
            and times the default ones.
        temperature: logits are divided by it; above 0.
        return_entropy: whether to return entropies too.
        deterministic: whether attention on a GPU has to give the same bits in every run (a slower backend).

    Returns:
        A list with, for trajectory ``i`` of ``L`` tokens, a tensor ``[L - 1]``: entry ``t`` is the log-probability of
        token ``t + 1`` given the tokens before it (float32 or wider). With ``return_entropy``, that list and one of
        the entropies of the same distributions.

    Raises:
        UnsupportedModelError: a model that is not supported.
        ValueError: bad trajectories or a bad temperature.
    """
    was_patched = is_patched(model)
    patch(model)
    planner = planner or PlannerConfig()
    if planner.cost is None:
        sizes = handed_sizes(model, next(model.parameters()).dtype)
        planner = replace(planner, cost=with_handed_bytes(CostModel(), sizes))
    try:
        window = TreeWindow(trajectories, planner, vocab_size=vocab_size_of(model))
    except ValueError:
        if not was_patched:
            unpatch(model)
        raise
    return window_logprobs(model, window, temperature, return_entropy, deterministic=deterministic)


def window_logprobs(
    model: nn.Module,
    window: TreeWindow,
    temperature: float = 1.0,
    return_entropy: bool = False,
    *,
    deterministic: bool = False,
) -> Any:
    """:func:`tree_logprobs` on a window that is planned already; the same results and errors."""
    if not temperature > 0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    patch(model)
    device = next(model.parameters()).device
    window.to(device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    differentiable = torch.is_grad_enabled() and bool(parameters)
    run = WindowRun(
        model,
        window,
        HeadOptions(temperature=temperature),
        context=_autocast_as_now(device.type),
        deterministic=deterministic,
        mode="train" if differentiable else "score",
    )
    log_probs, entropy = _ScheduledLogProbs.apply(run, return_entropy, *parameters)
    rows = [torch.from_numpy(window.label_rows(i)).to(log_probs.device) for i in range(window.tree.num_trajectories)]
    if entropy is None:
        return [log_probs[r] for r in rows]
    return [log_probs[r] for r in rows], [entropy[r] for r in rows]


def _autocast_as_now(device_type: str) -> Context:
    """Enters the present autocast region again: a backward, which runs forwards too, is called outside of it."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


class _ScheduledLogProbs(torch.autograd.Function):
    """Scores in its forward; runs the rest of the schedule in its backward."""

    @staticmethod
    def forward(
        ctx: Any, run: WindowRun, return_entropy: bool, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.run = run
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        scores = run.score(return_entropy=return_entropy)
        return scores.log_probs, scores.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_gradients: torch.Tensor | None, entropy_gradients: torch.Tensor | None) -> Any:
        if ctx.run is None:
            raise RuntimeError("backward through tree_logprobs a second time: its schedule runs once")
        run, ctx.run = ctx.run, None
        if log_prob_gradients is None:
            assert entropy_gradients is not None
            log_prob_gradients = torch.zeros_like(entropy_gradients)
        # Sums over microbatches in fp32 or wider, like autograd's own sums within one microbatch's kernels.
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in ctx.parameters]

        inputs = (*ctx.parameters, run.handoff.anchor)

        def accumulate(scalar: torch.Tensor) -> None:
            *gradients, _ = torch.autograd.grad(scalar, inputs, allow_unused=True)
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total += gradient

        run.backward(Coefficients(log_probs=log_prob_gradients, entropy=entropy_gradients), accumulate)
        return None, None, *(t.to(p.dtype) for t, p in zip(sums, ctx.parameters, strict=True))
