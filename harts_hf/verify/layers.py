"""An oracle for models whose float64 copy does not fit: one layer at a time is wide, and runs again in backwards."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harts_hf.modeling.patching import causal_lm_of

# Bytes per parameter that the oracle holds all the time: the sum of gradients, in float32.
LAYERED_BYTES = 4


class _Widened(torch.autograd.Function):
    """A parameter in float64, whose gradient goes into a sum elsewhere."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, parameter: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        ctx.total = total
        return parameter.double()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        if ctx.total is not None:
            ctx.total.add_(gradient)
        return None, None, None


class _WidenedExperts:
    """Experts' matrices, one parameter: each is widened when it is asked for, as Transformers' eager experts do.

    Widened at once, each expert's backward would be a gradient of all experts' matrices, nearly all of it zeros: in a
    mixture of 128 experts that is most of the oracle's time.
    """

    def __init__(self, anchor: torch.Tensor, parameter: torch.Tensor, total: torch.Tensor | None) -> None:
        self._anchor, self._parameter, self._total = anchor, parameter, total

    def __getitem__(self, expert: torch.Tensor | int) -> torch.Tensor:
        index = int(expert)
        total = None if self._total is None else self._total[index]
        widened: torch.Tensor = _Widened.apply(self._anchor, self._parameter[index], total)
        return widened


class LayeredOracle:
    """Runs a model in float64 while only one layer's parameters are held in float64.

    Args:
        model: a causal language model, unpatched. It is left as it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def wide(self, sums: Mapping[str, torch.Tensor], *, with_routers: bool = False) -> Iterator[None]:
        """Inside, forwards are in float64, and backwards add the gradient of each named parameter to its entry.

        Layers run again in the backward, whatever mode the model is in; gradients of parameters themselves stay None.

        Args:
            sums: by the name of a parameter, in any dtype; parameters without an entry are not differentiated.
            with_routers: whether losses also depend on what routers give, which leaves a layer past its result.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        base: Any = causal_lm_of(self.model)
        anchor = torch.zeros((), device=next(self.model.parameters()).device, requires_grad=True)

        def total_of(parameter: nn.Parameter) -> torch.Tensor | None:
            return sums.get(names[id(parameter)])

        with ExitStack() as stack:
            if hasattr(base, "set_experts_implementation"):
                before = base.config._experts_implementation
                base.set_experts_implementation("eager")  # grouped products refuse float64
                stack.callback(base.set_experts_implementation, before)
            for module, is_layer in _units(base):
                again = is_layer and ("every tensor" if with_routers else "result")
                stack.enter_context(_running_wide(module, anchor, total_of, again=again))
            yield


def _units(base: Any) -> list[tuple[nn.Module, bool]]:
    """The modules that are widened, each by itself: layers, and what has parameters or buffers outside them."""
    layers = list(base.base_model.layers)
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [
        module
        for module in base.modules()
        if id(module) not in inside and (_own(module._parameters) or _own(module._buffers))
    ]
    return [*((layer, True) for layer in layers), *((module, False) for module in outside)]


def _own(tensors: Mapping[str, torch.Tensor | None]) -> bool:
    return any(tensor is not None for tensor in tensors.values())


@contextmanager
def _running_wide(module: Any, anchor: torch.Tensor, total_of: Any, *, again: str | bool) -> Iterator[None]:
    """Inside, the module's forward sees float64 in place of its parameters and buffers.

    Args:
        module: a layer, or one outside layers.
        anchor: requires a gradient.
        total_of: the sum of a parameter's gradients.
        again: whether it runs again in the backward: with gradients of its "result" alone, or of "every tensor" that
            it made, which Python has to note one by one (a third of the time of the oracle).
    """
    stock, had_own = module.forward, "forward" in vars(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _exchanged(module, anchor, total_of):
            return stock(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (again and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        if again == "result" and args and args[0].requires_grad:  # hidden states
            return checkpoint(partial(run, **kwargs), *args, use_reentrant=True)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        if had_own:
            module.forward = stock
        else:
            del module.forward


@contextmanager
def _exchanged(module: nn.Module, anchor: torch.Tensor, total_of: Any) -> Iterator[None]:
    """Inside, plain float64 tensors stand where parameters and floating-point buffers of all submodules stood."""
    kept: list[tuple[MutableMapping[str, Any], Any, dict[str, Any]]] = []
    with ExitStack() as stack:
        for one in module.modules():
            experts = getattr(one, "num_experts", None)

            def widened(parameter: Any, experts: Any = experts) -> Any:
                # Read by nothing but an expert's number.
                by_expert = parameter.dim() == 3 and len(parameter) == experts
                widen = _WidenedExperts if by_expert else _Widened.apply
                return widen(anchor, parameter.detach(), total_of(parameter) if parameter.requires_grad else None)

            for own, wide in (
                (one._parameters, widened),
                (one._buffers, lambda b: b.double() if b.is_floating_point() else b),
            ):
                before = dict(own)
                kept.append((own, one, before))
                own.clear()
                for name, tensor in before.items():
                    object.__setattr__(one, name, None if tensor is None else wide(tensor))
        stack.callback(_put_back, kept)
        yield


def _put_back(kept: list[tuple[MutableMapping[str, Any], Any, dict[str, Any]]]) -> None:
    for own, module, before in kept:
        for name in before:
            del module.__dict__[name]
        own.update(before)
