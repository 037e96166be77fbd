"""What two GPUs gain over one, and whether their metrics allow to say so. Reads result files; needs no torch."""

from collections.abc import Iterable
from typing import Any

# Of one GPU's mean. Measured: steps of one process differ by 1e-5 in entropy and 0.8 % in gradient norm (bf16, sums in
# another order), under any backend; losses of an on-policy step do not depend on the model but for rounding.
LIMITS = {"loss": 1e-3, "entropy": 1e-3, "grad_norm": 0.03}
LOSS_SCALE = 0.01  # absolute: a loss is near zero


def mean(values: Iterable[float]) -> float:
    """Of at least one."""
    listed = list(values)
    return sum(listed) / len(listed)


def differences(row: dict, one: dict) -> dict[str, float]:
    """By metric, how far a row's mean is from one GPU's, relative to it."""
    found = {}
    for name in LIMITS:
        theirs, ours = mean(one[name]), mean(row[name])
        found[name] = abs(ours - theirs) / max(abs(theirs), LOSS_SCALE if name == "loss" else 1e-9)
    return found


def same_metrics(row: dict, one: dict) -> bool:
    """Whether each metric is one GPU's within bf16 noise."""
    return all(value <= LIMITS[name] for name, value in differences(row, one).items())


def gain(row: dict, one: dict) -> dict[str, Any]:
    """What a row of several processes gains over one process's row on the same groups."""
    tree = row["tree"]
    speedup = one["forward_backward_seconds"] / row["forward_backward_seconds"]
    estimated = one["estimated_seconds"] / row["estimated_seconds"]
    return {
        "over": one["execution"],
        "same_execution": (one["execution"], one["scoring_skipped"]) == (row["execution"], row["scoring_skipped"]),
        "speedup": speedup,
        "step_speedup": one["seconds"] / row["seconds"],
        "estimated_speedup": estimated,
        "of_estimated": speedup / estimated,
        "rows_repeated": 1 + tree.get("repeated_tokens", 0.0) / tree["unique_tokens"],
        "exchange_share": row["exchange_seconds"] / row["seconds"],
        "differences": differences(row, one),
    }


def with_gains(rows: list[dict]) -> list[dict]:
    """Rows of several processes with what they gain over each of one process's rows on the same groups.

    Raises:
        SystemExit: metrics that are not one GPU's, or no row of one GPU.
    """
    found = []
    for row in rows:
        if row["processes"] == 1:
            found.append(row)
            continue
        ones = [one for one in rows if one["processes"] == 1 and one["workload"] == row["workload"]]
        if not ones:
            raise SystemExit(f"no row of one GPU on {row['workload']}: nothing is reported")
        for one in ones:
            if not same_metrics(row, one):
                raise SystemExit(
                    f"{row['run']} {row['execution']} has other metrics than one GPU, by {differences(row, one)}: "
                    "nothing is reported"
                )
        found.append({**row, "gains": [gain(row, one) for one in ones]})
    return found
