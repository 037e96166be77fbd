"""A record as tables of Markdown, as docs/performance.md has them."""

from collections.abc import Iterator, Mapping
from typing import Any

TOTALS = (
    "| rollouts | steps | tokens / unique | ratio | tree | best without sharing | | "
    "ideal, reached (without constants) | nested collapsed | stock TRL | planning | memory |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
STEPS = (
    "| group | samples | tokens / unique | ratio | tree | without sharing | | ideal, reached (without constants) | "
    "stock TRL | |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


# What a row is of that does not say otherwise.
MAIN = {"model": "ling-3.0-tiny", "variant": "plain"}


def totals(record: Mapping[str, Any]) -> Iterator[str]:
    """A line for each workload and variant."""
    for row in record["rows"]:
        if "step" in row:
            continue
        mark = {name: "*" if name in row["scaled"] else "" for name in ("baseline", "stock", "collapsed")}
        has_baseline, has_ideal = "baseline_seconds" in row, "ideal" in row
        peaks = (row["peak_memory"], row.get("baseline_peak_memory"))
        memory = " / ".join("" if peak is None else f"{peak / 1e9:.0f}" for peak in peaks) + " GB"
        about = [word for word in (row["model"], row["variant"]) if word not in MAIN.values()]
        name = ", ".join([row["workload"], *about])
        yield _line(
            f"`{name}`", row["steps"], f"{row['tokens']:,} / {row['unique_tokens']:,}", f"{row['sharing_ratio']:.2f}",
            _seconds(row["seconds"]), f"{_seconds(row['baseline_seconds'])}{mark['baseline']}" if has_baseline else "",
            f"**{row['speedup']:.2f}x**" if has_baseline else "", _ideal(row) if has_ideal else "",
            f"{row['speedup_collapsed']:.2f}x{mark['collapsed']}" if "speedup_collapsed" in row else "",
            f"**{row['speedup_stock']:.1f}x**{mark['stock']}" if "speedup_stock" in row else "",
            f"{row['planner_share']:.1%}", memory if any(peaks) else "",
        )  # fmt: skip


def steps(record: Mapping[str, Any], workload: str) -> Iterator[str]:
    """A line for each step of one group, in order."""
    wanted = {**MAIN, "workload": workload}
    found = [row for row in record["rows"] if row.get("step") is not None and wanted.items() <= row.items()]
    for row in sorted(found, key=lambda row: row["step"]):
        has_ideal = "ideal" in row
        yield _line(
            row["step"], row["trajectories"], f"{row['tokens']:,} / {row['unique_tokens']:,}",
            f"{row['sharing_ratio']:.1f}", _seconds(row["seconds"]),
            _seconds(row["baseline_seconds"]) if has_ideal else "", f"{row['speedup']:.2f}x" if has_ideal else "",
            _ideal(row) if has_ideal else "",
            _seconds(row["stock_seconds"]) if "stock_seconds" in row else "",
            f"{row['speedup_stock']:.1f}x" if "stock_seconds" in row else "",
        )  # fmt: skip


def _ideal(row: Mapping[str, Any]) -> str:
    return (
        f"{row['ideal']:.2f}x, {row['efficiency']:.2f} ({row['ideal_at_most']:.2f}x, {row['efficiency_at_least']:.2f})"
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |").replace("|  |", "| |")
