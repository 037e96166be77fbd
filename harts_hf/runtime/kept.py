"""Values that were scored once, found again by the tokens of their trajectories."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.runtime.leaves import spread, spread_all, with_zero
from harts_hf.runtime.slices import Index, SliceRows
from harts_hf.runtime.values import TreeValues
from harts_hf.tree import IntArray, RolloutTree
from harts_hf.tree.matching import matching_rows


class KeptScores:
    """Values per row of a window, for whoever asks for the same trajectories, in any order and slices.

    A row that trajectories share has one value here as in every window. What the values depend on besides (weights,
    temperature, ...) is the caller's to compare.

    Args:
        merged: prefix tree of the trajectories.
        tree: whose rows were scored: the same, or one that shares less.
        values: ``[N]`` each, of its rows; sums are not kept.
    """

    def __init__(self, merged: RolloutTree, tree: RolloutTree, values: TreeValues) -> None:
        self._merged, self.tree, self.rows = merged, tree, values.rows

    def to(self, device: torch.device | str) -> "KeptScores":
        """The same on another device."""
        moved = TreeValues(rows={name: value.to(device) for name, value in self.rows.items()})
        return KeptScores(self._merged, self.tree, moved)

    def numbers(self, tree: RolloutTree) -> IntArray:
        """For each trajectory of a tree the number of the same one here; -1 for one that was not scored, though it be
        the beginning of one that was."""
        ending = np.full(self._merged.num_tokens + 1, -1)  # trajectories by their last row; none ends at row -1
        ending[self._merged.end_rows] = np.arange(self._merged.num_trajectories)
        return ending[matching_rows(tree, self._merged)[tree.end_rows]]

    def by_trajectory(self, name: str) -> Iterator[tuple[bytes, NDArray[np.floating[Any]]]]:
        """A digest of the tokens of each trajectory, and a value at each of them, ``[L]``."""
        values = self.rows[name].cpu().numpy()
        for path in self.tree.paths():
            yield _digest(self.tree.token_ids[path]), values[path]


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """Values of the slices of an update that were scored before.

    Attributes:
        values: of each slice, by name in the shapes of its index; 0 where nothing is asked for.
        indices: of each slice, on the rows of :attr:`tree`.
        tree: of the pass that scored all trajectories; None where several did, or one was not scored.
        ends: ``[trajectories]`` the last row of each in that tree.
    """

    values: list[dict[str, torch.Tensor]]
    indices: list[Index]
    tree: RolloutTree | None
    ends: IntArray

    def indices_on(self, tree: RolloutTree, first: int) -> list[Index] | None:
        """The slices' indices on the rows of a tree, whose trajectories from ``first`` on are theirs, if those lie as
        in the pass that scored them; else None."""
        ends = tree.end_rows[first : first + len(self.ends)]
        if self.tree is None or not np.array_equal(ends, self.ends):
            return None
        return self.indices if np.array_equal(tree.parent, self.tree.parent) else None


def find(
    passes: Sequence[KeptScores],
    rows: Sequence[SliceRows],
    trajectories: Sequence[Sequence[IntArray]],
    tree: RolloutTree | None,
    names: Sequence[str],
) -> Found | None:
    """Values of slices that earlier passes gave.

    Args:
        passes: the first that knows a slice decides.
        rows: of the slices.
        trajectories: of each slice.
        tree: of all of them, in order; None if there are none.
        names: of the values.

    Returns:
        None if a value is asked for of a trajectory that was not scored, or by a name that a pass or an index lacks. A
        trajectory that no value is asked of (a row that is run for routers' statistics alone) need not have been
        scored.
    """
    passes = [one for one in passes if one.rows.keys() >= set(names)]
    known = [_Known(one, np.zeros(0, np.int64) if tree is None else one.numbers(tree)) for one in passes]
    values, indices, used, start = [], [], set[_Known](), 0
    for one, own in zip(rows, trajectories, strict=True):
        tried = ((scored, scored.index(one, own, start, names)) for scored in known)
        scored, index = next(((scored, index) for scored, index in tried if index is not None), (None, None))
        if scored is None or index is None:
            return None
        used.add(scored)
        indices.append(index)
        values.append(spread_all(scored.values(names), index))
        start += len(own)
    alone = used.pop()
    if used or (alone.numbers < 0).any():
        return Found(values=values, indices=indices, tree=None, ends=np.zeros(0, np.int64))
    return Found(values=values, indices=indices, tree=alone.tree, ends=alone.tree.end_rows[alone.numbers])


class _Known:
    """What a pass knows of an update's trajectories."""

    def __init__(self, scores: KeptScores, numbers: IntArray) -> None:
        self.tree, self.numbers, self._rows = scores.tree, numbers, scores.rows
        self._values: dict[str, torch.Tensor] = {}
        found = iter(scores.tree.paths(numbers[numbers >= 0].tolist()))
        self._paths = [next(found) if number >= 0 else None for number in numbers.tolist()]

    def values(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """``[N + 1]`` each, with their 0."""
        self._values = self._values or {name: with_zero(self._rows[name]) for name in names}
        return self._values

    def index(self, rows: SliceRows, own: Sequence[IntArray], start: int, names: Sequence[str]) -> Index | None:
        """Of a slice whose trajectories are numbers ``start`` and following; None if they are not known."""
        paths = self._paths[start : start + len(own)]
        filled = [np.full(len(tokens), -1) if path is None else path for tokens, path in zip(own, paths, strict=True)]
        index = rows.index(filled)
        if not index.keys() >= set(names):
            return None
        if any(path is None for path in paths):
            asked = rows.index([np.zeros(len(tokens), np.int64) for tokens in own])
            if any(((index[name] < 0) & (asked[name] >= 0)).any() for name in names):
                return None
        return index


class KeptTrajectories:
    """One value at each token of trajectories that come again, in any batch with any others; on the CPU.

    Args:
        name: of the value.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: dict[bytes, NDArray[np.floating[Any]]] = {}

    def add(self, scores: KeptScores) -> None:
        """Those of a pass."""
        self._found.update(scores.by_trajectory(self._name))

    def clear(self) -> None:
        """Forgets all."""
        self._found.clear()

    def of(self, rows: SliceRows) -> torch.Tensor | None:
        """In the shape of the slice's index, 0 where nothing is asked for; None if a trajectory is not known."""
        values = [self._found.get(_digest(tokens)) for tokens in rows.trajectories()]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        ends = np.cumsum([len(value) for value in known])
        index = rows.index([np.arange(end - len(value), end) for value, end in zip(known, ends, strict=True)])
        flat = np.concatenate(known) if known else np.zeros(1, np.float32)
        return spread(torch.from_numpy(flat), index[self._name])


def _digest(tokens: IntArray) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
