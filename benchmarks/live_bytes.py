"""Counts the bytes of live tensors, for machines whose allocator keeps no such count (CPUs)."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made inside this mode and that are still alive.

    A storage counts from the operation that returns it until it is freed; what an operation holds only while it runs
    is not seen.

    Attributes:
        now: live bytes.
        peak: the most since :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = WeakIdKeyDictionary()

    def restart(self) -> None:
        """Forgets the peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage in self._sizes:
                continue
            if given is None:
                leaves = tree_leaves((args, kwargs))
                given = {id(x.untyped_storage()) for x in leaves if isinstance(x, torch.Tensor)}
            if id(storage) not in given:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._sizes[storage] = size
        weakref.finalize(storage, self._remove, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _remove(self, size: int) -> None:
        self.now -= size
