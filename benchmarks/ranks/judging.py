"""What result files of jobs allow to say, and whether they may: no figure without its parity. Needs no torch."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.ranks.jobs import MOVED, Job
from benchmarks.ranks.sketches import difference, moved, size

# Sketches may differ from one process's by twice what two ways of one process differ by, which compute the same in
# other microbatches; by FLOORS where those happen to round alike; never by more than CEILINGS.
# float32: tiny models on a CPU differ by 1e-6 to 1e-5 (tests/test_ranks_benchmark.py); bfloat16: as harts_hf.bench has
# it for models whose tokens do not choose experts.
NOISE_FACTOR = 2.0
FLOORS = {"float32": 1e-4, "bfloat16": 0.05}
CEILINGS = {"float32": 2e-2, "bfloat16": 0.2}
# Of parameters in bfloat16 after three steps, over their size: a weight is rounded by at most half of 2**-8 of it.
ROUNDING = 2.0**-8
# Metrics of a step beside one GPU's: steps of one process differ by 1e-5 in entropy and 0.8 % in gradient norm (bf16,
# sums in another order), under any backend; losses of an on-policy step do not depend on the model but for rounding.
METRICS = {"loss": 1e-3, "entropy": 1e-3, "grad_norm": 0.03}
LOSS_SCALE = 0.01  # absolute: a loss is near zero
BARS = {"speedup": 10.45, "scaling": 0.90, "lost": 0.05, "planner_share": 0.02}


def noise_of(one: dict[str, Any]) -> float:
    """How far the gradients of one process's sides lie apart; 0 of a single side."""
    first, *others = one["gradients"].values()
    return max((difference(other, first)[0] for other in others), default=0.0)


