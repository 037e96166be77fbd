"""Routes that are known before a forward: the experts of a trajectory's tokens, put on the rows of a tree.

They come from whoever read the tokens before: the engine that sampled them, or the pass that computed old log-probs.
Tokens that several trajectories share have one row, which takes what the first of them knows; where another knows
something else, the row counts as one whose routes differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harts_hf.runtime.ranks import Ranks
from harts_hf.tree import IntArray, RolloutTree

# What stands where no expert is known.
UNKNOWN = -1
# Routes are told apart by so many bits of a hash, above as many of a token id.
_HASH_BITS = 31


@dataclass(frozen=True, eq=False)
class TokenRoutes:
    """The experts of a trajectory's tokens, in pieces that several trajectories may share.

    Attributes:
        pieces: one behind the other, each ``(experts, rows)``: ``[n, L, k]`` int16 on the CPU, the experts of tokens
            in each layer with a router, :data:`UNKNOWN` where they are not known; and ``[t]`` int64, which of them
            are meant, or None for all.
    """

    pieces: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]

    @classmethod
    def from_plain(cls, pieces: Sequence[Any]) -> "TokenRoutes":
        """Of what :meth:`plain` gave."""
        return cls(tuple((experts, rows) for experts, rows in pieces))

    def plain(self) -> list[list[torch.Tensor | None]]:
        """Lists of tensors, which batches and checkpoints may hold."""
        return [[experts, rows] for experts, rows in self.pieces]

    def __len__(self) -> int:
        return sum(len(experts if rows is None else rows) for experts, rows in self.pieces)

    def cut(self, count: int) -> "TokenRoutes":
        """Those of the first ``count`` tokens, or of all if there are fewer."""
        found = []
        for experts, rows in self.pieces:
            if count <= 0:
                break
            found.append((experts[:count], None) if rows is None else (experts, rows[:count]))
            count -= len(experts if rows is None else rows)
        return TokenRoutes(tuple(found))

    def places(self) -> IntArray:
        """``[T]`` int64, where each token's experts lie in memory: tokens with the same place share them."""
        found = []
        for experts, rows in self.pieces:
            index = np.arange(len(experts)) if rows is None else rows.numpy()
            found.append(experts.data_ptr() + index * (experts.stride(0) * experts.element_size()))
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def of(self, tokens: IntArray) -> torch.Tensor:
        """``[t, L, k]`` int16, the experts of some tokens, ascending."""
        found, start = [], 0
        for experts, rows in self.pieces:
            size = len(experts if rows is None else rows)
            inside = torch.from_numpy(tokens[np.searchsorted(tokens, start) : np.searchsorted(tokens, start + size)])
            index = inside - start
            found.append(experts[index if rows is None else rows[index]])
            start += size
        return torch.cat(found)

    def hashes(self) -> IntArray:
        """``[T]`` int64 of 31 bits: equal for equal routes, 0 where a token's are not known in every layer."""
        values = self.of(np.arange(len(self))).numpy()
        is_known = (values != UNKNOWN).all(axis=(1, 2))
        flat = values.reshape(len(values), -1).astype(np.uint64)
        # Of a polynomial in an odd number, the upper bits; int64 arithmetic wraps.
        powers = np.cumprod(np.full(flat.shape[1], 0x9E3779B97F4A7C15, np.uint64))
        mixed = (flat + np.uint64(1)) @ powers if flat.shape[1] else np.zeros(len(flat), np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        upper = (mixed >> np.uint64(64 - _HASH_BITS)).astype(np.int64)
        return np.where(is_known, np.maximum(upper, 1), 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeRoutes:
    """Routes of the rows of a tree.

    Attributes:
        experts: ``[N, L, k]`` int16 on the CPU, :data:`UNKNOWN` where nobody knows.
        differs: ``[N]`` bool, rows whose routes differ between trajectories.
    """

    experts: torch.Tensor
    differs: torch.Tensor


def merge_routes(
    num_rows: int, paths: Sequence[IntArray], routes: Sequence[TokenRoutes | None], ranks: Ranks
) -> TreeRoutes | None:
    """Puts routes of trajectories on rows; the first trajectory that knows a row's decides. A collective.

    Args:
        num_rows: N, of the tree.
        paths: rows of each trajectory of this rank, ``[T]``.
        routes: of each trajectory; of fewer tokens than it has, the first ones are meant.
        ranks: that share the tree; earlier ones go first.

    Returns:
        The same on every rank; None if no rank knows any.

    Raises:
        ValueError: routes of other layers or numbers of experts than others.
    """
    own = _Merged(num_rows)
    with ranks.together():
        for path, found in zip(paths, routes, strict=True):
            if found is not None and len(found):
                own.add(path, found)
    if ranks.count == 1:
        return own.result()
    shape = own.shape or (0, 0)
    shapes = [one for one in ranks.gather(*shape) if one != (0, 0)]
    if not shapes:
        return None
    if len(set(shapes)) > 1:
        raise ValueError(f"expected routes of as many layers and experts on every process, got {shapes}")
    everyone = _Merged(num_rows)
    for rows, differing, flat in ranks.gather_arrays(own.flat()):
        if len(rows):
            values = torch.from_numpy(flat.astype(np.int16)).reshape(len(rows), *shapes[0])
            everyone.add(rows, TokenRoutes(((values, None),)))
        everyone.differs[differing] = True
    return everyone.result()


def marked(tokens: IntArray, routes: TokenRoutes | None) -> IntArray:
    """``[T]`` int64, token ids with marks of their routes, for :func:`merge_marked`; none where they are unknown."""
    marks = np.zeros(len(tokens), np.int64)
    if routes is not None:
        found = routes.cut(len(tokens)).hashes()
        marks[: len(found)] = found
    return tokens + (marks << _HASH_BITS)


def merge_marked(trajectories: Sequence[IntArray]) -> RolloutTree:
    """The tree in which tokens of :func:`marked` trajectories share a row only if their routes are the same."""
    tree = RolloutTree.from_trajectories(trajectories)
    return tree.with_token_ids(tree.token_ids & ((1 << _HASH_BITS) - 1))


class KnownRoutes:
    """The routes that an update knows of its rows before it runs.

    Args:
        of: of the rows of a slice, the experts that are known for each of their trajectories; None for rows of which
            none are known.
        splits: whether tokens whose routes differ between trajectories are computed apart.
    """

    def __init__(self, of: Callable[[Any], Sequence[TokenRoutes | None] | None], *, splits: bool = False) -> None:
        self._of, self.splits = of, splits

    def of_trajectories(self, rows: Sequence[Any], counts: Sequence[int]) -> list[TokenRoutes | None]:
        """Those of all trajectories of some rows, in order.

        Args:
            rows: of slices.
            counts: trajectories of each.

        Raises:
            ValueError: routes of another number of trajectories.
        """
        found: list[TokenRoutes | None] = []
        for one, count in zip(rows, counts, strict=True):
            known = self._of(one)
            if known is not None and len(known) != count:
                raise ValueError(f"expected routes of {count} trajectories, got {len(known)}")
            found += [None] * count if known is None else known
        return found

    def marked(self, trajectories: list[IntArray], routes: Sequence[TokenRoutes | None]) -> list[IntArray]:
        """What :meth:`merge` takes."""
        if not self.splits:
            return trajectories
        return [marked(tokens, found) for tokens, found in zip(trajectories, routes, strict=True)]

    def merge(self, trajectories: Sequence[IntArray]) -> RolloutTree:
        """The tree of marked trajectories."""
        return merge_marked(trajectories) if self.splits else RolloutTree.from_trajectories(trajectories)


class _Merged:
    """Rows of a tree as routes of trajectories come in."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._places = np.zeros(num_rows, np.int64)  # of what a row has
        self._experts: torch.Tensor | None = None
        self._kept: list[TokenRoutes] = []  # places are told apart while their memory is in use
        self.differs = torch.zeros(num_rows, dtype=torch.bool)

    @property
    def shape(self) -> tuple[int, int] | None:
        """Layers and experts per token."""
        return None if self._experts is None else (self._experts.shape[1], self._experts.shape[2])

    def add(self, path: IntArray, routes: TokenRoutes) -> None:
        routes = routes.cut(len(path))
        self._kept.append(routes)
        places = routes.places()
        rows = path[: len(places)]
        new = np.flatnonzero(places != self._places[rows])
        if not len(new):
            return
        values = routes.of(new)
        if self._experts is None:
            self._experts = torch.full((self._num_rows, *values.shape[1:]), UNKNOWN, dtype=torch.int16)
        if values.shape[1:] != self._experts.shape[1:]:
            raise ValueError(
                f"expected routes of {tuple(self._experts.shape[1:])} layers and experts, as of other trajectories, "
                f"got {tuple(values.shape[1:])}"
            )
        at = torch.from_numpy(rows[new])
        held = self._experts[at]
        is_held, is_given = held[..., :1] != UNKNOWN, values[..., :1] != UNKNOWN
        self.differs[at] |= (is_held & is_given & (held != values)).flatten(1).any(dim=1)
        taken = is_given & ~is_held
        self._experts[at] = torch.where(taken, values, held)
        whole = taken.flatten(1).all(dim=1).numpy()
        self._places[rows[new][whole]] = places[new][whole]

    def flat(self) -> list[IntArray]:
        """Rows with routes, rows whose routes differ, and the experts of the former, as they travel."""
        differing = self.differs.nonzero()[:, 0].numpy()
        if self._experts is None:
            return [np.zeros(0, np.int64), differing, np.zeros(0, np.int64)]
        known = (self._experts != UNKNOWN).flatten(1).any(dim=1).nonzero()[:, 0]
        return [known.numpy(), differing, self._experts[known].flatten().long().numpy()]

    def result(self) -> TreeRoutes | None:
        return None if self._experts is None else TreeRoutes(experts=self._experts, differs=self.differs)
