"""``tree_logprobs``: log-probs of trajectories as a differentiable function of a model's parameters."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, overload

import torch
from numpy.typing import ArrayLike
from torch import nn

from harts_hf.modeling import (
    LABEL_VALUES,
    LOG_PROB,
    handed_sizes,
    is_patched,
    patch,
    unpatch,
    vocab_size_of,
    with_handed_bytes,
)
from harts_hf.planner import DEFAULT_COST, PlannerConfig
from harts_hf.planner.config import planner_config
from harts_hf.runtime.options import Context, RunOptions
from harts_hf.runtime.run import WindowRun
from harts_hf.runtime.values import TreeValues
from harts_hf.runtime.window import TreeWindow

LogProbs = list[torch.Tensor]


@overload
def tree_logprobs(
    model: nn.Module,
    trajectories: Sequence[ArrayLike],
    planner: PlannerConfig | None = None,
    temperature: float = 1.0,
    return_entropy: Literal[False] = False,
    *,
    deterministic: bool = False,
) -> LogProbs: ...


@overload
def tree_logprobs(
    model: nn.Module,
    trajectories: Sequence[ArrayLike],
    planner: PlannerConfig | None = None,
    temperature: float = 1.0,
    *,
    return_entropy: Literal[True],
    deterministic: bool = False,
) -> tuple[LogProbs, LogProbs]: ...


def tree_logprobs(
    model: nn.Module,
    trajectories: Sequence[ArrayLike],
    planner: PlannerConfig | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    *,
    deterministic: bool = False,
) -> LogProbs | tuple[LogProbs, LogProbs]:
    """Log-probs of every trajectory, each shared token computed once.

    Differentiable by the model's parameters, once. The forward runs without a graph (unless the plan's execution is
    "keep"), and the backward runs the planned forwards and backwards, so memory stays within the plan's limits. Both
    run under the autocast region of the call. Hooks of parameters see a window's whole gradient, once.

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
        ValueError: bad trajectories, a bad temperature, or a planner that is none or for several ranks.
        RuntimeError: in the backward, a second one, or one with ``create_graph=True``.
    """
    planner = planner_config(planner)
    _check_temperature(temperature)
    was_patched = is_patched(model)
    patch(model)
    if planner.cost is None:
        sizes = handed_sizes(model, next(model.parameters()).dtype)
        planner = replace(planner, cost=with_handed_bytes(DEFAULT_COST, sizes))
    try:
        window = TreeWindow(trajectories, planner, vocab_size=vocab_size_of(model))
    except ValueError:
        if not was_patched:
            unpatch(model)
        raise
    found = window_logprobs(model, window, temperature, return_entropy, deterministic=deterministic)
    return found if return_entropy else found[0]


def window_logprobs(
    model: nn.Module,
    window: TreeWindow,
    temperature: float = 1.0,
    return_entropy: bool = False,
    *,
    deterministic: bool = False,
) -> tuple[LogProbs, LogProbs]:
    """Log-probs, and entropies or none, of a window that is planned already; errors as in :func:`tree_logprobs`."""
    _check_temperature(temperature)
    patch(model)
    device = next(model.parameters()).device
    options = RunOptions(temperature=temperature, context=_autocast_as_now(device.type), deterministic=deterministic)
    names = LABEL_VALUES if return_entropy else (LOG_PROB,)
    values = window_values(model, window.to(device), names, options).rows
    rows = [torch.from_numpy(window.label_rows(i)).to(device) for i in range(window.tree.num_trajectories)]
    log_probs, entropies = ([values[name][r] for r in rows] if name in values else [] for name in LABEL_VALUES)
    return log_probs, entropies


def _check_temperature(temperature: object) -> None:
    if not isinstance(temperature, Real) or isinstance(temperature, bool) or not 0 < float(temperature) < math.inf:
        raise ValueError(f"expected a temperature above 0, got {temperature!r}")


def window_values(
    model: nn.Module, window: TreeWindow, names: tuple[str, ...], options: RunOptions | None = None
) -> TreeValues:
    """Named values and sums of a window as differentiable functions of a model's parameters, once.

    Args:
        model: patched, not wrapped for distributed training.
        window: on the model's device.
        names: what is asked for; see :mod:`harts_hf.modeling.outputs`.
        options: how forwards run.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    differentiable = torch.is_grad_enabled() and bool(parameters)
    run = WindowRun(model, window, options, mode="train" if differentiable else "score")
    tensors = _ScheduledValues.apply(run, names, *parameters)
    return _like(run.scores, tensors)


def _like(values: TreeValues, tensors: Sequence[torch.Tensor | None]) -> TreeValues:
    """Tensors by the names of ``values``, rows first; those that are None are left out."""
    found = {name: tensor for name, tensor in zip(values.names, tensors, strict=True) if tensor is not None}
    return TreeValues(
        rows={name: found[name] for name in values.rows if name in found},
        sums={name: found[name] for name in values.sums if name in found},
    )


def _autocast_as_now(device_type: str) -> Context:
    """Enters the present autocast region again: a backward, which runs forwards too, is called outside of it."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


class _ScheduledValues(torch.autograd.Function):
    """Scores in its forward; runs the rest of the schedule in its backward."""

    @staticmethod
    def forward(
        ctx: Any, run: WindowRun, names: tuple[str, ...], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        scores = run.score(names)
        return (*scores.rows.values(), *scores.sums.values())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "expected a backward without create_graph: values of a tree are differentiable once, second "
                "derivatives would be missing"
            )
        if ctx.run is None:
            raise RuntimeError("backward through tree_logprobs a second time: its schedule runs once")
        run, ctx.run = ctx.run, None
        # Sums over microbatches in fp32 or wider, like autograd's own sums within one microbatch's kernels.
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in ctx.parameters]

        inputs = (*ctx.parameters, run.handoff.anchor)

        def accumulate(scalar: torch.Tensor) -> None:
            *found, _ = torch.autograd.grad(scalar, inputs, allow_unused=True)
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total += gradient

        with _without_hooks(ctx.parameters):
            run.backward(_like(run.scores, gradients), accumulate)
        return None, None, *(t.to(p.dtype) for t, p in zip(sums, ctx.parameters, strict=True))


@contextmanager
def _without_hooks(parameters: Sequence[Any]) -> Iterator[None]:
    """Keeps tensor hooks of parameters from the gradients of microbatches; autograd calls them with the sum, after."""
    hooked = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    try:
        for parameter, _ in hooked:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks
