"""Makes a stock Transformers model run on rollout trees, and back."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling.adapters import check_adapters
from harts_hf.modeling.checks import check_model, check_versions
from harts_hf.modeling.families import Family, family_of
from harts_hf.modeling.forwards import check_head, has_tree_head, head_forward, tree_forward
from harts_hf.modeling.fused import FusedModule, find_fused
from harts_hf.modeling.mixers import TreeMixer, tree_attention_class, tree_linear_class
from harts_hf.modeling.outputs import HEAD_VALUES, RowValue, Sum
from harts_hf.modeling.routers import router_outputs
from harts_hf.modeling.routing import unwatch_routers, watch_routers

# Where PEFT's ModulesToSaveWrapper has the copies that it trains.
SAVED_COPIES = "modules_to_save"


def patch(model: nn.Module) -> nn.Module:
    """Teaches one model instance to run on rollout trees, in place.

    Parameter names, buffers and the configuration stay as they are, and a call without a plan is bit for bit the stock
    model's (generation, caches and evaluation go on working). Patching twice is patching once.

    Args:
        model: a causal language model of a supported family, or a PEFT model around one (LoRA).

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: a family, layer, setting or library version that is not supported; the message names it.
    """
    base = causal_lm_of(model)
    check_adapters(model)
    if is_patched(base):
        check_head(base)
        return model
    check_versions()
    family = family_of(base)
    check_model(base, family)
    mixers = _find_mixers(base, family)
    for module, tree_class in [*mixers, *find_fused(base, family)]:
        module.__class__ = tree_class
    _install(base.get_output_embeddings(), head_forward)
    _install(base, tree_forward)
    watch_routers(base)
    base._harts_outputs = router_outputs(base)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undoes :func:`patch`, in place; the model is the stock model again. Does nothing to an unpatched model."""
    base = causal_lm_of(model)
    if not is_patched(base):
        return model
    head = base.get_output_embeddings()
    installed = [base, head] if has_tree_head(base) else [base]
    for module in installed:
        if not hasattr(getattr(module.forward, "__func__", None), "_harts_forward"):
            raise ValueError(
                f"expected the forward that patch installed on {type(module).__name__}, got another one: undo what "
                "was put over it first"
            )
    exchanged = [module for module in base.modules() if isinstance(module, TreeMixer | FusedModule)]
    for module in exchanged:
        if "stock" not in vars(type(module)):
            raise ValueError(
                f"expected the class that patch gave a {type(module).__name__}, got one that was put over it "
                "(FSDP2's): unpatch before the model is sharded"
            )
    for module in installed:
        _uninstall(module)
    unwatch_routers(base)
    del base._harts_outputs
    for module in exchanged:
        module.__class__ = type(module).stock  # type: ignore[assignment]
    return model


def add_output(model: nn.Module, output: RowValue | Sum) -> None:
    """Lets a patched model answer for one more name; forgotten by :func:`harts_hf.unpatch`.

    Raises:
        ValueError: an unpatched model, a name that is taken, or no such module.
    """
    base = causal_lm_of(model)
    if not is_patched(base):
        raise ValueError("expected a patched model, got an unpatched one: call harts_hf.patch on it")
    if output.name in HEAD_VALUES or output.name in base._harts_outputs:
        raise ValueError(f"expected a new name of an output, got {output.name!r}, which the model has")
    if isinstance(output, RowValue):
        try:
            base.get_submodule(output.module)
        except AttributeError:
            raise ValueError(
                f"expected a module {output.module!r} in {type(base).__name__} for the value {output.name!r}, got none"
            ) from None
    base._harts_outputs = {**base._harts_outputs, output.name: output}


def _install(module: Any, forward: Callable[..., Any]) -> None:
    """Puts a forward on an instance; a bound method, so that deep copies are bound to the copy."""
    installed = _with_stock_signature(forward, module.forward)
    module._harts_stock_forward = module.forward
    module._harts_had_own_forward = "forward" in vars(module)
    module.forward = MethodType(installed, module)


def _with_stock_signature(forward: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with the parameters of ``stock``: ``generate`` reads them to decide what it passes."""

    def installed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    def named(parameter: inspect.Parameter) -> bool:
        return parameter.kind is not inspect.Parameter.VAR_KEYWORD

    given = list(inspect.signature(stock).parameters.values())
    own = [p for p in inspect.signature(forward).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [parameter for parameter in given if not named(parameter)]
    installed.__signature__ = inspect.Signature([this, *filter(named, given), *own, *rest])  # type: ignore[attr-defined]
    installed.__doc__ = stock.__doc__
    installed._harts_forward = True  # type: ignore[attr-defined]
    return installed


def _uninstall(module: Any) -> None:
    if module._harts_had_own_forward:
        module.forward = module._harts_stock_forward
    else:
        del module.forward
    del module._harts_stock_forward, module._harts_had_own_forward


def is_patched(model: nn.Module) -> bool:
    """Whether :func:`patch` has been applied to a causal language model (or the one inside a PEFT model)."""
    return "_harts_stock_forward" in vars(causal_lm_of(model))


def causal_lm_of(model: nn.Module) -> Any:
    """The causal language model itself, inside a PEFT model if there is one.

    Raises:
        UnsupportedModelError: another wrapper.
    """
    if type(model).__name__ == "OptimizedModule":
        raise UnsupportedModelError("expected an uncompiled model, got one from torch.compile")
    if isinstance(model, nn.DataParallel):
        raise UnsupportedModelError("expected one model per process, got torch.nn.DataParallel")
    is_peft = bool(getattr(model, "peft_config", None)) and hasattr(model, "get_base_model")
    return model.get_base_model() if is_peft else model  # type: ignore[operator]


def vocab_size_of(model: nn.Module) -> int:
    """How many token ids the embedding knows; also of one inside an adapter's wrapper, or whose weight is sharded."""
    modules = causal_lm_of(model).get_input_embeddings().modules()
    return next(module.num_embeddings for module in modules if isinstance(module, nn.Embedding))


def _find_mixers(model: Any, family: Family) -> list[tuple[nn.Module, type[nn.Module]]]:
    linear: Any = family.class_named(family.linear_mixer)
    full: Any = family.class_named(family.full_mixer)
    named = [(name, module) for name, module in model.named_modules() if type(module) in (linear, full)]
    found = [
        # mypy does not see that classes are hashable.
        (module, tree_linear_class(linear, family) if type(module) is linear else tree_attention_class(full, family))  # type: ignore[arg-type]
        for _, module in named
    ]
    # PEFT keeps the original of a mixer that it trains whole beside the copy, and runs one of them.
    count = sum(f".{SAVED_COPIES}." not in name for name, _ in named)
    expected = len(model.config.layer_types)
    if count != expected:
        raise UnsupportedModelError(
            f"expected {expected} token mixers ({linear.__name__}, {full.__name__}) in {type(model).__name__}, found "
            f"{count}"
        )
    replaced = [type(module).__name__ for module, _ in found if "forward" in vars(module)]
    if replaced:
        raise UnsupportedModelError(
            f"expected mixers with the forward of their class, got a replaced one on {replaced[0]} (offloading hooks "
            "and other patches are not supported)"
        )
    return found
