"""What was measured as rows of JSON, and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harts_hf.bench.ideal import all_divided
from harts_hf.bench.results import StepMeasured, Timed, fastest
from harts_hf.bench.sides import COLLAPSED, PACKED, STOCK_KINDS, TREE
from harts_hf.planner.text import counted

NOTES = (
    "sampling is excluded: rollouts are played back. Learning rate 0: all steps are the same step.",
    "ideal: every stage of the baseline divided by its own ratio; optimizer and constants of microbatches undivided.",
)


def row_of(measured: StepMeasured, **about: Any) -> dict[str, Any]:
    """One step as JSON.

    ``speedup`` is over the best setting without padding and without sharing, ``speedup_collapsed`` over the best that
    collapses nested prefixes besides, ``speedup_stock`` over the best stock trainer; each only if that was
    measured, and none where the parity check failed. ``ideal`` is the speed-up that sharing could reach,
    ``efficiency`` the part of it that was reached; ``ideal_at_most`` and ``efficiency_at_least`` are these if no
    microbatch had a constant. Memory is of the GPU, in bytes.

    Args:
        measured: the step.
        about: further entries, such as ``model`` and ``workload``; they come first.
    """
    rollouts, tree = measured.rollouts, measured.rollouts.tree
    row: dict[str, Any] = {
        **about,
        "groups": list(rollouts.groups),
        "trajectories": len(rollouts.token_ids),
        "tokens": rollouts.num_tokens,
        "unique_tokens": tree.num_tokens,
        "labels": list(rollouts.num_labels),
        "sharing_ratio": tree.sharing_ratio,
        "parity": measured.parity.to_dict(),
        "failures": measured.failures,
        "sides": {kind: _side(timed) for kind, timed in measured.sides.items()},
    }
    if measured.clippings:
        row["clipping"] = {name: asdict(one) for name, one in measured.clippings.items()}
    if not all(timed.seconds for timed in measured.sides.values()):  # refused
        return row
    ours = measured.sides[TREE]
    row |= {
        "seconds": ours.median,
        "tokens_per_second": rollouts.num_tokens / ours.median,
        "planner_share": ours.phases["planning"] / ours.median,
        "peak_memory": ours.peak_memory,
        "decision": measured.decision,
    }
    stock = fastest(measured.sides, STOCK_KINDS)
    for name, timed in (
        ("", measured.sides.get(PACKED)),
        ("collapsed", measured.sides.get(COLLAPSED)),
        ("stock", stock),
    ):
        if timed is not None:
            suffix = f"_{name}" if name else ""
            row |= {
                f"{name or 'baseline'}_seconds": timed.median,
                f"{name or 'baseline'}_peak_memory": timed.peak_memory,
                f"speedup{suffix}": timed.median / ours.median,
            }
    if measured.microbatch_seconds:
        row["microbatch_seconds"] = measured.microbatch_seconds
    for kind, ideal in measured.ideals.items():
        suffix = "" if kind == PACKED else f"_{kind}"
        row |= {
            f"ideal{suffix}": measured.sides[kind].median / ideal.total,
            f"efficiency{suffix}": ideal.total / ours.median,
            f"ideal_seconds{suffix}": ideal.seconds,
            f"work_ratios{suffix}": ideal.ratios,
        }
        row |= bounds_of(row, kind, suffix)
    return row


def bounds_of(row: Mapping[str, Any], kind: str, suffix: str) -> dict[str, float]:
    """``ideal_at_most`` and ``efficiency_at_least``: if no microbatch had a constant.

    Args:
        row: with an ideal.
        kind: the ideal's baseline.
        suffix: of its entries.
    """
    own, tree = (row["sides"][one]["microbatches"][row["sides"][one]["setting"]] for one in (kind, TREE))
    seconds, ratio = row[f"ideal_seconds{suffix}"], row[f"work_ratios{suffix}"]["rows"]
    least = all_divided(seconds, ratio, own, tree)
    baseline = row["baseline_seconds" if kind == PACKED else f"{kind}_seconds"]
    return {f"ideal_at_most{suffix}": baseline / least, f"efficiency_at_least{suffix}": least / row["seconds"]}


def _side(timed: Timed) -> dict[str, Any]:
    return {
        "setting": timed.setting.label,
        "rows_per_batch": timed.rows_per_batch,
        "tried": timed.tried,
        "microbatches": timed.microbatches,
        "seconds_of_steps": timed.seconds,
        "phases": timed.phases if timed.seconds else {},
        "stages": timed.stages,
        "peak_memory": timed.peak_memory,
        "clocks": timed.clocks,
        "clip_fraction": timed.clip_fraction,
        "log": timed.log,
    }


def total_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several steps of one workload as one row: seconds added up, and what follows from the sums.

    A baseline that was measured on some of the steps only is scaled by tokens; ``scaled`` names it and the groups
    that it was measured on. Ideal and efficiency are of the steps whose stages were timed.

    Raises:
        ValueError: no rows, one that the parity check refused, or none that was timed with a baseline.
    """
    if not rows or not all(row["parity"]["passed"] for row in rows):
        raise ValueError("expected at least one row, all of which passed the parity check")
    if not any(f"{name}_seconds" in row for row in rows for name in ("baseline", "stock")):
        raise ValueError("expected at least one step that was timed with a baseline, got none")
    tokens, unique = (sum(row[name] for row in rows) for name in ("tokens", "unique_tokens"))
    seconds = sum(row["seconds"] for row in rows)
    total: dict[str, Any] = {
        **{key: rows[0][key] for key in ("model", "workload") if key in rows[0]},
        "groups": [name for row in rows for name in row["groups"]],
        "trajectories": sum(row["trajectories"] for row in rows),
        "tokens": tokens,
        "unique_tokens": unique,
        "sharing_ratio": tokens / unique,
        "steps": len(rows),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "planner_share": sum(row["planner_share"] * row["seconds"] for row in rows) / seconds,
        "peak_memory": _largest(row["peak_memory"] for row in rows),
        "scaled": {},
    }
    for name, suffix in (("baseline", ""), ("collapsed", "_collapsed"), ("stock", "_stock")):
        measured = [row for row in rows if f"{name}_seconds" in row]
        if not measured:
            continue
        part = sum(row["tokens"] for row in measured)
        found = sum(row[f"{name}_seconds"] for row in measured) * tokens / part
        total |= {
            f"{name}_seconds": found,
            f"speedup{suffix}": found / seconds,
            f"{name}_peak_memory": _largest(row[f"{name}_peak_memory"] for row in measured),
        }
        if len(measured) < len(rows):
            total["scaled"][name] = [group for row in measured for group in row["groups"]]
    timed = [row for row in rows if "efficiency" in row]
    if timed:
        ideal = sum(sum(row["ideal_seconds"].values()) for row in timed)
        total |= {
            "ideal": sum(row["baseline_seconds"] for row in timed) / ideal,
            "efficiency": ideal / sum(row["seconds"] for row in timed),
        }
        least = sum(row["baseline_seconds"] / row["ideal_at_most"] for row in timed)
        total |= {
            "ideal_at_most": total["ideal"] * ideal / least,
            "efficiency_at_least": total["efficiency"] * least / ideal,
        }
    return total


