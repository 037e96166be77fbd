"""Experts that each microbatch's first forward chose, for its later ones."""

import torch

from harts_hf.batch import TreeBatch
from harts_hf.modeling import Routes


class ReplayedRoutes:
    """Routes of a run, by microbatch and router; nothing is kept where they are not replayed.

    Args:
        replays: whether later forwards take what first ones chose.
    """

    def __init__(self, *, replays: bool) -> None:
        self._replays = replays
        self._kept: dict[int, dict[int, torch.Tensor]] = {}
        self._flips: list[tuple[torch.Tensor, int]] = []

    def of(self, index: int) -> Routes:
        """What the next forward of a microbatch is given."""
        return Routes(self._kept.get(index))

    def note(self, index: int, batch: TreeBatch, routes: Routes) -> None:
        """What a forward of a microbatch chose: kept if it is the first, else compared with what it was given."""
        if not self._replays:
            return
        if index not in self._kept:
            self._kept[index] = {number: chosen.short() for number, chosen in routes.chosen.items()}
            return
        owned = batch.owned.rows
        for number, replayed in self._kept[index].items():
            own, kept = routes.chosen[number][owned], replayed[owned].long()
            found = (own[:, :, None] == kept[:, None, :]).any(dim=-1)
            self._flips.append(((~found).sum(), found.numel()))

    @property
    def flips(self) -> tuple[int, int]:
        """Of the experts that were taken from first forwards, how many the router would not have chosen; and of how
        many (choices of owned rows, over all layers)."""
        return sum(int(found) for found, _ in self._flips), sum(number for _, number in self._flips)
