"""Schedules as versioned JSON (NumPy only)."""

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.cost import CostModel
from harts_hf.planner.microbatch import Microbatch
from harts_hf.tree import IntArray, RolloutTree

if TYPE_CHECKING:
    from harts_hf.planner.schedule import Schedule

FORMAT = "harts_hf.schedule"
VERSION = 1


def schedule_to_json(schedule: "Schedule") -> str:
    """See :meth:`Schedule.to_json`."""
    config: dict[str, Any] = {f.name: getattr(schedule.config, f.name) for f in fields(PlannerConfig)}
    if schedule.config.cost is not None:
        config["cost"] = json.loads(schedule.config.cost.to_json())
    content = {
        "format": FORMAT,
        "version": VERSION,
        "config": config,
        "execution": schedule.execution,
        "decision": schedule.decision,
        "tree": _tree_to_dict(schedule.tree),
        "microbatches": [
            {
                "rank": microbatch.rank,
                "trunks": list(microbatch.trunks),
                "rows": microbatch.row_spans.tolist(),
                "owned": microbatch.owned_spans.tolist(),
                "prefix": microbatch.prefix_spans.tolist(),
            }
            for microbatch in schedule.microbatches
        ],
        "ops": [[[kind, index] for kind, index in ops] for ops in schedule.rank_ops],
    }
    return json.dumps(content, separators=(",", ":"))


def schedule_from_json(text: str, tree: RolloutTree | None) -> "Schedule":
    """See :meth:`Schedule.from_json`."""
    from harts_hf.planner.schedule import Schedule

    content = json.loads(text)
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"expected a schedule of format {FORMAT!r}, version {VERSION}")
    if tree is None:
        tree = RolloutTree.from_shape(**content["tree"])
    elif _tree_to_dict(tree) != content["tree"]:
        raise ValueError(f"expected the tree that the schedule was made for, got another shape: {tree}")
    config = dict(content["config"])
    if config["cost"] is not None:
        config["cost"] = CostModel.from_json(json.dumps(config["cost"]))
    microbatches = tuple(
        Microbatch.from_spans(
            id=index,
            rank=item["rank"],
            trunks=tuple(item["trunks"]),
            row_spans=_spans(item["rows"]),
            owned_spans=_spans(item["owned"]),
            prefix_spans=_spans(item["prefix"]),
        )
        for index, item in enumerate(content["microbatches"])
    )
    return Schedule(
        tree=tree,
        microbatches=microbatches,
        config=PlannerConfig(**config),
        execution=content["execution"],
        decision=content["decision"],
        rank_ops=tuple(tuple((kind, index) for kind, index in ops) for ops in content["ops"]),
    )


def _spans(spans: list[list[int]]) -> IntArray:
    return np.array(spans, np.int64).reshape(-1, 2)


def _tree_to_dict(tree: RolloutTree) -> dict[str, list[int]]:
    """The tree's shape for :meth:`RolloutTree.from_shape`: segments cut where trajectories end."""
    starts = np.union1d(tree.segment_starts, tree.end_rows + 1)
    starts = starts[starts < tree.num_tokens]
    above = tree.parent[starts]
    parent = np.where(above < 0, -1, np.searchsorted(starts, above, side="right") - 1)
    return {
        "parent": parent.tolist(),
        "length": np.diff(np.append(starts, tree.num_tokens)).tolist(),
        "sample_node": (np.searchsorted(starts, tree.end_rows, side="right") - 1).tolist(),
    }
