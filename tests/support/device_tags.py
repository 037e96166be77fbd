"""A second device for machines that have none: tensors keep their values on the CPU, and storages are tagged."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import harts_hf.kernels.attention.api as attention
import harts_hf.kernels.conv.api as conv
import harts_hf.kernels.gather.api as gather
import harts_hf.kernels.linear_attention.api as linear_attention
import harts_hf.kernels.logprobs.api as logprobs

DEVICE = torch.device("cuda", 0)
_ATEN = torch.ops.aten
# Reads and writes that a GPU does with indices on the CPU, and the one operation that crosses devices.
_INDEXING = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)
# Elsewhere a number on the CPU (a tensor of no dimension) may meet tensors on a GPU.
_NO_NUMBERS = (_ATEN.cat, _ATEN.stack)
# Operations whose result the CPU has to know, so that it waits for a GPU.
_READING = (
    _ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.equal, _ATEN.masked_select, _ATEN.unique_consecutive,
    _ATEN._unique2, _ATEN.unique_dim,
)  # fmt: skip


class DeviceMismatchError(RuntimeError):
    """What a GPU would refuse."""


class Waits:
    """Where the CPU would have waited for a GPU so far: it read something that is there.

    Attributes:
        places: how often, by ``file:line`` of the package, innermost last.
    """

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()

    def note(self) -> None:
        """One more, here."""
        frame = sys._getframe(1)
        while frame is not None and "/harts_hf/" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = f"{frame.f_code.co_filename.rpartition('/harts_hf/')[2]}:{frame.f_lineno}" if frame else "elsewhere"
        self.places[place] += 1


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Tensors moved to or made on a CUDA device say that they are there, and do not mix with others.

    What would wait for a GPU is counted. The portable backends of the operations run on it. What depends on
    ``Tensor.is_cuda``, and autocast, stay those of the CPU.
    """
    for api in (attention, conv, gather, linear_attention, logprobs):
        monkeypatch.setattr(api, "_BY_DEVICE", {"cpu": "torch", "cuda": "torch"})
    waits = Waits()
    tagging = _Tagging(waits)
    moving = _Moving(tagging)
    run_engine = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        tagging.is_inside = False
        with moving:  # which torch leaves before it runs a backward
            return run_engine(*args, **kwargs)

    # On the class, since torch reads it in places where function modes are off.
    monkeypatch.setattr(torch.Tensor, "device", property(_device_of))
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_backward)
    with tagging, moving:
        yield waits


def is_tagged(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the pretended device."""
    return hasattr(tensor.untyped_storage(), "harts_tag")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in an object, however deep, but for what tables keep of themselves on the CPU."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    parts = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return tensors_of([part for name, part in parts.items() if name != "_host"])


def _device_of(tensor: torch.Tensor) -> torch.device:
    return DEVICE if is_tagged(tensor) else torch._C.TensorBase.device.__get__(tensor)


def _tag(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if wanted:
        storage.harts_tag = True
    elif hasattr(storage, "harts_tag"):
        del storage.harts_tag
    return tensor


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


class _Tagging(TorchDispatchMode):
    """Refuses operations on both devices; what operations make is where their arguments are.

    Attributes:
        is_inside: whether a function of torch's own runs on the device, which makes there what it needs.
    """

    is_inside = False

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args, kwargs)
        tagged = any(map(is_tagged, given))
        if tagged:
            self._check(func, args, given)
            if func.overloadpacket in _READING or (
                func.overloadpacket in _INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
            ):
                self.waits.note()
        result = func(*args, **kwargs)
        storages = {id(tensor.untyped_storage()) for tensor in given}
        for tensor in _tensors(result):
            if id(tensor.untyped_storage()) not in storages:
                _tag(tensor, tagged or (self.is_inside and not given))
        return result

    def _check(self, func: Any, args: Any, given: list[torch.Tensor]) -> None:
        packet = func.overloadpacket
        if packet is _ATEN.copy_:
            return
        strangers = [t for t in given if not is_tagged(t) and (t.dim() or packet in _NO_NUMBERS)]
        if packet in _INDEXING and is_tagged(args[0]):
            strangers = [t for t in strangers if not any(t is index for index in args[1])]
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and not is_tagged(args[0]):
            strangers.append(args[0])
        if strangers:
            shapes = [list(tensor.shape) for tensor in strangers]
            raise DeviceMismatchError(f"{func} on {DEVICE} was given tensors on the CPU, of shapes {shapes}")


class _Moving(TorchFunctionMode):
    """Makes tensors on the device, and moves them by copying."""

    def __init__(self, tagging: _Tagging) -> None:
        super().__init__()
        self._tagging = tagging

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and is_tagged(args[0]):
            raise DeviceMismatchError(f"{func.__name__} of a tensor on {DEVICE}")
        if func is torch.Tensor.tolist and is_tagged(args[0]):
            self._tagging.waits.note()
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            result = _moved(func, *args, **kwargs)
            if is_tagged(args[0]) and not is_tagged(result):
                self._tagging.waits.note()
            return result
        device = kwargs.pop("device", None)
        self._tagging.is_inside = device is None and any(map(is_tagged, _tensors(args, kwargs)))
        try:
            result = func(*args, **kwargs)
        finally:
            self._tagging.is_inside = False
        if device is not None:
            _tag(result, torch.device(device).type == "cuda")
        elif func in (torch.Tensor.new_tensor, torch.Tensor.__deepcopy__) and is_tagged(args[0]):
            _tag(result, True)
        return result


def _moved(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    copy, dtype = kwargs.pop("copy", False), None
    other = kwargs.get("other", args[0] if args else None)
    if func is not torch.Tensor.to:
        target: Any = DEVICE if func is torch.Tensor.cuda else torch.device("cpu")
    elif isinstance(other, torch.Tensor):
        target, dtype = DEVICE if is_tagged(other) else torch.device("cpu"), other.dtype
    else:
        target, dtype, *_ = torch._C._nn._parse_to(*args[:3], **kwargs)
    result = tensor.to(dtype or tensor.dtype, copy=copy)
    if target is None or (target.type == "cuda") == is_tagged(tensor):
        return result
    if result.untyped_storage() is tensor.untyped_storage():
        result = result.clone()
    return _tag(result, target.type == "cuda")
