"""Result files of several calls as one record: judged, restated where a later call knows better, and added up."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harts_hf.bench.parity import ROUNDED, judge, judge_whole
from harts_hf.bench.report import bounds_of, total_of
from harts_hf.bench.sides import COLLAPSED, PACKED, STOCK, STOCK_KINDS, TREE


def merge(parts: Sequence[dict[str, Any]], old: dict[str, Any]) -> dict[str, Any]:
    """Steps of several calls, each as measured last, and a total of each workload and variant in front of them.

    Without any call the record is judged, restated and added up anew.

    Stock trainers take long: where a step was measured again without them, they stay as they were measured, with their
    commit and the verdict of that time.

    Raises:
        SystemExit: a step whose parity check fails.
    """
    names = ("model", "workload", "step", "variant")
    steps = {tuple(row[name] for name in names): row for row in old.get("rows", ()) if "step" in row}
    planted = dict(old.get("planted", {}))
    for part in parts:
        for row in (row for row in part["rows"] if "step" in row):  # a record has totals, too
            key = tuple(row[name] for name in names)
            steps[key] = with_stock_of(steps.get(key), {**row, "commit": row.get("commit", part["commit"])})
        planted |= part.get("planted", {})
    for key, row in steps.items():
        steps[key] = judged_again(row, [one["parity"] for other, one in steps.items() if other[0] == key[0]])
        for one in (steps[key], row.get("stock_of", {"parity": {"passed": True}})):
            if not one["parity"]["passed"]:
                raise SystemExit(f"refused: {row['workload']} {row['step']}: {one['parity']['failures']}")
    by_model: dict[str, dict[str, float]] = {}
    for (model, *_), row in steps.items():  # the one step whose baseline was tried in several sizes
        if len(row["sides"].get(PACKED, {}).get("tried", ())) > 1 and row.get("microbatch_seconds", {}).get(PACKED):
            by_model[model] = row["microbatch_seconds"]
    by_workload: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for (model, workload, _, variant), row in sorted(steps.items(), key=lambda item: str(item[0])):
        own = with_bounds(restated(row, by_model.get(model, {})))
        by_workload.setdefault((model, workload, variant), []).append(own)
    totals = [
        {**total_of(rows), "variant": variant, "commits": sorted({row["commit"] for row in rows})}
        for (_, _, variant), rows in by_workload.items()
    ]
    last = parts[-1] if parts else old
    return {
        "device": last["device"],
        "versions": last["versions"],
        "commit": last["commit"],
        "failures": {key: value for part in parts for key, value in part["failures"].items()},
        "planted": planted,
        "rows": [*totals, *(row for rows in by_workload.values() for row in rows)],
    }


def with_stock_of(before: Mapping[str, Any] | None, row: dict[str, Any]) -> dict[str, Any]:
    """A step with the stock trainers of an earlier measurement of it, if it has none of its own."""
    stock = {} if before is None else {k: side for k, side in before["sides"].items() if k in STOCK_KINDS}
    if before is None or not stock or set(stock) & set(row["sides"]):
        return row
    kept = {name: before[name] for name in ("stock_seconds", "stock_peak_memory")}
    return {
        **row,
        **kept,
        "speedup_stock": kept["stock_seconds"] / row["seconds"],
        "stock_of": before.get("stock_of", {name: before[name] for name in ("commit", "parity")}),
        "sides": {**stock, **row["sides"]},
    }


def judged_again(row: dict[str, Any], parities: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """With the limits of today, which may be others than when it was measured.

    Args:
        row: of a step.
        parities: of all steps of its model: where it lacks a measure of roundings, it is lent the smallest of these.
    """
    parity = row["parity"]
    differences, from_packed, lent = dict(parity["differences"]), dict(parity["from_packed"]), {}
    rounded = [value for one in parities for name, value in one["differences"].items() if name.endswith(ROUNDED)]
    halves = [value for one in parities for name, value in one["from_packed"].items() if name.startswith(PACKED)]
    if parity["reference"].startswith(STOCK) and not any(name.endswith(ROUNDED) for name in differences) and rounded:
        least = min(rounded, key=lambda one: one["gradients"])
        differences[f"another step{ROUNDED}"] = least
        lent["gradients"] = least["gradients"]
    if not any(name.startswith(PACKED) for name in from_packed) and halves:
        from_packed[f"{PACKED} of another step"] = lent["sharing"] = min(halves)
    limits, failures = judge(
        differences, from_packed, parity["flips"], torch.bfloat16, reference=parity["reference"],
        scales=parity.get("scales_from_packed"),
    )  # fmt: skip
    logs = {
        side["setting"]: side["log"]
        for kind, side in row["sides"].items()
        if kind not in STOCK_KINDS and "log" in side and side["rows_per_batch"] == row["sides"][TREE]["rows_per_batch"]
    }
    failures += judge_whole(logs, torch.bfloat16)
    found = {**parity, "limits": limits, "failures": failures, "passed": not failures}
    return {**row, "parity": {**found, "lent": lent} if lent else found}


def restated(row: dict[str, Any], microbatch_seconds: Mapping[str, float]) -> dict[str, Any]:
    """With the seconds of a microbatch that another step of the model told, where this one told none.

    Args:
        row: of a step; one without an ideal, or with such seconds of its own, stays as it is.
        microbatch_seconds: by baseline; the one without sharing speaks for the one that collapses, too.
    """
    constant = microbatch_seconds.get(PACKED)
    if not constant:
        return row
    found = dict(row)
    for kind, suffix, baseline in ((PACKED, "", "baseline"), (COLLAPSED, "_collapsed", "collapsed")):
        if f"ideal_seconds{suffix}" not in row or row["microbatch_seconds"].get(kind):
            continue
        own, tree = (row["sides"][one]["microbatches"][row["sides"][one]["setting"]] for one in (kind, TREE))
        seconds, ratio = dict(row[f"ideal_seconds{suffix}"]), row[f"work_ratios{suffix}"]["rows"]
        rows = seconds["rows"] * ratio  # of the baseline, with its microbatches
        constants = min(constant * own, rows)
        seconds |= {"rows": (rows - constants) / ratio, "microbatches": constants / own * tree}
        total = sum(seconds.values())
        found |= {
            "microbatch_seconds": {**found["microbatch_seconds"], kind: constant},
            f"ideal_seconds{suffix}": seconds,
            f"ideal{suffix}": row[f"{baseline}_seconds"] / total,
            f"efficiency{suffix}": total / row["seconds"],
        }
    return found


def with_bounds(row: dict[str, Any]) -> dict[str, Any]:
    """With the ideals if no microbatch had a constant, which are of the ideals that were restated."""
    for kind, suffix in ((PACKED, ""), (COLLAPSED, f"_{COLLAPSED}")):
        if f"ideal_seconds{suffix}" in row:
            row = {**row, **bounds_of(row, kind, suffix)}
    return row
