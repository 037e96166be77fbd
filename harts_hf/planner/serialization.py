"""What a schedule is made of as versioned JSON (NumPy only)."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

import numpy as np

from harts_hf.planner.config import Execution, PlannerConfig
from harts_hf.planner.cost import CostModel, is_version
from harts_hf.planner.execution import OP_KINDS, Op
from harts_hf.planner.microbatch import Microbatch
from harts_hf.tree import IntArray, RolloutTree

FORMAT = "harts_hf.schedule"
VERSION = 1
_KEYS = {"format", "version", "config", "execution", "decision", "tree", "microbatches", "ops"}
_MICROBATCH_KEYS = {"rank", "trunks", "rows", "owned", "prefix"}


def to_json(
    *,
    tree: RolloutTree,
    microbatches: Sequence[Microbatch],
    config: PlannerConfig,
    execution: Execution,
    rank_ops: Sequence[Sequence[Op]],
    decision: str,
) -> str:
    """The fields of a schedule as JSON."""
    plain: dict[str, Any] = dict(vars(config.plain()))
    if config.cost is not None:
        plain["cost"] = config.cost.to_dict()
    content = {
        "format": FORMAT,
        "version": VERSION,
        "config": plain,
        "execution": execution,
        "decision": decision,
        "tree": tree.to_shape(),
        "microbatches": [
            {
                "rank": microbatch.rank,
                "trunks": list(microbatch.trunks),
                "rows": microbatch.row_spans.tolist(),
                "owned": microbatch.owned_spans.tolist(),
                "prefix": microbatch.prefix_spans.tolist(),
            }
            for microbatch in microbatches
        ],
        "ops": [[[kind, index] for kind, index in ops] for ops in rank_ops],
    }
    return json.dumps(content, separators=(",", ":"))


def from_json(text: str, tree: RolloutTree | None) -> dict[str, Any]:
    """The fields of a schedule, by name: the inverse of :func:`to_json`.

    Types and ranges are checked here; whether the schedule is right, ``Schedule.validate()`` says.

    Raises:
        ValueError: see :meth:`harts_hf.planner.Schedule.from_json`.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a schedule as JSON, got text that is none: {error}") from None
    if not isinstance(content, dict) or not is_version(content, FORMAT, VERSION):
        raise ValueError(f"expected a schedule of format {FORMAT!r}, version {VERSION}, got {_short(content)}")
    _check_keys("a schedule", content, _KEYS)
    config = _config(content["config"])
    _check_keys("the tree", content["tree"], {"parent", "length", "sample_node"})
    if tree is None:
        for name, values in content["tree"].items():
            _integers(f"{name} of the tree", values, -1, 2**62)
        tree = RolloutTree.from_shape(**content["tree"])
    elif tree.to_shape() != content["tree"]:
        raise ValueError(f"expected the tree that the schedule was made for, got another shape: {tree}")
    if content["execution"] not in get_args(Execution):
        raise ValueError(f"expected execution replay, nested or keep, got {_short(content['execution'])}")
    if not isinstance(content["decision"], str):
        raise ValueError(f"expected decision to be text, got {_short(content['decision'])}")
    items = _list("microbatches", content["microbatches"])
    microbatches = tuple(_microbatch(index, item, config.world_size, tree) for index, item in enumerate(items))
    return {
        "tree": tree,
        "microbatches": microbatches,
        "config": config,
        "execution": content["execution"],
        "decision": content["decision"],
        "rank_ops": _rank_ops(content["ops"], config.world_size, len(microbatches)),
    }


def _config(content: Any) -> PlannerConfig:
    _check_keys("config", content, {f.name for f in fields(PlannerConfig)})
    cost = content["cost"]
    return PlannerConfig(**{**content, "cost": None if cost is None else CostModel.from_dict(cost)})


def _microbatch(index: int, item: Any, world_size: int, tree: RolloutTree) -> Microbatch:
    name = f"microbatch {index}"
    _check_keys(name, item, _MICROBATCH_KEYS)
    return Microbatch.from_spans(
        id=index,
        rank=_integers(f"rank of {name}", [item["rank"]], 0, world_size)[0],
        trunks=tuple(_integers(f"trunks of {name}", item["trunks"], 0, index)),
        row_spans=_spans(f"rows of {name}", item["rows"], tree.num_tokens),
        owned_spans=_spans(f"owned rows of {name}", item["owned"], tree.num_tokens),
        prefix_spans=_spans(f"prefix of {name}", item["prefix"], tree.num_tokens),
    )


def _spans(name: str, spans: Any, num_rows: int) -> IntArray:
    pairs = _list(name, spans)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"expected {name} as pairs [start, stop], got {_short(spans)}")
    ends = _integers(name, [end for pair in pairs for end in pair], 0, num_rows + 1)
    return np.array(ends, np.int64).reshape(-1, 2)


def _rank_ops(content: Any, world_size: int, num_microbatches: int) -> tuple[tuple[Op, ...], ...]:
    strings = _list("ops", content)
    if len(strings) != world_size:
        raise ValueError(f"expected the ops of {world_size} ranks, got those of {len(strings)}")
    rank_ops = []
    for rank, ops in enumerate(strings):
        for op in _list(f"ops of rank {rank}", ops):
            if not (isinstance(op, list) and len(op) == 2 and op[0] in OP_KINDS):
                raise ValueError(f"expected ops [S, F or B, microbatch] on rank {rank}, got {_short(op)}")
        _integers(f"microbatches in the ops of rank {rank}", [op[1] for op in ops], 0, num_microbatches)
        rank_ops.append(tuple((kind, index) for kind, index in ops))
    return tuple(rank_ops)


def _check_keys(name: str, content: Any, expected: set[str]) -> None:
    if not isinstance(content, dict) or set(content) != expected:
        got = sorted(content) if isinstance(content, dict) else content
        raise ValueError(f"expected the keys {', '.join(sorted(expected))} in {name}, got {_short(got)}")


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected {name} as a list, got {_short(value)}")
    return value


def _integers(name: str, values: Any, low: int, stop: int) -> list[int]:
    for value in _list(name, values):
        if type(value) is not int or not low <= value < stop:  # a bool is no integer here
            raise ValueError(f"expected integers in [{low}, {stop}) as {name}, got {_short(value)}")
    return values


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