def parity_of(part: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """Gradients of all sides, and parameters after three steps, beside those of one process.

    Returns:
        ``gradients`` by side and ``parameters``: the largest relative difference of any kind of parameters, and the
        kind; ``noise``, ``limit``; ``failures``, empty if all is well.
    """
    dtype = part["dtype"]
    noise = noise_of(one)
    limit = min(max(NOISE_FACTOR * noise, FLOORS[dtype]), CEILINGS[dtype])
    found: dict[str, Any] = {"noise": noise, "limit": limit, "gradients": {}, "failures": []}
    reference = next(iter(one["gradients"].values()))
    for side, values in part["gradients"].items():
        apart, kind = difference(values, reference)
        found["gradients"][side] = [apart, kind]
        if not (apart <= limit and size(reference) > 0):
            found["failures"].append(
                f"gradients of {side} differ by {apart:.1e} ({kind}), at most {limit:.1e} expected"
            )
    if not noise <= CEILINGS[dtype]:
        found["failures"].append(f"one process's own gradients differ by {noise:.1e}")
    if part["kind"].startswith("parity"):
        found |= _parameters(part, one, limit, found["failures"])
    return found


def _parameters(part: dict[str, Any], one: dict[str, Any], limit: float, failures: list[str]) -> dict[str, Any]:
    """After three steps: what they moved by in float32; in bfloat16 their values, which moved by more than limits."""
    ours, theirs = (moved(which["parameters"]["before"], which["parameters"]["after"]) for which in (part, one))
    if part["dtype"] == "float32":
        apart, kind = difference(ours, theirs)
    else:
        whole = size(one["parameters"]["before"])
        apart, kind = size(moved(theirs, ours)) / whole, "all"
        limit = ROUNDING
        if not size(theirs) >= 2 * limit * whole:
            failures.append(f"weights moved by {size(theirs) / whole:.1e} of their size: too little to compare")
    if not (apart <= limit and size(theirs) > 0):
        failures.append(f"parameters differ by {apart:.1e} ({kind}) after {MOVED} steps, at most {limit:.1e} expected")
    return {"parameters": [apart, kind], "parameters_limit": limit}


def differences(row: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """By metric, how far the mean over a row's steps is from that of one process's, relative to it."""
    found = {}
    for name in METRICS:
        ours, theirs = statistics.fmean(row[name]), statistics.fmean(one[name])
        found[name] = abs(ours - theirs) / max(abs(theirs), LOSS_SCALE if name == "loss" else 1e-9)
    return found


def same_metrics(row: dict[str, Any], one: dict[str, Any]) -> bool:
    """Whether each metric is one process's within bf16 noise; none that is not a number is."""
    return all(value <= METRICS[name] for name, value in differences(row, one).items())


# ---- times ----------------------------------------------------------------------------------------------------------


def side_of(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The timed steps of one side; seconds are the slowest rank's."""
    seconds, inside = ([max(step[name]) for step in steps] for name in ("seconds", "inside"))
    return {
        "kind": steps[0]["kind"],
        "seconds": statistics.median(seconds),
        "seconds_of_steps": seconds,
        "forward_backward_seconds": statistics.median(inside),
        "peak_memory": [max(values) for values in zip(*(step["peaks"] for step in steps), strict=True)],
        **{name: [step[name] for step in steps] for name in ("loss", "entropy", "grad_norm")},
    }


def lost_of(ops: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """What of a step's forwards and backwards ranks spend on dummies and waiting, by the cost model's seconds of ops.

    Args:
        ops: by rank, seconds of each op and whether it was a dummy; ranks wait for the slowest in each.
    """
    lockstep = sum(max(seconds for seconds, _ in column) for column in zip(*ops, strict=True))
    own = [sum(seconds for seconds, dummy in rank if not dummy) for rank in ops]
    return {
        "lost": 1 - statistics.mean(own) / lockstep,
        "lost_by_rank": [1 - seconds / lockstep for seconds in own],
        "dummies": [sum(1 for _, dummy in rank if dummy) for rank in ops],
        "ops": len(ops[0]),
    }


def is_timed(step: dict[str, Any]) -> bool:
    """Whether a step counts for a side's time; the trainer has logged it."""
    return step["role"] == "timed" and "loss" in step


def row_of(part: dict[str, Any]) -> dict[str, Any]:
    """A timed job by itself: its sides, and the tree's over the fastest without sharing on the same ranks."""
    timed = list(filter(is_timed, part["steps"]))
    sides = {
        side: side_of([step for step in timed if step["side"] == side])
        for side in dict.fromkeys(step["side"] for step in timed)
    }
    names = ("job", "backend", "processes", "model", "layers", "dtype", "workload", "shapes", "groups", "trajectories",
             "tokens", "unique_tokens", "bounds", "commit", "versions", "finished")  # fmt: skip
    row = {**{name: part[name] for name in names}, "sides": sides}
    row["sharing_ratio"] = row["tokens"] / row["unique_tokens"]
    trees = [name for name, side in sides.items() if side["kind"] == "tree"]
    if trees:
        best = min(trees, key=lambda name: sides[name]["seconds"])
        last = [step for step in timed if step["side"] == best][-1]
        tree = last["tree"]
        row |= {
            "side": best, "seconds": sides[best]["seconds"],
            "forward_backward_seconds": sides[best]["forward_backward_seconds"],
            "peak_memory": sides[best]["peak_memory"], **lost_of(last["ops"]),
            "planner_share": tree["planning_seconds"] / sides[best]["seconds"],
            "exchanged_bytes": tree.get("exchanged_bytes", 0.0),
            "exchange_seconds": tree.get("exchange_seconds", 0.0),
            "repeated_tokens": tree.get("repeated_tokens", 0.0),
        }  # fmt: skip
        own = [sum(step["op_seconds"][rank]) for step in part["steps"] if step["role"] == "ops"
               for rank in range(part["processes"])]  # fmt: skip
        if len(own) > 1:  # ranks that run apart
            row["lost_measured"] = 1 - statistics.mean(own) / max(own)
    unshared = [side for side in sides.values() if side["kind"] == "packed"]
    if trees and unshared:
        baseline = min(unshared, key=lambda side: side["seconds"])
        row |= {
            "baseline": next(name for name, side in sides.items() if side is baseline),
            "baseline_seconds": baseline["seconds"], "speedup": baseline["seconds"] / row["seconds"],
            "baseline_peak_memory": baseline["peak_memory"],
        }  # fmt: skip
    return row


def scaled(row: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """What several processes gain over one, of what they could: T1 / (R x T_R) x max(mean, longest path) / mean."""
    mean, path = row["bounds"]["mean"], row["bounds"]["path"]
    could = max(mean, path) / mean / row["processes"]
    return {
        "one_seconds": one["seconds"],
        "gain": one["seconds"] / row["seconds"],
        "scaling": one["seconds"] / row["seconds"] * could,
        "scaling_forward_backward": one["forward_backward_seconds"] / row["forward_backward_seconds"] * could,
    }


def bars_met(row: dict[str, Any]) -> dict[str, bool]:
    """Which of :data:`BARS` a row meets, of those that it has."""
    over = ("speedup", "scaling")
    found = {name: bool(row[name] > bar if name in over else row[name] < bar)
             for name, bar in BARS.items() if name in row}  # fmt: skip
    if "baseline_peak_memory" in row and any(row["peak_memory"]):
        found["peak_memory"] = max(row["peak_memory"]) <= max(row["baseline_peak_memory"])
    return found


# ---- all of it ------------------------------------------------------------------------------------------------------


def judged(parts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """``rows``, ``parity``, ``killed``, ``large`` and ``fit`` (predictions) of result files; ``left_out``, in words,
    are jobs that ended before they had what is judged, and those whose proof is missing.

    Raises:
        SystemExit: gradients, parameters or metrics that are not one process's; a kill that did not end all.
    """
    found: dict[str, list[Any]] = {"rows": [], "parity": [], "killed": [], "large": [], "left_out": []}
    found["fit"] = [part for part in parts if part["kind"] == "fit"]
    by_name = {part["job"]: part for part in parts if part["kind"] != "fit"}
    passed: set[tuple[str, int]] = set()
    for name, part in by_name.items():
        job = Job.parse(name)
        if job.kind.startswith("parity") and job.backend != "one":
            one = by_name.get(job.one.name)
            if one is None or not (one["finished"] and part["finished"]):
                found["left_out"].append(f"{name}: it or {job.one.name} did not end")
                continue
            parity = parity_of(part, one)
            if parity["failures"]:
                raise SystemExit(f"{name}: {'; '.join(parity['failures'])}: nothing is reported")
            if job.is_exact:
                passed.add((job.backend, job.processes))
            kept = ("job", "backend", "processes", "dtype", "layers", "commit")
            found["parity"].append({**{key: part[key] for key in kept}, **parity})
        elif job.kind == "kill":
            if not part["passed"]:
                raise SystemExit(f"{name}: {part}: nothing is reported")
            found["killed"].append(part)
        elif job.kind == "large":
            found["large"].append(_large(part))
    for name, part in by_name.items():
        job = Job.parse(name)
        if job.kind not in ("time", "stock"):
            continue
        if not any(is_timed(step) and step["side"] == part["steps"][0]["side"] for step in part["steps"]):
            found["left_out"].append(f"{name}: it ended before a timed step")
        elif job.backend != "one" and (job.backend, job.processes) not in passed and job.kind != "stock":
            found["left_out"].append(f"{name}: no parity-{job.backend}-{job.processes} beside it that passed")
        else:
            found["rows"].append(_row(part, job, by_name))
    _add_stock(found["rows"])
    return found


def _row(part: dict[str, Any], job: Job, by_name: dict[str, dict[str, Any]]) -> dict[str, Any]:
    row = row_of(part)
    lead = next(iter(row["sides"]))
    for side in row["sides"]:
        if not same_metrics(row["sides"][side], row["sides"][lead]):
            apart = differences(row["sides"][side], row["sides"][lead])
            raise SystemExit(f"{job.name}: {side} has other metrics than {lead}, by {apart}: nothing is reported")
    one = by_name.get(Job("time", "one", 1, job.workload).name)
    if one is None or job.backend == "one" or not any(map(is_timed, one["steps"])):
        return {**row, "bars": bars_met(row)}
    alone = row_of(one)
    theirs = alone["sides"][alone["side"]]
    if not same_metrics(row["sides"][lead], theirs):
        apart = differences(row["sides"][lead], theirs)
        raise SystemExit(f"{job.name} has other metrics than {one['job']}, by {apart}: nothing is reported")
    if job.kind == "stock":
        return row
    row |= scaled(row, alone)
    if part["dtype"] == "float32":
        parity = parity_of(part, one)
        if parity["failures"]:
            raise SystemExit(f"{job.name}: {'; '.join(parity['failures'])}: nothing is reported")
    return {**row, "bars": bars_met(row)}


def _add_stock(rows: list[dict[str, Any]]) -> None:
    """Trees over stock TRL, whose fastest backend on as many processes counts."""
    for row in rows:
        stock = [side["seconds"] for other in rows for side in other["sides"].values() if side["kind"] == "stock"
                 and (other["workload"], other["processes"]) == (row["workload"], row["processes"])]  # fmt: skip
        if stock and "seconds" in row:
            row |= {"stock_seconds": min(stock), "speedup_stock": min(stock) / row["seconds"]}


def _large(part: dict[str, Any]) -> dict[str, Any]:
    """The last step's bytes on the fullest rank beside what was predicted."""
    last = part["steps"][-1]
    names = ("held", "with_gradients", "peaks")
    measured = {name: max(last[name]) for name in names}
    kept = {key: value for key, value in part.items() if key not in ("steps", "failures", "seed")}
    return {
        **kept, "seconds": max(last["seconds"]), "measured": measured,
        "loss_is_finite": math.isfinite(last.get("loss", math.nan)),
        "exchange_seconds": last.get("tree", {}).get("exchange_seconds"),
    }  # fmt: skip
