"""The checker of schedules sees what is broken."""

import pytest

from harts_hf.planner import Microbatch, PlannerConfig, Schedule, plan_window
from harts_hf.tree import RolloutTree

BASE = RolloutTree.from_shape([-1, 0, 0, 1, 1], [10, 9, 8, 7, 6], [2, 3, 4])


def base_schedule(**changes):
    """Two ranks, several trunks."""
    config = {"max_tokens_per_microbatch": 8, "chunk_size": 4, "world_size": 2, "sharing": "always", **changes}
    return plan_window(BASE, PlannerConfig(**config))


def changed(schedule, *, microbatch=None, ops=None, config=None):
    """The schedule with something replaced and nothing remembered."""
    microbatches = list(schedule.microbatches)
    if microbatch is not None:
        microbatches[microbatch.id] = microbatch
    return Schedule(
        tree=schedule.tree,
        microbatches=tuple(microbatches),
        config=config or schedule.config,
        execution=schedule.execution,
        rank_ops=schedule.rank_ops if ops is None else (tuple(ops), *schedule.rank_ops[1:]),
    )


def spans(microbatch, **changes):
    """The microbatch with spans replaced."""
    values = {name: getattr(microbatch, name) for name in ("id", "rank", "trunks")}
    values |= {name: getattr(microbatch, name) for name in ("row_spans", "owned_spans", "prefix_spans")}
    return Microbatch.from_spans(**(values | changes))


def dependent(schedule):
    """A microbatch that reads trunks."""
    return next(microbatch for microbatch in schedule.microbatches if microbatch.trunks)


def test_checker_sees_broken_microbatches():
    """An owner lost, or two, a parent missing, a trunk that is not one, a row both read and computed."""
    schedule = base_schedule()
    first, reader = schedule.microbatches[0], dependent(schedule)
    repeats = next(m for m in schedule.microbatches if not m.owned.all())
    broken = [
        spans(repeats, owned_spans=repeats.row_spans),
        spans(first, owned_spans=first.owned_spans[:0]),
        spans(first, row_spans=first.row_spans + 1),
        spans(reader, prefix_spans=reader.prefix_spans[:0], trunks=()),
        spans(reader, trunks=reader.trunks[:-1]),
        spans(reader, trunks=(*reader.trunks, reader.id)),
        spans(reader, prefix_spans=reader.row_spans),
        spans(reader, id=0),
        spans(reader, rank=1 - reader.rank),
    ]
    for microbatch in broken:
        with pytest.raises((AssertionError, KeyError)):
            changed(schedule, microbatch=microbatch).validate()


@pytest.mark.parametrize("execution", ["replay", "nested", "keep"])
def test_checker_sees_broken_orders(execution):
    """An op left out or doubled, all ops turned round, a trunk's backward before its reader's: all are seen."""
    schedule = base_schedule(execution=execution)
    schedule.validate()
    ops = list(schedule.rank_ops[0])
    for place in range(len(ops)):
        for wrong in (ops[:place] + ops[place + 1 :], ops[: place + 1] + ops[place:]):
            if wrong != ops and not (execution == "replay" and ops[place][0] == "S" and len(wrong) > len(ops)):
                with pytest.raises((AssertionError, KeyError, IndexError)):
                    changed(schedule, ops=wrong).validate()
    with pytest.raises(AssertionError):
        changed(schedule, ops=ops[::-1]).validate()
    reader = dependent(schedule)
    trunk = reader.trunks[-1]
    late = [op for op in ops if op != ("B", trunk)]
    late.insert(late.index(("B", reader.id)), ("B", trunk))
    with pytest.raises(AssertionError):
        changed(schedule, ops=late).validate()


def test_checker_sees_broken_limits():
    """Limits that the schedule was not made for."""
    schedule = base_schedule(execution="keep")
    for name, value in (("max_graph_tokens", 4), ("max_handoff_bytes", 1), ("max_linear_rows", 4)):
        config = PlannerConfig(**{**vars(schedule.config), name: value})
        with pytest.raises(AssertionError):
            changed(schedule, config=config).validate()
    config = PlannerConfig(**{**vars(schedule.config), "max_tokens_per_microbatch": 4})
    with pytest.raises(AssertionError, match="over the budget without need"):
        changed(schedule, config=config).validate()
