"""Level 2 for nested execution on several ranks: whole trees in blocks that ranks run side by side (NumPy only).

A trunk's graph is open while its dependents run, and only so many rows of graphs may be. Where even pieces of all
ranks end inside of trees, trunks have to be run once more; where they end with trees, ranks wait for one another. So
trees are packed into blocks first, as many on each rank, none above the rows of graphs, and blocks of about equal time
stand side by side. A tree that takes longer than a block goes on in the next ones of its rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from harts_hf.planner.cuts import Piece, aligned
from harts_hf.planner.leaf_table import LeafTable
from harts_hf.planner.trials import Cuts, Task
from harts_hf.planner.walk import CutTable, FloatArray, Walk
from harts_hf.tree import IntArray

# Numbers of blocks of a rank that are tried, from the fewest that hold all rows.
MORE_BLOCKS = 4
# Of the rows of graphs that there may be, what a block is filled with where a tree is cut: nearly all (cuts lie at
# chunks), or half, since deep rows take longer than those of the blocks that stand beside them.
FILLED = (0.98, 0.49)
# Trees are moved or exchanged between blocks at most this often.
MAX_EXCHANGES = 60
# With more trees times blocks than this, packing takes longer than it wins: even pieces end with trees often enough.
MOST_TRIED = 8192
# Plans that are made of those that look best.
BUILT = 2


@dataclass(kw_only=True)
class _Block:
    """Trees that run together.

    Attributes:
        seconds: of a step.
        rows: of graphs.
        trees: that begin in it.
        after: seconds of the full blocks that the last of the trees goes on in.
    """

    seconds: float = 0.0
    rows: float = 0.0
    trees: list[int] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


def block_trials(task: Task, walk: Walk, leaves: LeafTable) -> Iterator[tuple[list[Walk], Cuts]]:
    """Walks of the ranks and cuts, for several numbers of blocks of a rank; none where trees cannot stay whole.

    Args:
        task: nested, on several ranks, with a limit of rows of graphs.
        walk: of the forest.
        leaves: its costs.
    """
    ranges = _ranges(walk, leaves)
    limit, ranks = task.config.max_graph_tokens, task.config.world_size
    if limit is None or ranges is None or len(leaves.units) < ranks:
        return
    start, stop = np.array(leaves.units).T
    costs = leaves.before[:, stop] - leaves.before[:, start] + leaves.above[:, start]
    seconds, rows = costs[:2].sum(axis=0), costs[2]
    fewest = ceil(rows.sum() / ranks / limit)
    table = CutTable.build(walk, chunk_size=task.config.chunk_size, seconds_per=task.seconds_per)
    ends = walk.position[ranges]
    tries: list[tuple[float, int, list[list[_Block]], float]] = []
    for count in range(fewest, fewest + MORE_BLOCKS):
        if len(seconds) * ranks * count > MOST_TRIED:
            break
        for filled in FILLED:
            parts = _parts(table, ends, rows, limit, filled * limit)
            packed = _pack(seconds, rows, parts, ranks, count, limit)
            if packed is not None:
                _exchange(packed, seconds, rows, limit)
                tries.append((_rough_seconds(task, packed), len(tries), packed, filled * limit))
    for _, _, packed, full in sorted(tries)[:BUILT]:
        trial = _cut(task, walk, ranges, packed, full)
        if trial is not None:
            yield trial


def _ranges(walk: Walk, leaves: LeafTable) -> IntArray | None:
    """``[U + 1]`` first segments of the units, the end; None unless they are children of one segment or roots."""
    ends = np.flatnonzero(walk.is_leaf)
    first = np.append(ends[[start - 1 for start, _ in leaves.units]] + 1, walk.num_segments)
    above = int(leaves.common[2] > 0)  # segment 0 is above all of them
    first[0] = above
    return first if (walk.parent[first[:-1]] == above - 1).all() else None


def _parts(table: CutTable, ends: IntArray, rows: FloatArray, limit: int, full: float) -> dict[int, list[float]]:
    """Of each tree of more rows than ``limit``, the seconds of its beginning and of the blocks of ``full`` rows that
    it fills with its deep end, so that as little of it as possible is run once more."""
    found = {}
    for unit in np.flatnonzero(rows > limit).tolist():
        cuts = ends[unit + 1] - full * np.arange(ceil(rows[unit] / full) - 1, -1, -1)
        seconds = np.interp(np.append(ends[unit], cuts), table.position, table.seconds)
        found[unit] = np.diff(seconds).tolist()
    return found


def _pack(
    seconds: FloatArray, rows: FloatArray, parts: dict[int, list[float]], ranks: int, count: int, limit: int
) -> list[list[_Block]] | None:  # fmt: skip
    """Blocks of each rank in the order of its walk; None if they have no room for all trees.

    The largest tree goes first, each to the block with least time that has room (Graham 1969), and blocks to ranks in
    the order of their time, so that those that stand side by side are about equal.
    """
    order = np.argsort(-seconds, kind="stable").tolist()
    used = [0] * ranks
    long: list[list[_Block]] = [[] for _ in range(ranks)]
    for unit in order:
        if unit in parts:
            rank = used.index(min(used))
            used[rank] += len(parts[unit])
            if used[rank] > count:
                return None
            first, *after = parts[unit]
            left = float(rows[unit]) * first / sum(parts[unit])  # at most: deep rows take longer
            long[rank].append(_Block(seconds=first, rows=left, trees=[unit], after=after))
    free = [_Block() for _ in range(ranks * count - sum(used))]
    blocks = [*(block for own in long for block in own), *free]
    for unit in order:
        if unit not in parts:
            fitting = [block for block in blocks if block.rows + rows[unit] <= limit]
            if not fitting:
                return None
            block = min(fitting, key=lambda one: one.seconds)
            block.seconds += float(seconds[unit])
            block.rows += float(rows[unit])
            block.trees.insert(0, unit)
    found: list[list[_Block]] = [[] for _ in range(ranks)]
    for block in sorted(free, key=lambda one: -one.seconds):
        rank = used.index(min(used))
        found[rank].insert(0, block)
        used[rank] += 1
    return [short + own for short, own in zip(found, long, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """What stands beside each block.

    Attributes:
        place: ``[b]`` of each block in the walk of its rank.
        now: ``[b]`` seconds of the slowest block of each one's place.
        alone: ``[b]`` the same without the block itself.
        without: ``[b, b]`` the same without it and another one.
    """

    place: IntArray
    now: FloatArray
    alone: FloatArray
    without: FloatArray

    @classmethod
    def of(cls, place: IntArray, load: FloatArray, fixed: FloatArray) -> "_Sides":
        """Of seconds ``load`` of each block, and ``fixed`` of each place, that stay."""
        number = np.arange(len(load))
        others = np.where((place[:, None] == place) & (number[:, None] != number), load, 0.0)
        slowest, alone = others.argmax(axis=1), others.max(axis=1)
        others[number, slowest] = 0.0
        without = np.where(number == slowest[:, None], others.max(axis=1)[:, None], alone[:, None])
        alone = np.maximum(alone, fixed[place])
        without = np.maximum(without, fixed[place][:, None])
        return cls(place=place, now=np.maximum(alone, load), alone=alone, without=without)

    def won(self, first: IntArray, other: IntArray, left: FloatArray, right: FloatArray) -> FloatArray:
        """What all places together win if two blocks took ``left`` and ``right`` seconds; -inf of one and the same."""
        apart = self.now[first] - np.maximum(self.alone[first], left)
        apart = apart + self.now[other] - np.maximum(self.alone[other], right)
        together = self.now[first] - np.maximum(self.without[first, other], np.maximum(left, right))
        won = np.where(self.place[first] == self.place[other], together, apart)
        return np.where(first == other, -np.inf, won)


def _exchange(packed: list[list[_Block]], seconds: FloatArray, rows: FloatArray, limit: int) -> None:
    """Moves a tree to another block, or exchanges two, as long as the slowest blocks of all places get faster.

    Complexity: NumPy work over pairs of trees, of trees and blocks, and of blocks of one place, each time.
    """
    blocks = [block for own in packed for block in own]
    places = [place for own in packed for place in np.cumsum([0, *(len(one.after) + 1 for one in own[:-1])]).tolist()]
    count = max(sum(len(one.after) + 1 for one in own) for own in packed)
    fixed = np.zeros(count)  # the slowest of what trees fill alone
    for place, block in zip(places, blocks, strict=True):
        for further, time_there in enumerate(block.after, place + 1):
            fixed[further] = max(fixed[further], time_there)
    movable = [(tree, number) for number, block in enumerate(blocks)
               for tree in block.trees[: len(block.trees) - bool(block.after)]]  # fmt: skip
    if not movable:
        return
    tree, home = np.array(movable).T
    time, size = seconds[tree], rows[tree]
    load, filled = np.array([one.seconds for one in blocks]), np.array([one.rows for one in blocks])
    every = np.arange(len(blocks))[None, :]
    for _ in range(MAX_EXCHANGES):
        sides = _Sides.of(np.array(places), load, fixed)
        here, there = home[:, None], home[None, :]
        moved = sides.won(here, every, load[here] - time[:, None], load[every] + time[:, None])
        moved[filled[every] + size[:, None] > limit] = -np.inf
        more, larger = time[None, :] - time[:, None], size[None, :] - size[:, None]
        swapped = sides.won(here, there, load[here] + more, load[there] - more)
        swapped[(filled[here] + larger > limit) | (filled[there] - larger > limit)] = -np.inf
        tried = np.concatenate([moved, swapped], axis=1)
        one, choice = map(int, np.unravel_index(int(tried.argmax()), tried.shape))
        if tried[one, choice] <= 1e-6 * float(sides.now.sum()):
            break
        other = choice - len(blocks)
        leaving = [(one, choice)] if other < 0 else [(one, int(home[other])), (other, int(home[one]))]
        for number, to in leaving:
            load[[home[number], to]] += [-time[number], time[number]]
            filled[[home[number], to]] += [-size[number], size[number]]
        for number, to in leaving:
            home[number] = to
    for number, block in enumerate(blocks):
        kept = block.trees[-1:] if block.after else []
        block.trees = [*tree[home == number].tolist(), *kept]
        block.seconds, block.rows = float(load[number]), float(filled[number])


def _rough_seconds(task: Task, packed: list[list[_Block]]) -> float:
    """The slowest block of each place, forwards that are run once more, and what microbatches cost."""
    sides, again = [], []
    for blocks in packed:
        sides.append([time for one in blocks for time in (one.seconds, *one.after)])
        again.append(sum(one.seconds + sum(one.after[:-1]) for one in blocks if one.after))
    forward, step = task.cost.forward.rows, task.seconds_per.rows
    pieces = ceil((task.config.max_graph_tokens or 0) / task.max_rows)
    places = len(sides[0]) * pieces * (task.seconds_per.microbatches + task.seconds_per.calls)
    part = forward / step if step else 0.0
    return sum(max(place) for place in zip(*sides, strict=True)) + max(again) * part + places


def _cut(
    task: Task, walk: Walk, ranges: IntArray, packed: list[list[_Block]], full: float
) -> tuple[list[Walk], Cuts] | None:  # fmt: skip
    """Each rank's walk over its blocks, those side by side in equally many pieces; None if one cannot be cut so."""
    top = np.arange(ranges[0])  # above all units; the first rank owns it
    walks, tables, bounds = [], [], []
    for rank, blocks in enumerate(packed):
        units = [unit for block in blocks for unit in block.trees]
        parts = [np.arange(ranges[unit], ranges[unit + 1]) for unit in units]
        segments = np.concatenate([top if units else top[:0], *parts])
        owned = walk.owned.copy()
        owned[top] &= rank == 0 or not any(block.trees for block in packed[0])
        walks.append(walk.in_order(segments, owned=owned))
        tables.append(CutTable.build(walks[-1], chunk_size=task.config.chunk_size, seconds_per=task.seconds_per))
        ends = walks[-1].position[np.cumsum([len(top), *map(len, parts)])] if units else np.zeros(1, np.int64)
        bounds.append(_block_ends(tables[-1], ends, blocks, full))
    cuts: Cuts = [[] for _ in packed]
    for slot in range(max(map(len, bounds)) - 1):
        sides = [(table, ends[slot], ends[slot + 1]) for table, ends in zip(tables, bounds, strict=True)]
        count = max(ceil((table.position[b] - table.position[a]) / task.max_rows) for table, a, b in sides)
        for pieces, (table, first, end) in zip(cuts, sides, strict=True):
            own = _even(task, table, first, end, count)
            if own is None:
                return None
            pieces += own
    return walks, cuts


