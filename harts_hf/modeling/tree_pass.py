"""What one forward of a patched model is given: a microbatch, what is wanted of it, and the run that it is part of."""

from collections.abc import Callable

import torch

from harts_hf.batch import LabelTable, RowTable, TreeBatch
from harts_hf.modeling.handoff import Handoff


class Wanted:
    """What a forward is to answer, by name.

    Every forward of a window on every rank has the same names, so that wrappers (FSDP2, DDP, DeepSpeed) see the same
    outputs everywhere; how many rows are asked for may differ, and may be none.

    Args:
        names: of values per row and of sums; see :mod:`harts_hf.modeling.outputs`.
        labels: what ``log_prob`` and ``entropy`` are computed of; a part of ``TreeBatch.labels``.
        rows: what values of rows themselves are computed of; a part of ``TreeBatch.owned``.
        temperature: logits are divided by it.
        head_in_fp32: whether the head runs in float32 whatever the model's dtype.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        labels: LabelTable,
        rows: RowTable,
        *,
        temperature: float = 1.0,
        head_in_fp32: bool = False,
    ) -> None:
        self.names = names
        self.labels = labels
        self.rows = rows
        self.temperature = temperature
        self.head_in_fp32 = head_in_fp32


class Routes:
    """What the routers of one forward chose.

    A plain object, as :class:`harts_hf.modeling.TreePass` is.

    Args:
        replayed: by number of the router, ``[N, k]`` of integers, the experts to take instead of those that it
            chooses, -1 at rows for which it chooses; it chooses for all if None.

    Attributes:
        chosen: by number of the router, ``[N, k]`` int64, what each chose itself.
        load: ``[E]`` float64, trajectories' tokens by expert that they went to, where that is asked for.
        entropy: scalars float64, the entropy of routing summed over trajectories' tokens, where that is asked for.
    """

    def __init__(self, replayed: dict[int, torch.Tensor] | None = None) -> None:
        self.replayed = replayed
        self.chosen: dict[int, torch.Tensor] = {}
        self.load: dict[int, torch.Tensor] = {}
        self.entropy: dict[int, torch.Tensor] = {}


class TreePass:
    """One forward of one microbatch: ``model(harts=tree_pass)`` of a patched model.

    A plain object on purpose, as :class:`Wanted` is: FSDP casts and copies tensors that it finds in dicts and
    dataclasses.

    Args:
        batch: the microbatch; shared by all runs of a window and changed by none.
        wanted: what is asked for.
        handoff: the store of the running window; None where nothing is handed over.
        deterministic: whether attention on a GPU has to be bitwise reproducible.
        fused_modules: whether norms, gates and experts on a GPU run as single operations.
        slice_counts: gives :attr:`slice_counts`; all trajectories are one slice if None.
        routes: what routers choose is noted there, and taken from there where it is to be replayed.
    """

    def __init__(
        self,
        batch: TreeBatch,
        wanted: Wanted,
        *,
        handoff: Handoff | None = None,
        deterministic: bool = False,
        fused_modules: bool = True,
        slice_counts: Callable[[], torch.Tensor] | None = None,
        routes: Routes | None = None,
    ) -> None:
        self.batch = batch
        self.wanted = wanted
        self.handoff = handoff
        self.deterministic = deterministic
        self.fused_modules = fused_modules
        self.routes = routes or Routes()
        self._slice_counts = slice_counts

    @property
    def slice_counts(self) -> torch.Tensor:
        """``[K, N]`` float64, how many trajectories of each slice of an update pass through each row, 0 where another
        microbatch owns the row. Few outputs read it, so it is made when one does."""
        return self.batch.occurrence_counts.double() if self._slice_counts is None else self._slice_counts()
