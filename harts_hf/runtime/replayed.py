"""What the routers of a run's forwards are told to choose: routes known before, and those of first forwards."""

from dataclasses import dataclass, replace

import torch

from harts_hf.batch import TreeBatch
from harts_hf.modeling import Routes
from harts_hf.planner.execution import DUMMY
from harts_hf.runtime.routes import UNKNOWN, TreeRoutes
from harts_hf.runtime.window import TreeWindow


@dataclass(frozen=True, kw_only=True)
class RoutingCounts:
    """Counts of a run in which routes are replayed; choices are of owned rows, over all layers.

    Attributes:
        replayed: choices that a later forward took from its microbatch's first one.
        flipped: of those, how many a router would have made otherwise in the later forward.
        recorded: choices that first forwards took from routes known before.
        otherwise: of those, how many a router would have made otherwise in that forward.
        rows: of the tree, that another row depends on, where routes known before are replayed.
        unrecorded: of those, how many no such routes are known of, so that routers choose.
        differing: rows whose known routes differ between trajectories.
    """

    replayed: int = 0
    flipped: int = 0
    recorded: int = 0
    otherwise: int = 0
    rows: int = 0
    unrecorded: int = 0
    differing: int = 0

    def of_forwards(self) -> "RoutingCounts":
        """The same without counts of the tree's rows."""
        return replace(self, rows=0, unrecorded=0, differing=0)


class ReplayedRoutes:
    """Routes of one run of a window.

    Args:
        window: that runs.
        keeps: whether the later forwards of a microbatch take the experts that its first one took.
        known: routes of the tree's rows that are known before; their first forwards take those.
    """

    def __init__(self, window: TreeWindow, *, keeps: bool, known: TreeRoutes | None) -> None:
        self._window, self._keeps, self._known = window, keeps, known
        # By microbatch and router, [N, k] int16.
        self._taken: dict[int, dict[int, torch.Tensor]] = {}
        self._moved: dict[int, dict[int, torch.Tensor]] = {}  # what is known, on the batches' device
        self._flips: list[tuple[torch.Tensor, torch.Tensor]] = []  # different, and of how many
        self._otherwise: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(self, index: int, batch: TreeBatch) -> Routes:
        """What a forward of a microbatch is given."""
        if index == DUMMY:
            return Routes()
        if self._keeps and index in self._taken:
            return Routes(self._taken[index])
        return Routes(self._known_of(index, batch))

    def after(self, index: int, batch: TreeBatch, routes: Routes) -> None:
        """Notes what the forward chose."""
        if index == DUMMY or not (self._keeps or routes.replayed is not None):
            return
        if self._keeps and index in self._taken:
            known = self._known_of(index, batch) or {}
            for number, kept in self._taken[index].items():
                # Where routes were known before, the first forward was compared with those.
                free = known[number][:, :1] == UNKNOWN if known else None
                self._flips.append(_differing(routes.chosen[number], kept, batch, free))
            return
        for number, known_of_router in (routes.replayed or {}).items():
            self._otherwise.append(
                _differing(routes.chosen[number], known_of_router, batch, known_of_router[:, :1] != UNKNOWN)
            )
        if self._keeps:
            replayed = routes.replayed or {}
            self._taken[index] = {
                number: _taken(chosen.short(), replayed.get(number)) for number, chosen in routes.chosen.items()
            }

    @property
    def counts(self) -> RoutingCounts:
        """So far; waits for the device."""
        rows = unrecorded = differing = 0
        if self._known is not None:
            is_read = torch.from_numpy(self._window.tree.num_children > 0)
            unknown = (self._known.experts == UNKNOWN).flatten(1).any(dim=1)
            rows, unrecorded = int(is_read.sum()), int((unknown & is_read).sum())
            differing = int(self._known.differs.sum())
        flipped, replayed = _total(self._flips)
        otherwise, recorded = _total(self._otherwise)
        return RoutingCounts(
            replayed=replayed,
            flipped=flipped,
            recorded=recorded,
            otherwise=otherwise,
            rows=rows,
            unrecorded=unrecorded,
            differing=differing,
        )

    def taken(self) -> torch.Tensor | None:
        """``[N, L, k]`` int16 on the CPU, the experts that first forwards took; None if none ran or none are kept."""
        found: torch.Tensor | None = None
        for index, by_router in self._taken.items():
            owned = self._window.batches[index].owned
            experts = torch.stack([by_router[number] for number in sorted(by_router)], dim=1)[owned.rows].cpu()
            if found is None:
                found = torch.full((self._window.tree.num_tokens, *experts.shape[1:]), UNKNOWN, dtype=torch.int16)
            found[owned.tree_rows.cpu()] = experts
        return found

    def _known_of(self, index: int, batch: TreeBatch) -> dict[int, torch.Tensor] | None:
        if self._known is None:
            return None
        if index not in self._moved:
            rows = torch.from_numpy(self._window.part.microbatches[index].rows)
            self._moved[index] = dict(enumerate(self._known.experts[rows].to(batch.device).unbind(dim=1)))
        return self._moved[index]


def _taken(chosen: torch.Tensor, replayed: torch.Tensor | None) -> torch.Tensor:
    return chosen if replayed is None else torch.where(replayed == UNKNOWN, chosen, replayed)


def _differing(
    own: torch.Tensor, other: torch.Tensor, batch: TreeBatch, of: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of a router's own choices ``[N, k]`` of owned rows are not among others, and of how many.

    ``of`` [N, 1]: rows that count; None for all.
    """
    owned = batch.owned.rows
    mine, theirs = own[owned], other[owned].long()
    differs = ~(mine[:, :, None] == theirs[:, None, :]).any(dim=-1)
    counts = torch.ones_like(differs) if of is None else of[owned].expand_as(differs)
    return (differs & counts).sum(), counts.sum()


def _total(counted: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, int]:
    if not counted:
        return 0, 0
    first, second = torch.stack([torch.stack(pair) for pair in counted]).sum(dim=0).tolist()
    return int(first), int(second)
