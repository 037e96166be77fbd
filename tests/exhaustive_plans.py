"""The fastest plan of a small forest on two ranks by exhaustive search, for comparison with the planner.

Searched: every placement of leaves on ranks; on each rank every partition of its segments into microbatches within the
budget; for every microbatch, reading its prefix from trunks or computing it again; every order that puts trunks before
dependents, for the scoring pass and for the backwards apart; dummies anywhere. Segments are not cut (the planner may).
"""

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


def lockstep(first: tuple, second: tuple, cost: CostModel) -> float:
    """The fastest replay of two ranks' plans side by side."""
    (_, times_a, before_a), (_, times_b, before_b) = first, second
    length = max(len(times_a), len(times_b))
    dummy = cost.forward.microbatches, cost.backward.microbatches
    score = backward = np.inf
    for order_a in orders(len(times_a), before_a):
        for filled_a in with_dummies([times_a[i] for i in order_a], length, dummy):
            for order_b in orders(len(times_b), before_b):
                for filled_b in with_dummies([times_b[i] for i in order_b], length, dummy):
                    pairs = list(zip(filled_a, filled_b, strict=True))
                    score = min(score, sum(max(a[0], b[0]) for a, b in pairs))
                    # Backwards run in an order of their own; reversing both keeps the same pairs.
                    backward = min(backward, sum(max(a[0], b[0]) + max(a[1], b[1]) for a, b in pairs))
    return score + backward


def fastest_by_search(tree: RolloutTree, budget: int, cost: CostModel, upper: float) -> float:
    """The least lockstep time on two ranks, or ``upper`` if nothing is faster."""
    forest = SmallForest(tree, budget, cost)
    best = upper
    plans: dict[frozenset[int], list] = {}
    everything = frozenset(forest.leaves)
    for size in range(len(forest.leaves) // 2 + 1):
        for chosen in combinations(forest.leaves, size):
            one, other = frozenset(chosen), everything - frozenset(chosen)
            for leaves in (one, other):
                if leaves not in plans:
                    plans[leaves] = forest.rank_plans(leaves, upper)
            for first in plans[one]:
                if first[0] >= best:
                    break
                for second in plans[other]:
                    if max(first[0], second[0]) >= best:
                        break
                    best = min(best, lockstep(first, second, cost))
    return best
