"""The checker of schedules sees what is broken."""

from dataclasses import replace

import pytest

from harts_hf.planner import CostModel, Microbatch, PlannerConfig, Schedule, plan_window
from harts_hf.planner.cost import UnitSeconds
from harts_hf.planner.execution import DUMMY
from harts_hf.tree import RolloutTree

BASE = RolloutTree.from_shape([-1, 0, 0, 1, 1], [10, 9, 8, 7, 6], [2, 3, 4])
ROWS_ONLY = UnitSeconds(rows=1e-6, linear_rows=0, pairs=0, calls=0, handoff_bytes=0, microbatches=0)


def base_schedule(**changes):
    """Two ranks, several trunks, the root computed on both."""
    cost = CostModel(forward=ROWS_ONLY, backward=ROWS_ONLY)
    config = {"max_tokens_per_microbatch": 8, "chunk_size": 4, "world_size": 2, "cost": cost, **changes}
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


def test_checker_sees_ranks_that_miss_a_trunk():
    """Two ranks exchange a microbatch each, ops and all: a dependent then misses its trunk, or a trunk its rank."""
    schedule = base_schedule()
    one = next(m for m in schedule.microbatches if m.rank == 0 and m.trunks)
    other = next(m for m in schedule.microbatches if m.rank == 1 and m.trunks)
    microbatches = list(schedule.microbatches)
    microbatches[one.id], microbatches[other.id] = spans(one, rank=1), spans(other, rank=0)
    names = {one.id: other.id, other.id: one.id}
    rank_ops = tuple(tuple((kind, names.get(i, i)) for kind, i in ops) for ops in schedule.rank_ops)
    with pytest.raises(AssertionError, match="a trunk elsewhere"):
        replace(schedule, microbatches=tuple(microbatches), rank_ops=rank_ops, accounts=None).validate()


def test_checker_sees_dummies_that_do_not_fit(monkeypatch):
    """Strings of unlike kinds, a rank without its dummy, a dummy backward that no dummy forward opened."""
    schedule = base_schedule()
    aligned = [schedule.ops(rank) for rank in range(2)]
    shorter = min(range(2), key=lambda rank: len(schedule.rank_ops[rank]))
    place = aligned[shorter].index(("F", DUMMY))
    without = [list(ops) for ops in aligned]
    del without[shorter][place : place + 2]
    turned = [list(ops) for ops in aligned]
    for ops in turned:
        ops[place], ops[place + 1] = ops[place + 1], ops[place]
    for wrong, message in ((without, "different strings"), (turned, "not of the last open graph|ops lost")):
        broken = replace(schedule)
        monkeypatch.setattr(Schedule, "_aligned", wrong)
        with pytest.raises(AssertionError, match=message):
            broken.validate()
        monkeypatch.undo()


def test_checker_sees_rows_computed_twice_although_each_was_asked_for_once():
    """A plan of sharing="auto" that repeats the root on two ranks is no plan of sharing="always"."""
    schedule = base_schedule()
    assert schedule.forward_tokens > BASE.num_tokens
    config = PlannerConfig(**{**vars(schedule.config), "sharing": "always"})
    with pytest.raises(AssertionError, match="computed twice"):
        changed(schedule, config=config).validate()
