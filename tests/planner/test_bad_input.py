"""Settings and JSON of other types, ranges and shapes are refused with what was expected and what came."""

import copy
import json

import numpy as np
import pytest

from harts_hf.planner import CostModel, Microbatch, PlannerConfig, Schedule, min_linear_calls, plan_window
from harts_hf.planner.config import MAX_WORLD_SIZE
from harts_hf.tree import RolloutTree

TREE = RolloutTree.from_shape([-1, 0, 0, -1], [70, 60, 50, 170], [1, 2, 3])
CONFIG = PlannerConfig(max_tokens_per_microbatch=64, world_size=2, sharing="always", cost=CostModel())
TEXT = plan_window(TREE, CONFIG).to_json()


def places(value, path=()):
    """Every node of nested lists and dicts, by its path."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def changed(path, change):
    """The JSON with one node replaced."""
    content = copy.deepcopy(json.loads(TEXT))
    if not path:
        return change(content)
    node = content
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = change(node[path[-1]])
    return content


def test_every_node_of_another_type_is_refused():
    """None, a bool, text, a float or a list in place of any node: a ValueError that says what was expected."""
    optional = {("config", name) for name in ("max_linear_rows", "max_graph_tokens", "max_handoff_bytes", "cost")}
    count = 0
    for path in places(json.loads(TEXT)):
        for wrong in (None, True, "x", 1.5, [[]], {"x": 1}):
            content = changed(path, lambda value, wrong=wrong: wrong)
            is_legal = (wrong is None and path in optional) or (path == ("decision",) and wrong == "x")
            is_legal |= path[:2] == ("config", "handoff") and wrong is True
            is_legal |= path[:2] == ("config", "cost") and (wrong == 1.5 or (wrong == "x" and path[2:] == ("source",)))
            if is_legal:
                continue
            with pytest.raises(ValueError, match="expected"):
                Schedule.from_json(json.dumps(content)).validate()
            count += 1
    assert count > 900


def test_missing_and_unknown_keys_are_refused():
    """In every dict of the JSON."""
    for path in places(json.loads(TEXT)):
        inside = changed(path, lambda value: value)
        for key in path:
            inside = inside[key]
        if isinstance(inside, dict):
            for edit in (lambda d: {**d, "extra": 1}, lambda d: dict(list(d.items())[1:])):
                with pytest.raises(ValueError, match="expected"):
                    Schedule.from_json(json.dumps(changed(path, edit)))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "NaN", '"x"'])
def test_text_that_is_no_schedule(text):
    """Text that is no JSON, or JSON of something else."""
    with pytest.raises(ValueError, match="expected a schedule"):
        Schedule.from_json(text)
    with pytest.raises(ValueError, match="expected a cost model"):
        CostModel.from_json(text)


def test_numbers_out_of_range_are_refused():
    """-1, and numbers above every row, microbatch and rank, wherever rows, ids and ranks stand."""
    for path in places(json.loads(TEXT)):
        value = json.loads(TEXT)
        for key in path:
            value = value[key]
        if path[:1] not in (("microbatches",), ("ops",)) or type(value) is not int:
            continue
        for wrong in (-1, 10**9, 10**30):
            with pytest.raises(ValueError, match=r"expected integers in \["):
                Schedule.from_json(json.dumps(changed(path, lambda value, wrong=wrong: wrong)))


def test_proof_sees_a_row_outside_the_tree():
    """A row of -1, or the one after the last, in rows, owned rows or prefix."""
    schedule = plan_window(TREE, CONFIG)
    for index, microbatch in enumerate(schedule.microbatches):
        for name in ("row_spans", "owned_spans", "prefix_spans"):
            for wrong in (-1, TREE.num_tokens):
                values = {key: getattr(microbatch, key) for key in ("id", "rank", "trunks")}
                values |= {key: getattr(microbatch, key) for key in ("row_spans", "owned_spans", "prefix_spans")}
                extra = np.array([[wrong, wrong + 1]])
                parts = [extra, values[name]] if wrong < 0 else [values[name], extra]
                microbatches = list(schedule.microbatches)
                microbatches[index] = Microbatch.from_spans(**{**values, name: np.concatenate(parts)})
                broken = Schedule(
                    tree=TREE,
                    microbatches=tuple(microbatches),
                    config=CONFIG,
                    execution=schedule.execution,
                    rank_ops=schedule.rank_ops,
                )
                with pytest.raises(AssertionError, match=r"a row outside the tree|spans that touch"):
                    broken.validate()


INTEGERS = ["max_tokens_per_microbatch", "max_linear_rows", "max_graph_tokens", "max_handoff_bytes", "world_size"]


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_integers_of_numpy_plan_as_integers(kind):
    """The plan is that of Python's integers, down to its JSON."""
    values = {"max_tokens_per_microbatch": 64, "max_graph_tokens": 128, "world_size": 2, "chunk_size": 32}
    same = plan_window(TREE, PlannerConfig(**{name: kind(value) for name, value in values.items()}))
    assert same.to_json() == plan_window(TREE, PlannerConfig(**values)).to_json()
    assert type(same.config.world_size) is int


@pytest.mark.parametrize("name", [*INTEGERS, "chunk_size"])
@pytest.mark.parametrize("value", [True, np.True_, 64.0, float("nan"), "64", [64]])
def test_what_is_no_integer_is_refused(name, value):
    """Bools, floats, text and lists."""
    with pytest.raises(ValueError, match=f"expected {name} to be an integer, got"):
        PlannerConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"handoff": 1}, "expected handoff to be True or False, got 1"),
        ({"cost": "cost.json"}, "expected cost to be a CostModel or None, got 'cost.json'"),
        ({"sharing": ["auto"]}, "expected sharing to be one of"),
        ({"world_size": 10**9}, f"expected world_size of at most {MAX_WORLD_SIZE}, got 1000000000"),
    ],
)
def test_other_settings_are_refused(settings, message):
    """What is no bool, cost model or choice; more ranks than can be planned for."""
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**settings)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, True, "1", None])
def test_cost_models_of_no_numbers_are_refused(value):
    """NaN, infinity, negative numbers, bools, text: as a size and as a coefficient."""
    with pytest.raises(ValueError, match="expected handoff_bytes_per_row between 0 and"):
        CostModel(handoff_bytes_per_row=value)
    forward = type(CostModel().forward)(**{**vars(CostModel().forward), "rows": value})
    with pytest.raises(ValueError, match="at least 0 in forward"):
        CostModel(forward=forward)


def test_idle_ranks_are_planned():
    """A quarter of the ranks that are allowed, most of them idle."""
    schedule = plan_window(TREE, PlannerConfig(world_size=MAX_WORLD_SIZE // 4))
    schedule.validate()
    assert sum(bool(ops) for ops in schedule.rank_ops) <= TREE.num_trajectories


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_window([[1, 2], [1, 3]]), "a RolloutTree or several .*, got list"),
        (lambda: plan_window(None), "a RolloutTree or several .*, got NoneType"),
        (lambda: plan_window(TREE, {"world_size": 2}), "a PlannerConfig or None, got dict"),
        (lambda: min_linear_calls([TREE]), "expected a RolloutTree, got list"),
        (lambda: min_linear_calls(TREE, 0), "chunk_size of at least 1 .*, got 0"),
        (lambda: min_linear_calls(TREE, 64.0), "chunk_size to be an integer, got 64.0"),
    ],
)
def test_other_things_than_trees(call, message):
    """Trajectories instead of trees, settings instead of a configuration, and chunks that hold nothing."""
    with pytest.raises(ValueError, match=message):
        call()
