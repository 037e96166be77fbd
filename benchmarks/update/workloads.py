"""Which steps there are: groups of shape files, and the sides that run on each."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harts_hf.bench.rollouts import steps_of
from harts_hf.bench.sides import COLLAPSED, PACKED, SORTED, STOCK, TREE
from harts_hf.rollouts.files import read_rollouts
from harts_hf.rollouts.recorded import RolloutGroup
from harts_hf.rollouts.shapes import shape_group

DRY_LENGTH, DRY_ROWS = 12, 4


class Workload(NamedTuple):
    """A shape file: groups to a step, and the steps on which sides without sharing, and stock trainers, run.

    ``collapsed``: whether enough is nested that collapsing it makes a faster baseline.
    """

    groups_per_step: int = 1
    unshared: tuple[int, ...] | None = None
    stock: tuple[int, ...] = ()
    collapsed: bool = False


WORKLOADS = {
    "miniswe_b_drop": Workload(1, stock=(0, 14)),
    "tau_airline_b": Workload(1, unshared=(0, 1), collapsed=True),
    "nemo_qwen3think_b_drop": Workload(1),
    "tot_game24": Workload(3, unshared=(0, 1), collapsed=True),
    "vmcts_dafny_bst": Workload(1, unshared=(0, 1)),
    "anyswe_a": Workload(2),
    "tau_airline_a": Workload(3, unshared=(0, 1)),
}
# Beside the plain step: SGD, full parameters, recorded labels, no old log-probs, as many groups as the workload says;
# "groups" is how many times as many.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "old-log-probs": {"old_log_probs": True},
    "adamw": {"optim": "adamw_torch_fused"},
    "lora": {"lora": 16},
    "all-labels": {"labels": "all"},
    "skewed": {"skew": 1.0},
    "kept": {"checkpointing": False},
    "two": {"groups": 2},
    "three": {"groups": 3},
}


def groups_of(shapes: Path, name: str, *, dry: bool) -> list[RolloutGroup]:
    """Of a shape file; if ``dry``, with a few short trajectories each."""
    path = shapes / f"{name}.jsonl.gz"
    if not dry:
        return read_rollouts(path)
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        shape_group(
            {
                "parent": row["parent"],
                "length": [min(length, DRY_LENGTH) for length in row["length"]],
                "sample_node": row["sample_node"][:DRY_ROWS],
            },
            str(row["group"]),
        )
        for row in map(_pruned, rows)
    ]


def _pruned(row: dict[str, Any]) -> dict[str, Any]:
    """Without the nodes that no kept trajectory passes."""
    kept: set[int] = set()
    for node in row["sample_node"][:DRY_ROWS]:
        while node >= 0 and node not in kept:
            kept.add(node)
            node = row["parent"][node]
    number = {node: index for index, node in enumerate(sorted(kept))}
    return {
        "group": row["group"],
        "parent": [number.get(row["parent"][node], -1) for node in sorted(kept)],
        "length": [row["length"][node] for node in sorted(kept)],
        "sample_node": [number[node] for node in row["sample_node"][:DRY_ROWS]],
    }


def steps_in(shapes: Path, name: str, *, dry: bool, variant: str = "plain") -> list[list[RolloutGroup]]:
    """The groups of each step of a workload in a variant; if ``dry``, of one group for the workload's own number."""
    own = 1 if dry else WORKLOADS[name].groups_per_step
    return steps_of(groups_of(shapes, name, dry=dry), own * VARIANTS[variant].get("groups", 1))


class Task(NamedTuple):
    """One step of a workload, in a variant."""

    workload: str
    step: int
    variant: str = "plain"


def tasks_of(words: Sequence[str], shapes: Path, *, dry: bool) -> list[Task]:
    """``NAME``, ``NAME:3`` or ``NAME:0-3``, of any number of workloads, each with ``@VARIANT`` behind if not plain."""
    found = []
    for word in words:
        steps, _, variant = word.partition("@")
        name, _, steps = steps.partition(":")
        if variant and variant not in VARIANTS:
            raise SystemExit(f"expected a variant of {', '.join(VARIANTS)}, got {variant!r}")
        if name not in WORKLOADS:
            raise SystemExit(f"expected a workload of {', '.join(WORKLOADS)}, got {name!r}")
        count = len(steps_in(shapes, name, dry=dry, variant=variant or "plain"))
        first, _, last = steps.partition("-")
        chosen = range(int(first), int(last or first) + 1) if steps else range(count)
        if chosen and not 0 <= chosen[0] <= chosen[-1] < count:
            raise SystemExit(f"expected steps of {name} from 0 to {count - 1}, got {steps}")
        found += [Task(name, step, variant or "plain") for step in chosen]
    return found


def kinds_of(task: Task) -> tuple[str, ...]:
    """Sides that run in a step; the tree alone where the others are sampled on other steps."""
    workload = WORKLOADS[task.workload]
    unshared = workload.unshared is None or task.step in workload.unshared
    stock = task.step in workload.stock
    packed = (PACKED, *((COLLAPSED,) if workload.collapsed else ())) if unshared else ()
    return (*((STOCK, SORTED) if stock else ()), *packed, TREE)
