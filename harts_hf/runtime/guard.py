"""Notices that a model was changed between the forwards and backwards of one window."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# Values of each tensor that are compared bit by bit; tensors up to twice as large are compared whole.
SAMPLES = 256


class ModelChangedError(RuntimeError):
    """The model is not the one that ran the window's first forward: gradients would be those of neither."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Known:
    """A parameter as it was."""

    name: str
    parameter: nn.Parameter
    version: int | None
    address: int | None
    requires_grad: bool


class ModelGuard:
    """A model as it is now, to be compared with later.

    Seen are: parameters changed in place (an optimizer's step, ``load_state_dict``), given other storage
    (``p.data = ...``), frozen or unfrozen (another adapter); modules replaced, added, removed or of another class
    (``unpatch``, an injected adapter); and, by a sample of bits, values of parameters that changed past autograd's
    counters (``p.data.copy_``, a merged adapter). A few values changed so in a large parameter may escape the sample.

    Not a change is what a step itself does: FSDP2 and ZeRO-3 exchange the tensors that modules hold (their own shards
    are watched instead, where they can be seen), and forwards may write buffers, such as counts of tokens. Only
    buffers that are constants are watched: floating-point ones that are not saved, such as rotary frequencies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [(module, type(module)) for module in model.modules()]
        parameters = list(model.named_parameters())
        # After a forward FSDP2 may leave parameters whole; those are copies, made anew in each forward.
        is_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
        watched = [(n, p) for n, p in parameters if isinstance(p, DTensor) or not is_fsdp]
        rewritten = _rewritten_by_adapters(model)
        self._parameters = [
            _Known(
                name=name,
                parameter=parameter,
                version=None if parameter in rewritten else _version(parameter),
                address=_address(parameter),
                requires_grad=parameter.requires_grad,
            )
            for name, parameter in watched
        ]
        self._registered = None if is_fsdp else [parameter for _, parameter in parameters]
        self._bits = _sample(self._tensors())

    def check(self) -> None:
        """Compares counters and addresses; no device is waited for.

        Raises:
            ModelChangedError: a parameter was changed.
        """
        for known in self._parameters:
            parameter = known.parameter
            if known.version is not None and _version(parameter) != known.version:
                _fail(f"{known.name} was changed in place")
            if _address(parameter) != known.address:
                _fail(f"{known.name} was given other storage")
            if parameter.requires_grad != known.requires_grad:
                _fail(f"requires_grad of {known.name} was set to {parameter.requires_grad}")

    def check_all(self) -> None:
        """:meth:`check`, and compares modules and bits.

        Raises:
            ModelChangedError: a parameter, a constant or a module was changed.
        """
        self.check()
        modules = list(self._model.modules())
        if len(modules) != len(self._modules):
            _fail(f"it has {len(modules)} modules instead of {len(self._modules)}")
        for module, (before, kind) in zip(modules, self._modules, strict=True):
            if module is not before or type(module) is not kind:
                _fail(f"a {kind.__name__} was replaced by another module or its class changed (patch, unpatch)")
        if self._registered is not None:
            parameters = list(self._model.parameters())
            same = len(parameters) == len(self._registered)
            if not same or any(a is not b for a, b in zip(parameters, self._registered, strict=True)):
                _fail("it has other parameters")
        now = _sample(self._tensors())
        if now.keys() != self._bits.keys():
            _fail("it is on other devices or of other dtypes")
        for key, bits in now.items():
            if not torch.equal(bits, self._bits[key]):
                _fail(f"values of {_first_difference(self._tensors(), key, bits, self._bits[key])} were replaced")

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        parameters: list[tuple[str, torch.Tensor]] = [(known.name, known.parameter) for known in self._parameters]
        return parameters + _constants(self._model)


def _constants(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{prefix}.{name}", buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set and buffer.is_floating_point()
    ]


def _fail(what: str) -> None:
    raise ModelChangedError(
        f"expected the same model from a window's first forward to its last backward, but {what}: the gradients "
        "would be wrong"
    )


def _shard(tensor: Any) -> torch.Tensor:
    """What this rank keeps of a tensor throughout a step."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return getattr(tensor, "ds_tensor", tensor)


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor")


def _rewritten_by_adapters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that PEFT parametrizes in each forward: setting one to itself counts as a change in place."""
    wrappers = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    return {parameter for module in wrappers for parameter in module.base_layer.parameters()}  # type: ignore[union-attr]


def _version(parameter: nn.Parameter) -> int:
    # ZeRO-3 gathers into the parameter itself.
    return 0 if hasattr(parameter, "ds_tensor") else parameter._version


def _address(parameter: nn.Parameter) -> int | None:
    return None if _is_sharded(parameter) else parameter.data_ptr()


Key = tuple[torch.device, torch.dtype]


def _sample(tensors: list[tuple[str, torch.Tensor]]) -> dict[Key, torch.Tensor]:
    """Bits of evenly spaced values of all tensors, by device and dtype."""
    return {key: torch.cat(parts).view(torch.uint8) for key, parts in _parts(tensors)[0].items()}


def _parts(
    tensors: list[tuple[str, torch.Tensor]],
) -> tuple[dict[Key, list[torch.Tensor]], dict[Key, list[str]]]:
    parts, names = defaultdict(list), defaultdict(list)
    for name, tensor in tensors:
        shard = _shard(tensor).detach()
        if shard.is_meta or not shard.numel():
            continue
        # An odd step does not stay in one column of a matrix whose sides are even.
        step = max(1, shard.numel() // SAMPLES) | 1
        parts[shard.device, shard.dtype].append(shard.reshape(-1)[::step])
        names[shard.device, shard.dtype].append(name)
    return parts, names


def _first_difference(
    tensors: list[tuple[str, torch.Tensor]], key: Key, bits: torch.Tensor, before: torch.Tensor
) -> str:
    """The name of a tensor that differs."""
    parts, names = _parts(tensors)
    if bits.shape == before.shape:
        place = int((bits != before).nonzero()[0]) // key[1].itemsize
        for name, part in zip(names[key], parts[key], strict=True):
            if place < len(part):
                return name
            place -= len(part)
    return "a buffer"  # of another size
