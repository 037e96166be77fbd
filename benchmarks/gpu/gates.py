"""When a parity check passes: nothing is reported beside one that does not. Reads result files; needs no torch."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.record import ABOUT, read
from benchmarks.gpu.registry import FAMILIES, WHOLE_PARTS, parts_of

POOLED_LIMIT, SINGLE_LIMIT = 1.1, 4.0  # of errors over the baseline's
STATE_LIMITS = {"float32": 3e-3, "bfloat16": 2e-2}  # fp32 products run in TF32 (10 bits), states are stored in bf16
# In float32 errors are judged by themselves, relative to the tensor: the baseline's branches are summed in float64,
# which only shows in this dtype. Measured: 0.5e-6 to 2.0e-6 (the baseline 0.4e-6 to 0.8e-6).
FLOAT32_LIMIT = 5e-6


def within_limits(entry: dict) -> bool:
    """Whether a check has errors, and each is within the limits of its ratio to the baseline's, pooled and singly."""
    errors = entry["errors"].values()
    return bool(errors) and all(e["ratio"] <= POOLED_LIMIT and e["worst_single"] <= SINGLE_LIMIT for e in errors)


def attention_passes(found: dict, dtype: str = "bfloat16") -> bool:
    """Whether the check of one head dim passes, with handed rows and without."""
    if dtype == "float32":
        errors = [error for entry in found.values() for error in entry["errors"].values()]
        return bool(errors) and all(error["ours"] <= FLOAT32_LIMIT for error in errors)
    return bool(found) and all(map(within_limits, found.values()))


def linear_passes(found: dict) -> bool:
    """Whether every pooled and single error is within the limits and every exact property holds."""
    entries = [entry for group in ("rules", "layers") for entry in found.get(group, {}).values()]
    return (
        {"rules", "layers", "alone", "sizes"} <= found.keys()
        and all(map(within_limits, entries))
        and all(entry.get("two_runs_bitwise_equal", True) for entry in entries)
        and all(entry.get("first_token_gate_gradient", 0.0) == 0.0 for entry in entries)
        and all([*found["alone"].values(), *found["sizes"].values()])
        and all(error <= STATE_LIMITS[key.split()[0]] for key, error in found.get("states", {}).items())
        and not found.get("failures")
    )


def merge_linear(parts: list[Path]) -> dict:
    """What the checks of linear attention wrote, those of this run that are there, and whether it passes."""
    found: dict[str, Any] = {"failures": {path.stem: "no result" for path in parts if not path.exists()}}
    for part in (read(path) for path in parts if path.exists()):
        for key, value in part.items():
            if key not in ABOUT:
                found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
    return {**found, "passes": linear_passes(found)}


def merge_whole(folder: Path, killed: dict[str, str]) -> dict:
    """What all stages of whole models wrote; the speed of a family only beside its passed verdicts of its commit."""
    result: dict = {"rows": [], "failures": {}, "killed": killed}
    for family in FAMILIES:
        paths = {part: folder / f"{family}-{part}.json" for parts in WHOLE_PARTS.values() for part in parts}
        found = {part: read(path) for part, path in paths.items() if path.exists()}
        verdicts = [found.get(part, {}) for part in ("verify", *parts_of(family, "float32"))]
        commits = {entry.get("commit") for entry in [*verdicts, *filter(None, [found.get("speed")])]}
        passed = all(verdict.get("passed") for verdict in verdicts) and len(commits) == 1
        for part, entry in found.items():
            result |= {key: entry.pop(key) for key in ABOUT if key in entry and key != "commit"}
            if "failure" in entry:
                result["failures"][f"{family} {part}"] = entry["failure"]
            elif part == "speed" and not passed:
                result["failures"][f"{family} speed"] = "not reported: not every verdict of this commit is PASS"
            else:
                result["rows"].append({"op": part, "family": family, **entry})
    return result


def check_kernels(result: dict) -> None:
    """Ends the process where a parity check beside any row failed, be the row measured now or before."""
    rows, parity = result["rows"], result["parity"]
    if any(row["op"] != "attention" for row in rows) and not parity["linear"].get("passes"):
        raise SystemExit("the parity check of linear attention failed: nothing is reported")
    for name in sorted({row["head_dim"] for row in rows if row["op"] == "attention"}):
        if not attention_passes(parity["attention"].get(name, {})):
            raise SystemExit(f"the parity check of attention at head dim {name} failed: nothing is reported")


def check_whole(result: dict) -> None:
    """Ends the process where a family has a speed without a passed verdict of bf16, or beside one that failed."""
    verdicts = {(row["family"], row["op"]): row["passed"] for row in result["rows"] if row["op"].startswith("verify")}
    for family in sorted({row["family"] for row in result["rows"] if row["op"] == "speed"}):
        if not (verdicts.get((family, "verify")) and verdicts.get((family, "verify_float32"), True)):
            raise SystemExit(f"the verdicts of {family} are not PASS: nothing is reported")


def check_step(result: dict) -> None:
    """Ends the process where a run failed, or rows of one workload do not have the same loss and mean entropy.

    Losses and entropies of bf16 models differ by the rounding of sums in another order: 1e-3 of their size.
    """
    if result["failures"]:
        raise SystemExit(f"runs failed: {', '.join(result['failures'])}: nothing is reported")
    first: dict[tuple[str, str], dict] = {}
    for row in result["rows"]:
        other = first.setdefault((row["model"], row["workload"]), row)
        for name in ("loss", "entropy"):
            if abs(row[name] - other[name]) > 1e-3 * max(1.0, abs(other[name])):
                raise SystemExit(
                    f"{row['model']} {row['workload']} has {name} {row[name]} and {other[name]}: nothing is reported"
                )
