"""Result files of several calls as one record: judged, restated where a later call knows better, and added up."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harts_hf.bench.parity import judge
from harts_hf.bench.report import total_of
from harts_hf.bench.sides import PACKED, TREE


def merge(parts: Sequence[dict[str, Any]], old: dict[str, Any]) -> dict[str, Any]:
    """Steps of several calls, each as measured last, and a total of each workload and variant in front of them.

    Raises:
        SystemExit: a step whose parity check fails.
    """
    names = ("model", "workload", "step", "variant")
    steps = {tuple(row[name] for name in names): row for row in old.get("rows", ()) if "step" in row}
    planted = dict(old.get("planted", {}))
    for part in parts:
        for row in part["rows"]:
            row = judged_again(row)
            if not row["parity"]["passed"]:
                raise SystemExit(f"refused: {row['workload']} {row['step']}: {row['parity']['failures']}")
            steps[tuple(row[name] for name in names)] = {**row, "commit": row.get("commit", part["commit"])}
        planted |= part.get("planted", {})
    by_model: dict[str, dict[str, float]] = {}
    for (model, *_), row in steps.items():  # the one step whose baseline was tried in several sizes
        if len(row["sides"].get(PACKED, {}).get("tried", ())) > 1 and row.get("microbatch_seconds", {}).get(PACKED):
            by_model[model] = row["microbatch_seconds"]
    by_workload: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for (model, workload, _, variant), row in sorted(steps.items(), key=lambda item: str(item[0])):
        own = restated(row, by_model.get(model, {}))
        by_workload.setdefault((model, workload, variant), []).append(own)
    totals = [
        {**total_of(rows), "variant": variant, "commits": sorted({row["commit"] for row in rows})}
        for (_, _, variant), rows in by_workload.items()
    ]
    last = parts[-1]
    return {
        "device": last["device"],
        "versions": last["versions"],
        "commit": last["commit"],
        "failures": {key: value for part in parts for key, value in part["failures"].items()},
        "planted": planted,
        "rows": [*totals, *(row for rows in by_workload.values() for row in rows)],
    }


def judged_again(row: dict[str, Any]) -> dict[str, Any]:
    """With the limits of today, which may be others than when it was measured."""
    parity = row["parity"]
    limits, failures = judge(
        parity["differences"], parity["from_packed"], parity["flips"], torch.bfloat16, reference=parity["reference"]
    )
    return {**row, "parity": {**parity, "limits": limits, "failures": failures, "passed": not failures}}


def restated(row: dict[str, Any], microbatch_seconds: Mapping[str, float]) -> dict[str, Any]:
    """With the seconds of a microbatch that another step of the model told, where this one told none.

    Args:
        row: of a step; one without an ideal, or with such seconds of its own, stays as it is.
        microbatch_seconds: by baseline.
    """
    if "ideal_seconds" not in row or row["microbatch_seconds"].get(PACKED) or not microbatch_seconds.get(PACKED):
        return row
    counts = {kind: row["sides"][kind]["microbatches"][row["sides"][kind]["setting"]] for kind in (PACKED, TREE)}
    seconds, ratio = dict(row["ideal_seconds"]), row["work_ratios"]["rows"]
    rows = seconds["rows"] * ratio  # of the baseline, with its microbatches
    constants = min(microbatch_seconds[PACKED] * counts[PACKED], rows)
    seconds |= {
        "rows": (rows - constants) / ratio,
        "microbatches": constants / counts[PACKED] * counts[TREE],
    }
    total = sum(seconds.values())
    return {
        **row,
        "microbatch_seconds": dict(microbatch_seconds),
        "ideal_seconds": seconds,
        "ideal": row["baseline_seconds"] / total,
        "efficiency": total / row["seconds"],
    }
