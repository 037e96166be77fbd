"""Random schedules: any cut of the rows, any mix of sharing and computing again, any execution."""

from itertools import pairwise

import numpy as np

from harts_hf import PlannerConfig, RolloutTree, Schedule
from harts_hf.batch import TreeBatch
from harts_hf.modeling import TreePass, Wanted
from harts_hf.modeling.handoff import Handoff
from harts_hf.planner.execution import block_ops, keep_ops, nested_ops, replay_ops
from harts_hf.planner.microbatch import Microbatch


def random_schedule(tree: RolloutTree, seed: int, execution: str, *, pieces: int = 6) -> Schedule:
    """A valid schedule that no planner would make.

    Rows are cut in preorder at random positions: on and off chunk boundaries, inside a replay, right after a branch.
    Each piece reads the upper part of its prefix from trunks and computes the lower part, cut at a random row, again.
    """
    rng = np.random.default_rng(seed)
    cuts = np.unique(rng.integers(1, tree.num_tokens, min(pieces - 1, tree.num_tokens - 1)))
    bounds = [0, *cuts.tolist(), tree.num_tokens]
    owner = np.searchsorted(cuts, np.arange(tree.num_tokens), side="right")
    microbatches = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        above = _ancestors_outside(tree, start, stop)
        again = np.zeros(0, np.int64)
        if len(above) and rng.random() < 0.4:
            limit = int(rng.choice(tree.depth[above])) + 1
            again = above[tree.depth[above] >= limit]
        prefix = np.setdiff1d(above, again)
        held = [np.isin(prefix, microbatches[trunk].rows) for trunk in np.unique(owner[prefix])]
        if held and (np.sum(held, axis=0) != 1).any():  # a trunk computes again what another one holds
            prefix, again = above[:0], above
        rows = np.concatenate([again, np.arange(start, stop)])
        microbatches.append(
            Microbatch(
                id=index,
                rows=rows,
                owned=rows >= start,
                prefix=prefix,
                trunks=tuple(np.unique(owner[prefix]).tolist()),
            )
        )
    chosen = frozenset(index for index in range(len(microbatches)) if rng.random() < 0.3)
    readable = frozenset(trunk for microbatch in microbatches for trunk in microbatch.trunks)
    ops = {
        "replay": lambda: replay_ops(microbatches, chosen & readable),
        "nested": lambda: nested_ops(microbatches, chosen & readable),
        "keep": lambda: keep_ops(microbatches),
    }[execution]()
    config = PlannerConfig(max_tokens_per_microbatch=max(64, tree.num_tokens), execution=execution)
    return Schedule(
        tree=tree, microbatches=tuple(microbatches), config=config, execution=execution, rank_ops=(tuple(ops),)
    )


def cut_schedule(tree: RolloutTree, cuts: list[int], execution: str = "replay") -> Schedule:
    """Rows cut in preorder before each of ``cuts``; every piece reads its whole prefix from the pieces before it."""
    owner = np.searchsorted(cuts, np.arange(tree.num_tokens), side="right")
    microbatches = []
    for index, (start, stop) in enumerate(pairwise([0, *cuts, tree.num_tokens])):
        prefix = _ancestors_outside(tree, start, stop)
        rows = np.arange(start, stop)
        microbatches.append(
            Microbatch(
                id=index,
                rows=rows,
                owned=np.ones(len(rows), bool),
                prefix=prefix,
                trunks=tuple(np.unique(owner[prefix]).tolist()),
            )
        )
    ops = {"replay": replay_ops, "nested": nested_ops, "keep": keep_ops}[execution](microbatches)
    config = PlannerConfig(max_tokens_per_microbatch=max(64, tree.num_tokens), sharing="always", execution=execution)
    return Schedule(
        tree=tree, microbatches=tuple(microbatches), config=config, execution=execution, rank_ops=(tuple(ops),)
    )


def _ancestors_outside(tree: RolloutTree, start: int, stop: int) -> np.ndarray:
    """Rows before ``start`` that lie above a row of ``[start, stop)``, ascending."""
    before = np.arange(start)
    return before[tree.subtree_end[:start] > start] if stop > start else before[:0]


def passing(batch: TreeBatch, handoff: Handoff) -> TreePass:
    """A forward of a microbatch within a run, for layers by themselves."""
    return TreePass(batch, Wanted((), batch.labels, batch.owned), handoff=handoff)


def random_placement(tree: RolloutTree, seed: int, execution: str, world_size: int, *, pieces: int = 8) -> Schedule:
    """A valid schedule of several ranks that no planner would make: every piece on a rank drawn at random.

    A piece reads the upper part of its prefix from pieces of its own rank and computes the rest again. Ranks may be
    idle, and their numbers of microbatches differ.
    """
    rng = np.random.default_rng([seed, tree.num_tokens])
    cuts = np.unique(rng.integers(1, tree.num_tokens, min(pieces - 1, tree.num_tokens - 1)))
    bounds = [0, *cuts.tolist(), tree.num_tokens]
    by_rank: list[list[dict]] = [[] for _ in range(world_size)]
    for start, stop in pairwise(bounds):
        own = by_rank[rng.integers(world_size)]
        above = _ancestors_outside(tree, start, stop)
        held = np.array([np.isin(above, list(piece["rows"])) for piece in own] or [np.zeros(len(above), bool)])
        missing = above[held.sum(axis=0) != 1]
        highest = int(tree.depth[missing].min(initial=int(tree.depth[above].max(initial=0)) + 1))
        limit = int(rng.integers(highest + 1)) if rng.random() < 0.3 else highest
        prefix, again = above[tree.depth[above] < limit], above[tree.depth[above] >= limit]
        rows = np.concatenate([again, np.arange(start, stop)])
        trunks = [number for number, piece in enumerate(own) if np.isin(prefix, list(piece["rows"])).any()]
        own.append({"rows": set(rows.tolist()), "start": start, "prefix": prefix, "trunks": trunks})
    microbatches: list[Microbatch] = []
    rank_ops = []
    for rank, own in enumerate(by_rank):
        first = len(microbatches)
        for piece in own:
            rows = np.array(sorted(piece["rows"]))
            trunks = tuple(first + trunk for trunk in piece["trunks"])
            microbatch = Microbatch(
                id=len(microbatches),
                rows=rows,
                owned=rows >= piece["start"],
                prefix=piece["prefix"],
                trunks=trunks,
                rank=rank,
            )
            microbatches.append(microbatch)
        mine = microbatches[first:]
        readable = {trunk for microbatch in mine for trunk in microbatch.trunks}
        chosen = frozenset(trunk for trunk in sorted(readable) if rng.random() < 0.3)
        ops = {"replay": replay_ops, "nested": nested_ops}[execution](mine, chosen) if mine else []
        if (
            execution == "nested" and rank % 2 == 0
        ):  # states made again for some readers, beside the gradients of others
            ops = block_ops(mine, 2, tree.num_tokens, [1.0] * len(microbatches))
        rank_ops.append(tuple(ops))
    config = PlannerConfig(
        max_tokens_per_microbatch=max(64, tree.num_tokens),
        sharing="auto",
        execution=execution,
        world_size=world_size,
    )
    schedule = Schedule(
        tree=tree, microbatches=tuple(microbatches), config=config, execution=execution, rank_ops=tuple(rank_ops)
    )
    schedule.validate()
    return schedule
