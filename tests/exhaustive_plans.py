"""The fastest plan of a small forest on a few ranks by exhaustive search, for comparison with the planner.

Searched: every placement of leaves on ranks; on each rank every partition of its segments into microbatches within the
budget; for every microbatch, reading its prefix from trunks or computing it again; every order that puts trunks before
dependents, for the scoring pass and for the backwards apart; dummies anywhere. Segments are not cut (the planner may).
"""

from collections.abc import Sequence
from itertools import combinations, permutations, product

import numpy as np

from harts_hf.planner.accounting import ChunkEnds, measure
from harts_hf.planner.cost import CostModel
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.spans import NO_SPANS, merge_spans
from harts_hf.tree import RolloutTree


def random_forest(rng: np.random.Generator, max_segments: int = 7) -> tuple[RolloutTree, int]:
    """A forest of 2 to ``max_segments`` segments and a budget of rows that every segment fits."""
    while True:
        parent, inner = [], []
        target = int(rng.integers(2, max_segments + 1))
        while len(parent) < target:
            open_nodes = [node for node in range(len(parent)) if node not in inner]
            above = int(rng.choice([-1, *open_nodes])) if open_nodes else -1
            children = int(rng.integers(2, 4)) if above >= 0 else 1
            if above >= 0:
                inner.append(above)
            parent += [above] * children
        if len(parent) <= max_segments:
            break
    scale = float(rng.choice([300, 1500, 6000]))
    length = np.maximum(1, rng.gamma(1.2, scale, len(parent)).astype(int))
    leaves = [node for node in range(len(parent)) if node not in parent]
    budget = int(max(length.max(), 64, rng.uniform(0.25, 1.2) * length.sum()))
    return RolloutTree.from_shape(parent, length, leaves), budget


class SmallForest:
    """Segments of a forest, with the time of any set of them as a microbatch."""

    def __init__(self, tree: RolloutTree, budget: int, cost: CostModel) -> None:
        self.tree, self.budget, self.cost = tree, budget, cost
        self.starts = tree.segment_starts
        self.stops = np.append(self.starts[1:], tree.num_tokens)
        self.parent = tree.segment_parent.tolist()
        self.ancestors = []
        for above in self.parent:
            self.ancestors.append(self.ancestors[above] | {above} if above >= 0 else frozenset())
        inner = set(self.parent)
        self.leaves = [s for s in range(len(self.parent)) if s not in inner]
        self.ends = ChunkEnds(tree, 64)
        self._times: dict[tuple[frozenset[int], bool], tuple[float, float] | None] = {}

    def missing(self, block: frozenset[int]) -> frozenset[int]:
        """Ancestors of a block that are not in it."""
        return frozenset().union(*(self.ancestors[s] for s in block)) - block

    def times(self, block: frozenset[int], again: bool) -> tuple[float, float] | None:
        """Forward and backward seconds of a block, or None if it exceeds the budget."""
        key = (block, again)
        if key not in self._times:
            above = self.missing(block)
            rows = self._spans(block | above if again else block)
            if (rows[:, 1] - rows[:, 0]).sum() > self.budget:
                self._times[key] = None
            else:
                prefix = NO_SPANS if again else self._spans(above)
                microbatch = Microbatch.from_spans(id=0, row_spans=rows, owned_spans=rows, prefix_spans=prefix)
                work = measure(self.ends, microbatch, self.cost).work
                self._times[key] = self.cost.seconds("F", work), self.cost.seconds("B", work)
        return self._times[key]

    def _spans(self, segments: frozenset[int]) -> np.ndarray:
        index = sorted(segments)
        return merge_spans(np.stack([self.starts[index], self.stops[index]], axis=1))

    def rank_plans(self, leaves: frozenset[int], bound: float) -> list[tuple[float, tuple, tuple]]:
        """Plans of a rank for some leaves, fastest first: (seconds, times by block, pairs (trunk, dependent))."""
        if not leaves:
            return [(0.0, (), ())]
        segments = sorted(leaves.union(*(self.ancestors[leaf] for leaf in leaves)))
        found = {}
        for blocks in partitions(segments):
            for again in product((False, True), repeat=len(blocks)):
                if any(flag and not self.missing(block) for block, flag in zip(blocks, again, strict=True)):
                    continue
                times = [self.times(block, flag) for block, flag in zip(blocks, again, strict=True)]
                if None in times:
                    continue
                total = sum(2 * f + b for f, b in times)
                if total >= bound:
                    continue
                before = tuple(
                    (i, j)
                    for i, j in permutations(range(len(blocks)), 2)
                    if not again[j] and blocks[i] & self.missing(blocks[j])
                )
                if orders(len(blocks), before):
                    found[total, tuple(times), before] = None
        return sorted(found)