def _block_ends(table: CutTable, ends: IntArray, blocks: list[_Block], full: float) -> list[int]:
    """Cuts (their numbers in the table) at which the blocks of a rank begin, and its end.

    Args:
        table: of the rank's walk.
        ends: positions before the first tree and behind each one.
        blocks: of the rank.
        full: rows of a block that a tree fills.
    """
    found, tree = [0], 0
    for block in blocks:
        tree += len(block.trees)
        starts = ends[tree] - full * np.arange(len(block.after), -1, -1)
        found += np.searchsorted(table.position, starts).tolist()
    return found


def _even(task: Task, table: CutTable, first: int, end: int, count: int) -> list[Piece] | None:
    """A block in at most ``count`` pieces of about equal time; None if one had too many rows."""
    position, most = table.position, task.max_rows
    share = float(table.seconds[end] - table.seconds[first]) / max(count, 1)
    cuts = [first]
    for part in range(1, count):
        stop = int(np.searchsorted(table.seconds, float(table.seconds[first]) + part * share))
        stop = min(stop, int(np.searchsorted(position, position[cuts[-1]] + most, side="right")) - 1)
        if cuts[-1] < stop < end:
            least = int(np.searchsorted(position, position[end] - (count - part) * most))
            cuts.append(max(aligned(table, cuts[-1], stop, task.config.chunk_size), min(least, stop)))
    pieces = [
        Piece(start=int(position[a]), stop=int(position[b]))
        for a, b in zip(cuts, [*cuts[1:], end], strict=True) if a < b
    ]  # fmt: skip
    return pieces if all(piece.num_rows <= most for piece in pieces) else None