def _largest(values: Any) -> int | None:
    return max((value for value in values if value is not None), default=None)


def table_of(row: Mapping[str, Any]) -> str:
    """A row as text: each side with its fastest setting, then phases, stages and clipping."""
    groups = "group" if len(row["groups"]) == 1 else "groups"
    head = (
        f"{groups} {', '.join(row['groups'][:4])}{' ...' if len(row['groups']) > 4 else ''}: "
        f"{row['trajectories']:,} trajectories, {row['tokens']:,} tokens, {row['unique_tokens']:,} unique "
        f"(ratio {row['sharing_ratio']:.2f})"
    )
    if not row["parity"]["passed"]:
        return "\n".join(
            [head, *row["parity"]["failures"], "REFUSED: the sides did not train the same; no speed is told"]
        )
    timed = {kind: side for kind, side in row["sides"].items() if side["seconds_of_steps"]}
    lines = [["side", "setting", "step", "fastest", "slowest", "tokens/s", "tree is", "peak memory"]]
    for kind, side in timed.items():
        seconds = sorted(side["seconds_of_steps"])
        lines.append(
            [
                kind, _setting(kind, side["setting"].rsplit(" ", 1)[1]), _seconds(_median(seconds)),
                _seconds(seconds[0]), _seconds(seconds[-1]), f"{row['tokens'] / _median(seconds):,.0f}",
                "" if kind == TREE else f"{_median(seconds) / row['seconds']:.2f}x",
                "" if side["peak_memory"] is None else f"{side['peak_memory'] / 1e9:.1f} GB",
            ]
        )  # fmt: skip
    phases = [["seconds of", *timed]]
    names = list(next(iter(timed.values()))["phases"])
    phases += [[name, *(f"{side['phases'][name]:.4g}" for side in timed.values())] for name in names]
    failures = [f"{kind} did not run: {why}" for kind, why in row["failures"].items()]
    text = [head, *failures, "", _table(lines), "", _table(phases), ""]
    if "efficiency" in row:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["work_ratios"].items())
        text.append(
            f"sharing could make the {PACKED} step {row['ideal']:.2f}x as fast ({ratios}); reached "
            f"{row['speedup']:.2f}x: "
            f"efficiency {row['efficiency']:.2f}{_without_constants(row)}"
        )
    decision = f"; the plan {row['decision']}" if row["decision"] else ""
    text.append(f"planning: {row['planner_share']:.2%} of the tree's step{decision}")
    text.append(f"parity: {_parity(row['parity'])}")
    for name, one in row.get("clipping", {}).items():
        text.append(
            f"old log-probs, {name}: {one['clipped']:.2%} of {one['tokens']:,} tokens would be clipped before any "
            f"weight moves (RMS {one['rms']:.2e} nats); {one['cause']}"
        )
    return "\n".join(text)


