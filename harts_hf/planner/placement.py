"""Level 2, placement: which rank computes which leaves (NumPy only).

Activations never travel between ranks, so a rank computes the whole paths of its leaves; a prefix that two ranks need
is computed on both. The leaves stand in an order in which the deepest child comes last; a run of leaves then costs the
rows between its ends plus the path above its first leaf, which is short where the run is the early part of a spine.
"""

from bisect import bisect_left, insort
from math import ceil

import numpy as np

from harts_hf.planner.leaf_table import LeafTable, Run
from harts_hf.planner.spans import sorted_unique
from harts_hf.planner.walk import FloatArray, Walk
from harts_hf.tree import IntArray

# The search for the least time ends when it is known to this part of itself.
SEARCH_TO = 2e-3


# Runs are exchanged between ranks at most this often.
MAX_EXCHANGES = 32
# Of the rows that a microbatch may hold, those that pieces of a walk fill in the mean at least.
FULL = 0.99


# Runs of leaves of each rank.
Packing = list[list[Run]]


def place_runs(leaves: LeafTable, world_size: int, *, max_rows: int, slot_seconds: float) -> list[IntArray]:
    """Ranks of the leaves, ``[L]``: of the packings found, the fastest first.

    Tries the shares that forwards and backward have of the step in the whole forest, and where the longest path binds
    those of the path and what lies between; then, where that costs a microbatch on every rank, to spread rows better.
    For each the smallest time is searched within which :func:`_pack` succeeds. Complexity: O(log) packings.

    Args:
        leaves: costs as :meth:`LeafTable.build` has them.
        world_size: ranks.
        max_rows: rows of a microbatch.
        slot_seconds: what a microbatch costs without its rows, on all ranks.
    """
    whole, longest = leaves.before[:2, -1], leaves.paths[:2, int(leaves.paths[:2].sum(axis=0).argmax())]
    if whole.sum() == 0:  # by a cost model in which rows take no time
        return [np.arange(leaves.num_leaves) * world_size // leaves.num_leaves]
    shares = [whole / whole.sum()]
    if longest.sum() * world_size > 0.8 * whole.sum():
        shares += [longest / longest.sum(), (longest / longest.sum() + shares[0]) / 2]
    shares = [np.where(share > 0, share, np.inf) for share in shares]  # what takes no time has room everywhere
    found: list[tuple[float, int, Packing]] = []
    common = float(leaves.common[2])

    def search(room: FloatArray, below: float | None) -> tuple[float, int] | None:
        """Seconds and microbatches of the fastest packing."""
        answer = _fastest_packing(leaves.divided(room), world_size, below)
        if answer is None:
            return None
        seconds, packing = answer[0], _balanced(leaves.divided(room), answer[1])
        slots = ceil((common + max(leaves.sums(packing, 2))) / (FULL * max_rows))
        lockstep = sum(max(leaves.sums(packing, cost)) for cost in (0, 1))
        found.append((lockstep + slots * slot_seconds, len(found), packing))
        return seconds, slots

    seconds, slots, best = np.inf, 0, shares[0]
    for share in shares:
        answer = search(np.append(share, np.inf), None if seconds == np.inf else seconds)
        if answer is not None:
            (seconds, slots), best = answer, share
    fewest = ceil((common + sum(leaves.sums(min(found)[2], 2)) / world_size) / (FULL * max_rows))
    for count in range(slots - 1, fewest - 1, -1):
        room = np.append(best, (FULL * max_rows * count - common) / seconds)
        if room[2] <= 0 or search(room, seconds + (slots - count) * slot_seconds) is None:
            break
    return [_owner_of_leaves(packing, leaves.num_leaves) for _, _, packing in sorted(found)]


def _fastest_packing(leaves: LeafTable, world_size: int, below: float | None) -> tuple[float, Packing] | None:
    """The least time within which leaves can be packed, and how; None if it is not ``below`` some seconds."""
    low = max(float(leaves.before[:, -1].max()) / world_size, float(leaves.paths.max()))
    if below is None:
        high = low
        while (best := _pack(leaves, world_size, high)) is None:
            low, high = high, high * 1.03
    else:
        high = below * (1 - SEARCH_TO)
        best = _pack(leaves, world_size, high) if high >= low else None
        if best is None:
            return None
    while high - low > SEARCH_TO * high:
        middle = (low + high) / 2
        found = _pack(leaves, world_size, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return high, best


def _balanced(leaves: LeafTable, packing: Packing) -> Packing:
    """Moves a run of the slowest rank to another, or exchanges it, as long as the slower of the two gets faster.

    The search packs by the largest cost of each run, this by the largest sum. Complexity: a few NumPy calls a step.
    """
    runs = [(rank, *run) for rank, own in enumerate(packing) for run in own]
    rank, start, stop = np.array(runs, np.int64).T
    cost = (leaves.before[:, stop] - leaves.before[:, start] + leaves.above[:, start]).T
    sums = np.zeros((len(packing), 3))
    np.add.at(sums, rank, cost)
    for _ in range(MAX_EXCHANGES):
        slowest = int(sums.max(axis=1).argmax())
        own, other = np.flatnonzero(rank == slowest), np.flatnonzero(rank != slowest)
        without = sums[slowest] - cost[own]
        moved = np.maximum(without.max(axis=1)[:, None], (sums + cost[own][:, None]).max(axis=2))
        moved[:, slowest] = np.inf
        given = (without[:, None] + cost[other]).max(axis=2)
        taken = (sums[rank[other]] - cost[other] + cost[own][:, None]).max(axis=2)
        tried = np.concatenate([moved, np.maximum(given, taken)], axis=1)
        run, choice = np.unravel_index(int(tried.argmin()), tried.shape)
        if tried[run, choice] >= sums[slowest].max() * (1 - 1e-6):
            break
        leaving = own[run]
        target = int(choice)
        if target >= len(packing):
            coming = other[target - len(packing)]
            target = int(rank[coming])
            rank[coming] = slowest
            sums[target] -= cost[coming]
            sums[slowest] += cost[coming]
        rank[leaving] = target
        sums[target] += cost[leaving]
        sums[slowest] -= cost[leaving]
    balanced: Packing = [[] for _ in packing]
    for number, first, end in zip(rank.tolist(), start.tolist(), stop.tolist(), strict=True):
        balanced[number].append((first, end))
    return balanced


def place_roots(leaves: LeafTable, world_size: int) -> IntArray:
    """``[L]`` ranks of the leaves, the trees whole on one rank each, so that no row is computed on two.

    The better of two well-known rules: the largest tree to the emptiest rank (Graham 1969), and first fit of
    descending trees within the least time for which that succeeds (multifit; Coffman, Garey and Johnson 1978).
    """
    whole = leaves.before[:2, -1]
    table = leaves.divided(np.append(whole / whole.sum(), np.inf))
    times = [table.run(*run) for run in table.roots]
    order = sorted(range(len(times)), key=lambda root: (-times[root], root))
    rank_of = _largest_to_emptiest(times, order, world_size)
    high = max(np.bincount(rank_of, weights=times))
    low = max(sum(times) / world_size, max(times))
    while high - low > SEARCH_TO * high:
        middle = (low + high) / 2
        found = _first_fit(times, order, world_size, middle)
        if found is None:
            low = middle
        else:
            high, rank_of = middle, found
    return np.array(rank_of)[np.repeat(np.arange(len(times)), [stop - start for start, stop in table.roots])]


def _largest_to_emptiest(times: list[float], order: list[int], world_size: int) -> list[int]:
    loads = [(0.0, rank) for rank in range(world_size)]
    rank_of = [0] * len(times)
    for root in order:
        load, rank_of[root] = loads.pop(0)
        insort(loads, (load + times[root], rank_of[root]))
    return rank_of


def _first_fit(times: list[float], order: list[int], world_size: int, seconds: float) -> list[int] | None:
    rooms = np.full(world_size, seconds * (1 + 1e-12))
    rank_of = [0] * len(times)
    for root in order:
        rank = int((rooms >= times[root]).argmax())
        if rooms[rank] < times[root]:
            return None
        rooms[rank] -= times[root]
        rank_of[root] = rank
    return rank_of


def _owner_of_leaves(packing: Packing, num_leaves: int) -> IntArray:
    owner = np.empty(num_leaves, np.int64)
    for rank, runs in enumerate(packing):
        for start, stop in runs:
            owner[start:stop] = rank
    return owner


def _pack(leaves: LeafTable, world_size: int, seconds: float) -> Packing | None:
    """Runs on ranks within ``seconds`` each, or None.

    Units that are too long for a rank are cut from their deep end. The largest run then goes to a rank that has room
    (the emptiest, or if that fails the fullest such rank); if none has, the early part of it fills the emptiest one.
    """
    queue = []
    total = 0.0
    for (start, stop), need in zip(leaves.units, leaves.unit_seconds, strict=True):
        while need > seconds:
            cut = leaves.last_start(start, stop, seconds)
            if cut == stop:
                return None
            part = leaves.run(cut, stop)
            total += part
            queue.append((-part, cut, stop))
            stop = cut
            need = leaves.run(start, stop)
        total += need
        queue.append((-need, start, stop))
    if total > world_size * seconds * (1 + 1e-9):
        return None
    queue.sort()
    for fullest in (False, True):
        found = _fill(leaves, list(queue), world_size, seconds, fullest)
        if found is not None:
            return found
    return None


def _fill(
    leaves: LeafTable, queue: list[tuple[float, int, int]], world_size: int, seconds: float, fullest: bool
) -> Packing | None:
    """Takes runs ``(-seconds, first leaf, stop)`` in order."""
    rooms = [(seconds, rank) for rank in range(world_size)]  # (room, rank), ascending
    packing: Packing = [[] for _ in range(world_size)]
    head = 0
    while head < len(queue):
        need, start, stop = queue[head]
        head += 1
        fitting = bisect_left(rooms, (-need - 1e-12 * seconds, -1))
        emptiest = bisect_left(rooms, (rooms[-1][0], -1))  # the lowest rank of those with most room
        if fitting < world_size:
            room, rank = rooms.pop(fitting if fullest else emptiest)
            cut, taken = stop, -need
        else:
            room, rank = rooms.pop(emptiest)
            cut = leaves.first_stop(start, stop, room)
            if cut <= start:
                return None
            insort(queue, (-leaves.run(cut, stop), cut, stop), head)
            taken = leaves.run(start, cut)
        insort(rooms, (room - taken, rank))
        packing[rank].append((start, cut))
    return packing


def walks_of_owners(walk: Walk, order: Walk, owner: IntArray, world_size: int) -> list[Walk]:
    """The walk of each rank over the paths of its leaves; the first rank that computes a segment owns it.

    Args:
        walk: the walk whose leaves ``owner`` is for.
        order: a walk over the same segments, in the order in which the ranks are to go.
        owner: ``[L]`` rank of each leaf.
        world_size: ranks.

    Complexity: NumPy work over the segments of ``order`` and of all answers, a few calls per run of leaves.
    """
    leaves = np.flatnonzero(order.is_leaf)
    if order is not walk:
        rows = walk.row[walk.is_leaf]
        by_row = np.argsort(rows)
        owner = owner[by_row[np.searchsorted(rows, order.row[leaves], sorter=by_row)]]
    heads = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))  # first leaf of each run on one rank
    start = np.append(0, leaves[:-1] + 1)[heads]  # the segment after the leaf before
    stop = leaves[np.append(heads[1:], len(leaves)) - 1] + 1
    parts: list[list[IntArray]] = [[] for _ in range(world_size)]
    for rank, path, first, end in zip(owner[heads].tolist(), order.segments_above(start), start, stop, strict=True):
        parts[rank] += [path, np.arange(first, end)]
    taken = np.zeros(order.num_segments, bool)
    walks = []
    for runs in parts:
        segments = sorted_unique(np.concatenate(runs)) if runs else np.zeros(0, np.int64)
        walks.append(order.take(segments, ~taken))
        taken[segments] = True
    return walks
