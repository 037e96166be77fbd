"""Notices that a model was changed between the forwards and backwards of one window."""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harts_hf.modeling.walking import named_modules

# Values of each tensor that are compared bit by bit; tensors up to twice as large are compared whole.
SAMPLES = 256


class ModelChangedError(RuntimeError):
    """The model is not the one that ran the window's first forward: gradients would be those of neither."""


class _Facts(NamedTuple):
    """What costs nothing to know about a parameter; None where it changes by itself."""

    version: int | None
    address: int | None
    requires_grad: bool


class _Bits(NamedTuple):
    """Bytes of samples of tensors: those of ``names[i]`` end at ``ends[i]``."""

    names: list[str]
    ends: list[int]
    values: torch.Tensor


Key = tuple[torch.device, torch.dtype]
Modules = Mapping[str, nn.Module]


class ModelGuard:
    """A model as it is now, to be compared with later.

    Seen are: parameters changed in place (an optimizer's step, ``load_state_dict``), given other storage
    (``p.data = ...``), frozen or unfrozen (another adapter); modules replaced, added, removed or of another class
    (``unpatch``, an injected adapter); and, by a sample of bits, values of parameters that changed past autograd's
    counters (``p.data.copy_``, a merged adapter). A few values changed so in a large parameter may escape the sample.

    Not a change is what a step itself does: FSDP2 and ZeRO-3 exchange the tensors that modules hold (their own shards
    are watched instead, where they can be seen), PEFT registers parameters anew in another order, and forwards may
    write buffers, such as counts of tokens. Only buffers that are constants are watched: floating-point ones that are
    not saved, such as rotary frequencies.

    Args:
        model: without a wrapper or in one.
        all_buffers: whether floating-point buffers that are saved are watched too, such as the bias of a router.
    """

    def __init__(self, model: nn.Module, *, all_buffers: bool = False) -> None:
        self._model, self._all_buffers = model, all_buffers
        modules = named_modules(model)  # gone through once
        self._modules = [(module, type(module)) for module in modules.values()]
        # After a forward FSDP2 may leave parameters whole; those are copies, made anew in each forward.
        is_fsdp = any(isinstance(module, FSDPModule) for module in modules.values())
        parameters = _parameters(modules)
        self._registered = None if is_fsdp else set(parameters.values())
        self._rewritten = _rewritten_by_adapters(modules)
        self._facts = {
            (name, parameter): self._facts_of(parameter)
            for name, parameter in parameters.items()
            if isinstance(parameter, DTensor) or not is_fsdp
        }
        self._bits = self._sample(modules)

    def check(self) -> None:
        """Compares counters and addresses; no device is waited for.

        Raises:
            ModelChangedError: a parameter was changed.
        """
        for (name, parameter), before in self._facts.items():
            now = self._facts_of(parameter)
            if now.version != before.version:
                _fail(f"{name} was changed in place")
            if now.address != before.address:
                _fail(f"{name} was given other storage")
            if now.requires_grad != before.requires_grad:
                _fail(f"requires_grad of {name} was set to {now.requires_grad}")

    def check_all(self) -> None:
        """:meth:`check`, and compares modules and bits.

        Raises:
            ModelChangedError: a parameter, a constant or a module was changed.
        """
        self.check()
        named = named_modules(self._model)
        modules = list(named.values())
        if len(modules) != len(self._modules):
            _fail(f"it has {len(modules)} modules instead of {len(self._modules)}")
        for module, (before, kind) in zip(modules, self._modules, strict=True):
            if module is not before or type(module) is not kind:
                _fail(f"a {kind.__name__} was replaced by another module or its class changed (patch, unpatch)")
        if self._registered is not None and set(_parameters(named).values()) != self._registered:
            _fail("it has other parameters")
        now = self._sample(named)
        if _layout(now) != _layout(self._bits):
            _fail("its constants are on other devices, or of other dtypes or shapes")
        # Compared where they are, and waited for once on each device.
        differ = {key: (bits.values != self._bits[key].values).any() for key, bits in now.items()}
        for device in {device for device, _ in differ}:
            keys = [key for key in differ if key[0] == device]
            for key, found in zip(keys, torch.stack([differ[key] for key in keys]).tolist(), strict=True):
                if found:
                    _fail(f"values of {_first_difference(now[key], self._bits[key].values)} were replaced")

    def _facts_of(self, parameter: nn.Parameter) -> _Facts:
        is_gathered = hasattr(parameter, "ds_tensor")  # ZeRO-3 gathers into the parameter itself
        return _Facts(
            version=None if is_gathered or parameter in self._rewritten else parameter._version,
            address=None if is_gathered or isinstance(parameter, DTensor) else parameter.data_ptr(),
            requires_grad=parameter.requires_grad,
        )

    def _sample(self, modules: Modules) -> dict[Key, _Bits]:
        """Evenly spaced values of all watched tensors, by device and dtype: one comparison for each."""
        parts: dict[Key, list[torch.Tensor]] = {}
        names: dict[Key, list[str]] = {}
        for name, tensor in [*self._facts, *_buffers(modules, saved=self._all_buffers)]:
            shard = _shard(tensor).detach()
            if shard.is_meta or not shard.numel():
                continue
            # An odd step does not stay in one column of a matrix whose sides are even.
            step = max(1, shard.numel() // SAMPLES) | 1
            parts.setdefault((shard.device, shard.dtype), []).append(_every(step, shard))
            names.setdefault((shard.device, shard.dtype), []).append(name)
        return {
            key: _Bits(names[key], list(accumulate(s.nbytes for s in samples)), torch.cat(samples).view(torch.uint8))
            for key, samples in parts.items()
        }


def _parameters(modules: Modules) -> dict[str, nn.Parameter]:
    """By full name, each once, as ``named_parameters`` has them."""
    found: dict[nn.Parameter, str] = {}
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
    return {name: parameter for parameter, name in found.items()}


def _buffers(modules: Modules, *, saved: bool) -> list[tuple[str, torch.Tensor]]:
    """Floating-point ones that are not saved, which are constants; those that are saved, too, if ``saved``."""
    return [
        (f"{prefix}.{name}", buffer)
        for prefix, module in modules.items()
        for name in sorted(module._buffers if saved else module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(name)) is not None and buffer.is_floating_point()
    ]


def _every(step: int, tensor: torch.Tensor) -> torch.Tensor:
    """Each ``step``-th value, by one operation where memory has them in order: there are hundreds of tensors."""
    if not tensor.is_contiguous():
        return tensor.reshape(-1)[::step]
    return tensor.as_strided((-(-tensor.numel() // step),), (step,))


def _fail(what: str) -> None:
    raise ModelChangedError(
        f"expected the same model from a window's first forward to its last backward, but {what}: the gradients "
        "would be wrong"
    )


def _shard(tensor: Any) -> torch.Tensor:
    """What this rank keeps of a tensor throughout a step."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)


def _rewritten_by_adapters(modules: Modules) -> set[nn.Parameter]:
    """Parameters that PEFT parametrizes in each forward: setting one to itself counts as a change in place."""
    wrappers = [module for module in modules.values() if type(module).__name__ == "ParamWrapper"]
    return {parameter for module in wrappers for parameter in module.base_layer.parameters()}  # type: ignore[union-attr]


def _layout(sample: dict[Key, _Bits]) -> list[tuple[Key, list[str], list[int]]]:
    return [(key, bits.names, bits.ends) for key, bits in sample.items()]


def _first_difference(bits: _Bits, before: torch.Tensor) -> str:
    """The name of the tensor that differs first."""
    return bits.names[bisect_right(bits.ends, int((bits.values != before).nonzero()[0]))]