def partitions(items: list[int]):
    """Every partition of a list into blocks."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            remaining = [item for item in rest if item not in others]
            for tail in partitions(remaining):
                yield (frozenset((first, *others)), *tail)


_ORDERS: dict[tuple[int, tuple], list[tuple[int, ...]]] = {}


def orders(count: int, before: tuple) -> list[tuple[int, ...]]:
    """Orders of ``count`` blocks that keep ``before``; none if it is cyclic."""
    key = (count, before)
    if key not in _ORDERS:
        _ORDERS[key] = [
            order for order in permutations(range(count)) if all(order.index(i) < order.index(j) for i, j in before)
        ]
    return _ORDERS[key]


def with_dummies(sequence: list, length: int, dummy):
    """Every way to lengthen a sequence with dummies."""
    for places in combinations(range(length), len(sequence)):
        filled = [dummy] * length
        for place, item in zip(places, sequence, strict=True):
            filled[place] = item
        yield filled


def lockstep(plans: Sequence[tuple], cost: CostModel, bound: float) -> float:
    """The fastest replay of several ranks' plans side by side, or ``bound`` if none is faster."""
    length = max(len(times) for _, times, _ in plans)
    dummy = cost.forward.microbatches, cost.backward.microbatches
    # The times of the slots of each rank, in every order and with dummies anywhere.
    ways = [
        {
            tuple(filled)
            for order in orders(len(times), before)
            for filled in with_dummies([times[i] for i in order], length, dummy)
        }
        for _, times, before in plans
    ]
    score = backward = np.inf
    for chosen in product(*ways):
        slots = list(zip(*chosen, strict=True))
        forwards = sum(max(f for f, _ in slot) for slot in slots)
        score = min(score, forwards)
        # Backwards run in an order of their own; reversing it on all ranks keeps the same slots.
        backward = min(backward, forwards + sum(max(b for _, b in slot) for slot in slots))
    return min(bound, score + backward)


def placements(leaves: list[int], world_size: int):
    """Every way to give leaves to ranks, up to the ranks' numbers."""
    if not leaves:
        yield [frozenset()] * world_size
        return
    for parts in placements(leaves[:-1], world_size):
        for rank, part in enumerate(parts):
            yield [*parts[:rank], part | {leaves[-1]}, *parts[rank + 1 :]]
            if not part:  # the other empty ranks are the same
                break


def fastest_by_search(tree: RolloutTree, budget: int, cost: CostModel, upper: float, world_size: int = 2) -> float:
    """The least lockstep time on some ranks, or ``upper`` if nothing is faster."""
    forest = SmallForest(tree, budget, cost)
    best = upper
    plans: dict[frozenset[int], list] = {}

    def complete(chosen: tuple, rest: list[frozenset[int]]) -> None:
        nonlocal best
        if not rest:
            best = lockstep(chosen, cost, best)
            return
        for plan in plans[rest[0]]:
            if plan[0] >= best:
                break
            complete((*chosen, plan), rest[1:])

    for parts in placements(forest.leaves, world_size):
        for leaves in parts:
            if leaves not in plans:
                plans[leaves] = forest.rank_plans(leaves, upper)
        complete((), parts)
    return best
