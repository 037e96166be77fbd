"""Result files of jobs into the record, and its picture."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import parts_in, read, write
from benchmarks.ranks.jobs import Job, jobs_for
from benchmarks.ranks.judging import judged

KINDS = ("rows", "parity", "killed", "large", "fit")


def merged(old: dict[str, Any], parts: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The record with what was found, and what of it is left out, in words.

    Each job as measured last, under ``jobs``; ``rows`` beside it are those of an earlier benchmark of two H200s
    (docs/gpu.md).

    Raises:
        SystemExit: what :func:`benchmarks.ranks.judging.judged` refuses; another device than the record's, or several.
    """
    devices = {part["device"] for part in (old, *parts) if "device" in part}
    if len(devices) > 1:
        raise SystemExit(f"expected results of one kind of device, got {', '.join(sorted(devices))}")
    new = judged(parts)
    jobs = old.get("jobs", {})
    for kind in KINDS:
        by_name = {row["job"]: row for row in (*jobs.get(kind, ()), *new[kind])}
        jobs = {**jobs, kind: list(by_name.values())}
    return {**old, "device": next(iter(devices), None), "jobs": jobs}, new["left_out"]


def main(options: argparse.Namespace) -> None:
    """Merges, writes, prints and draws."""
    parts = [part for path in options.parts for part in parts_in(path)]
    if not parts or not all("job" in part for part in parts):
        raise SystemExit("expected result files of jobs, got none, or others")
    result, left_out = merged(read(options.record) if options.record.exists() else {}, parts)
    write(options.record, result)
    print("\n".join([table_of(result["jobs"]), *(f"left out: {words}" for words in left_out)]))
    print(f"not measured: {', '.join(missing_in(result['jobs'])) or 'nothing'}")
    drawn = [row for row in result["jobs"]["rows"] if "scaling" in row]
    if drawn:
        draw(drawn, options.record.with_name(f"{options.record.stem}_scaling.png"), result["device"])


def missing_in(jobs: dict[str, Any]) -> list[str]:
    """What `plan` prints for the largest number of processes in the record, and the record has not."""
    there = {row["job"] for kind in KINDS for row in jobs[kind]}
    most = max((Job.parse(name).processes for name in there if not name.startswith("fit-")), default=1)
    planned = jobs_for(most) if most > 1 else []
    compared = {job.name for job in planned if job.kind.startswith("parity") and job.backend == "one"}  # within others
    return [job.name for job in planned if job.name not in there | compared]


def table_of(jobs: dict[str, Any]) -> str:
    """A line of each row, and what was refused nowhere."""
    lines = ["job                             step s   speed-up  scaling  lost    planner  exchanged MB  peak GB"]
    for row in jobs["rows"]:
        if "seconds" not in row:
            continue
        cells = [
            f"{row['seconds']:8.3f}", f"{row['speedup']:8.2f}x" if "speedup" in row else f"{'':9}",
            f"{row['scaling']:8.3f}" if "scaling" in row else f"{'':8}", f"{row['lost']:6.1%}",
            f"{row['planner_share']:8.2%}", f"{row['exchanged_bytes'] / 1e6:12.2f}",
            f"{min(row['peak_memory']) / 1e9:9.1f} to {max(row['peak_memory']) / 1e9:.1f}",
        ]  # fmt: skip
        lines.append(f"{row['job']:30}" + " ".join(cells))
        missed = [name for name, met in row.get("bars", {}).items() if not met]
        if missed:
            lines.append(f"{'':30}bars not met: {', '.join(missed)}")
    for one in jobs["parity"]:
        apart = one["parameters"][0]
        lines.append(
            f"{one['job']:30} gradients within {max(a for a, _ in one['gradients'].values()):.1e}, parameters "
            f"{apart:.1e} (limits {one['limit']:.1e}, {one['parameters_limit']:.1e})"
        )
    lines += [f"{one['job']:30} all ended {one['seconds']:.1f} s after the kill" for one in jobs["killed"]]
    for one in jobs["large"]:
        lines.append(
            f"{one['job']:30} {one['layers']} of {one['whole']} layers: peak {one['measured']['peaks'] / 1e9:.1f} GB, "
            f"predicted {one['predicted_peak'] / 1e9:.1f} GB"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path, device: str) -> None:
    """What so many processes gain over one, beside what the plan's bound allows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    workloads = sorted({(row["backend"], row["workload"]) for row in rows})
    for color, (backend, workload) in enumerate(workloads):
        points = sorted((row["processes"], row["gain"]) for row in rows
                        if (row["backend"], row["workload"]) == (backend, workload))  # fmt: skip
        axes.plot(*zip((1, 1.0), *points, strict=True), "o-", color=f"C{color}", label=f"{backend}, {workload}")
    bounds = sorted({(row["processes"], row["gain"] / row["scaling"]) for row in rows})
    axes.plot(*zip((1, 1.0), *bounds, strict=True), "--", color="grey", label="bound: mean or longest path")
    axes.set(xlabel="GPUs", ylabel="one GPU's step / theirs", title=device)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
