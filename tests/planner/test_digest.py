"""The number by which ranks agree on a schedule: equal for equal work, another for anything that differs."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from harts_hf.planner import CostModel, Microbatch, PlannerConfig, Schedule, plan_window
from harts_hf.tree import RolloutTree

CONFIG = PlannerConfig(max_tokens_per_microbatch=16, chunk_size=4, world_size=2, sharing="always")


def forest(last_token: int = 3) -> RolloutTree:
    """Two trees with forks of unlike lengths, 63 rows."""
    tokens = np.arange(63)
    tokens[-1] += last_token
    return RolloutTree.from_shape([-1, 0, 0, 1, 1, -1], [9, 7, 20, 3, 11, 13], [2, 3, 4, 5], tokens)


def with_microbatch(schedule: Schedule, **changed: object) -> Schedule:
    """The schedule with its last microbatch changed."""
    old = schedule.microbatches[-1]
    spans = {name: getattr(old, name) for name in ("row_spans", "owned_spans", "prefix_spans")}
    new = Microbatch.from_spans(**{"id": old.id, "rank": old.rank, "trunks": old.trunks, **spans, **changed})
    return replace(schedule, microbatches=(*schedule.microbatches[:-1], new))


def test_equal_plans_have_equal_digests():
    """A plan made again, read from JSON, with other words or another name of the cost model: the same number."""
    schedule = plan_window(forest(), CONFIG)
    digest = schedule.digest()
    assert isinstance(digest, int) and 0 <= digest < 2**63
    assert plan_window(forest(), CONFIG).digest() == digest
    assert Schedule.from_json(schedule.to_json(), forest()).digest() == digest
    assert replace(schedule, decision="another sentence").digest() == digest
    assert plan_window(forest(), replace(CONFIG, cost=CostModel(source="a file"))).digest() == digest


def test_anything_that_ranks_would_run_differently_changes_the_digest():
    """Tokens, rows, owners, prefix, trunks, rank, ops, their order, execution, chunk size, number of ranks."""
    schedule = plan_window(forest(), CONFIG)
    last = schedule.microbatches[-1]
    first, *rest = schedule.rank_ops
    others = {
        "one token": plan_window(forest(last_token=4), CONFIG),
        "no tokens": replace(schedule, tree=RolloutTree.from_shape(**forest().to_shape())),
        "trajectories exchanged": replace(
            schedule, tree=RolloutTree.from_shape(**{**forest().to_shape(), "sample_node": [3, 2, 4, 5]})
        ),
        "rows": with_microbatch(schedule, row_spans=last.row_spans + 1),
        "owned": with_microbatch(schedule, owned_spans=last.owned_spans + 1),
        "prefix": with_microbatch(schedule, prefix_spans=np.array([[0, 1], [2, 3]])),
        "trunks": with_microbatch(schedule, trunks=(*last.trunks, last.id)),
        "rank": with_microbatch(schedule, rank=1 - last.rank),
        "order": replace(schedule, rank_ops=(first[::-1], *rest)),
        "ranks exchanged": replace(schedule, rank_ops=tuple(schedule.rank_ops[::-1])),
        "one op fewer": replace(schedule, rank_ops=(first[:-1], *rest)),
        "an op on the other rank": replace(schedule, rank_ops=(first[:-1], (first[-1], *rest[0]))),
        "execution": replace(schedule, execution="keep"),
        "chunk size": replace(schedule, config=replace(CONFIG, chunk_size=8)),
        "number of ranks": replace(schedule, config=replace(CONFIG, world_size=3)),
    }
    digests = {name: other.digest() for name, other in others.items()}
    digests["itself"] = schedule.digest()
    assert len(set(digests.values())) == len(digests), digests


@pytest.mark.essential("random")
@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_the_digest_does_not_depend_on_the_process(seed):
    """Another process, whatever PYTHONHASHSEED, plans the same and gets the same number."""
    program = (
        "from test_digest import CONFIG, forest\nfrom harts_hf.planner import plan_window\n"
        "print(plan_window(forest(), CONFIG).digest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == plan_window(forest(), CONFIG).digest()
