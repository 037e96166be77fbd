"""Values that were scored once, found again by the tokens of their trajectories."""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.runtime.leaves import spread
from harts_hf.runtime.slices import SliceRows
from harts_hf.runtime.values import TreeValues
from harts_hf.tree import IntArray, RolloutTree


class KeptScores:
    """Values per row of scored trajectories, for whoever asks for the same trajectories, in any order and batches.

    A row that trajectories share has one value here as in every window. What the values depend on besides (weights,
    temperature, ...) is the caller's to compare.

    Args:
        tree: of the trajectories, with their tokens.
        values: ``[N]`` each; sums are not kept.
    """

    def __init__(self, tree: RolloutTree, values: TreeValues) -> None:
        self._tree, self._rows = tree, values.rows

    def to(self, device: torch.device | str) -> "KeptScores":
        """The same on another device."""
        return KeptScores(self._tree, TreeValues(rows={name: value.to(device) for name, value in self._rows.items()}))

    def of(self, rows: SliceRows) -> dict[str, torch.Tensor] | None:
        """Values by name in the shapes of the slice's index, 0 where nothing is asked for.

        None if one is asked for of a trajectory that was not scored, or of a name that the index lacks. One that no
        value is asked of (a row that is run for routers' statistics alone) need not have been.
        """
        trajectories = rows.trajectories()
        numbers = [self._numbers.get(_digest(tokens)) for tokens in trajectories]
        paths = [
            np.full(len(tokens), -1) if number is None else self._tree.path(number)
            for tokens, number in zip(trajectories, numbers, strict=True)
        ]
        index = rows.index(paths)
        if not index.keys() >= self._rows.keys():
            return None
        if None in numbers:
            asked = rows.index([np.zeros(len(tokens), np.int64) for tokens in trajectories])
            if any(((index[name] < 0) & (asked[name] >= 0)).any() for name in self._rows):
                return None
        return {name: spread(value, index[name]) for name, value in self._rows.items()}

    def by_trajectory(self, name: str) -> Iterator[tuple[bytes, NDArray[np.floating[Any]]]]:
        """A digest of the tokens of each trajectory, and a value at each of them, ``[L]``."""
        values = self._rows[name].cpu().numpy()
        for digest, number in self._numbers.items():
            yield digest, values[self._tree.path(number)]

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        tree = self._tree
        return {_digest(tree.token_ids[tree.path(number)]): number for number in range(tree.num_trajectories)}


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
