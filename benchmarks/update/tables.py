"""A record as tables of Markdown, as docs/performance.md has them."""

from collections.abc import Iterator, Mapping
from typing import Any

MODEL = "ling-3.0-tiny"  # of the first two tables
SEVERAL = ("two", "three")  # variants that are plain but for the number of groups
_COLUMNS = (
    "tree | best without sharing | | ideal, reached (without constants) | nested collapsed | stock TRL | planning | "
    "memory |"
)
TOTALS = (
    f"| rollouts | steps | tokens / unique | ratio | {_COLUMNS}",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
OTHERS = (
    f"| model, variant | groups | tokens / unique | ratio | {_COLUMNS}",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
STEPS = (
    "| group | samples | tokens / unique | ratio | tree | without sharing | | ideal, reached (without constants) | "
    "stock TRL | |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def totals(record: Mapping[str, Any]) -> Iterator[str]:
    """A line for each workload of the first model."""
    for row in record["rows"]:
        if "step" in row or row["model"] != MODEL or row["variant"] not in ("plain", *SEVERAL):
            continue
        count = len(row["groups"]) // row["steps"]
        name = f"`{row['workload']}`" + (f", {count} groups a step" if row["variant"] in SEVERAL else "")
        yield _line(name, row["steps"], *_figures(row))


def others(record: Mapping[str, Any]) -> Iterator[str]:
    """A line for each workload of the other models, and of the other variants."""
    for row in record["rows"]:
        if "step" in row or (row["model"] == MODEL and row["variant"] in ("plain", *SEVERAL)):
            continue
        name = row["model"] + ("" if row["variant"] == "plain" else f", {row['variant']}")
        numbers = [one["step"] for one in _steps_of(record, row)]
        yield _line(name, f"`{row['workload']}` {', '.join(map(str, sorted(numbers)))}", *_figures(row))


def steps(record: Mapping[str, Any], workload: str) -> Iterator[str]:
    """A line for each plain step of one workload on the first model, in order."""
    found = _steps_of(record, {"model": MODEL, "workload": workload, "variant": "plain"})
    for row in sorted(found, key=lambda row: row["step"]):
        has_ideal = "ideal" in row
        yield _line(
            row["step"], row["trajectories"], f"{row['tokens']:,} / {row['unique_tokens']:,}",
            f"{row['sharing_ratio']:.1f}", _seconds(row["seconds"]),
            _seconds(row["baseline_seconds"]) if has_ideal else "", f"{row['speedup']:.2f}x" if has_ideal else "",
            _reached(row) if has_ideal else "",
            _seconds(row["stock_seconds"]) if "stock_seconds" in row else "",
            f"{row['speedup_stock']:.1f}x" if "stock_seconds" in row else "",
        )  # fmt: skip


def _steps_of(record: Mapping[str, Any], one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    names = ("model", "workload", "variant")
    return [row for row in record["rows"] if "step" in row and all(row[name] == one[name] for name in names)]


def _figures(row: Mapping[str, Any]) -> list[str]:
    mark = {name: "*" if name in row["scaled"] else "" for name in ("baseline", "stock", "collapsed")}
    has_baseline, peaks = "baseline_seconds" in row, (row["peak_memory"], row.get("baseline_peak_memory"))
    return [
        f"{row['tokens']:,} / {row['unique_tokens']:,}", f"{row['sharing_ratio']:.2f}",
        _seconds(row["seconds"]), f"{_seconds(row['baseline_seconds'])}{mark['baseline']}" if has_baseline else "",
        f"**{row['speedup']:.2f}x**" if has_baseline else "", _reached(row) if "ideal" in row else "",
        f"{row['speedup_collapsed']:.2f}x{mark['collapsed']}" if "speedup_collapsed" in row else "",
        f"**{row['speedup_stock']:.1f}x**{mark['stock']}" if "speedup_stock" in row else "",
        f"{row['planner_share']:.1%}", " / ".join(f"{peak / 1e9:.0f}" for peak in peaks) + " GB" if all(peaks) else "",
    ]  # fmt: skip


def _reached(row: Mapping[str, Any]) -> str:
    return f"{row['ideal']:.2f}x, {row['efficiency']:.2f} ({row['efficiency_at_least']:.2f})"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |").replace("|  |", "| |")