def _without_constants(row: Mapping[str, Any]) -> str:
    if not row["ideal_seconds"]["microbatches"]:
        return ""
    return (
        f" (if no microbatch had a constant, which is a rough one: {row['ideal_at_most']:.2f}x, "
        f"{row['efficiency_at_least']:.2f})"
    )


def _parity(parity: Mapping[str, Any]) -> str:
    differences, limits = parity["differences"], parity["limits"]
    largest = {
        kind: max((d["gradients"] for label, d in differences.items() if _is_of(label, kind)), default=None)
        for kind in (PACKED, TREE)
    }
    said = ", ".join(f"{kind} {value:.1e}" for kind, value in largest.items() if value is not None)
    most = f" (at most {limits['gradients']:.1e})" if "gradients" in limits else ""
    sharing = max(value for label, value in parity["from_packed"].items() if _is_of(label, TREE))
    text = (
        f"gradients differ from {parity['reference']}'s by {said}{most}; sharing moves them by {sharing:.1e} (at most "
        f"{limits['sharing']:.1e}); compared on {parity['trajectories']} trajectories of {parity['tokens']:,} tokens"
    )
    if parity["routes"] != "same":
        return text
    flips = max(parity["flips"].values())
    text = f"{text}, all told to take the same experts ({flips:.2%} of the choices would be others)"
    if not parity["own_routes"]:
        return text
    own = max(one["gradients"] for one in parity["own_routes"].values())
    return f"{text}; where routers choose for themselves, gradients differ by up to {own:.1e}"


def _is_of(label: str, kind: str) -> bool:
    return label.rsplit(" ", 1)[0] == kind


def _setting(kind: str, value: str) -> str:
    """``2 rows`` of a batch, ``16,384 tokens`` of a microbatch; with the rows of a batch where they were chosen."""
    size, _, rows = value.partition("/")
    if kind in STOCK_KINDS:
        return counted(int(size), "row")
    return f"{int(size):,} tokens" + (f", {counted(int(rows), 'row')}" if rows else "")


def _median(values: Sequence[float]) -> float:
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i < 1 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
