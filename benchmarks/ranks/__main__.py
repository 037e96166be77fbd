"""Optimizer steps on several GPUs of one host: trees beside packed rows and one GPU, with parity, for every backend.

    export HARTS_COMMIT=$(git rev-parse --short HEAD)
    python -m benchmarks.ranks plan --gpus 8            # which jobs, how long each takes, the most important first
    python -m benchmarks.ranks call --gpus 8 --shapes SHAPES --out OUT     # at most ten minutes; again: goes on
    torchrun --nproc_per_node 8 -m benchmarks.ranks run time-fsdp2-8-miniswe20 --shapes SHAPES --out FILE   # one job
    python -m benchmarks.ranks fit --gpus 8 --memory 141GB --shapes SHAPES      # layers of Ling-3.0-flash that fit
    python -m benchmarks.ranks model --shapes SHAPES      # what the planner's model says of 1 to 64 ranks; no GPU
    python -m benchmarks.ranks record OUT/ranks_jobs.json       # into benchmarks/results/ranks_h200.json, and a plot

With --dry-run, `call` and `run` train tiny models on CPU processes over gloo. docs/ranks.md says what each job is.
"""

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.record import RESULTS
from benchmarks.ranks.jobs import CALL_SECONDS, text_of

RECORD = RESULTS / "ranks_h200.json"
MODEL_RECORD = RESULTS / "ranks_model.json"
COMMANDS = ("plan", "call", "run", "fit", "model", "record")


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan, call, run, fit, model, record = map(commands.add_parser, COMMANDS)
    for one in (plan, call, fit):
        one.add_argument("--gpus", type=int, required=True, help="2, 4 or 8")
    for one in (plan, call):
        one.add_argument("--seconds", type=float, default=CALL_SECONDS, help="of a call (default: %(default)s)")
    model.add_argument("--dry-run", action="store_true", help="a few short rows")
    for one in (call, run, fit):
        one.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
        one.add_argument("--memory", help="of each GPU, such as 141GB, for the layers of the large model")
    call.add_argument("jobs", nargs="*", metavar="JOB", help="(default: all that `plan` prints)")
    call.add_argument("--shapes", type=Path, help="folder of shape files (default: SITE/shapes)")
    call.add_argument("--site", type=Path, help="folder with what a bare host lacks (benchmarks/gpu/site.py)")
    call.add_argument("--work", type=Path, help="folder of results and logs, from which a later call goes on")
    call.add_argument("--earlier", type=Path, help="a call's ranks_jobs.json, to go on from on another host")
    call.add_argument("--out", type=Path, required=True, help="folder for ranks_jobs.json and ranks.log")
    run.add_argument("job", metavar="JOB")
    run.add_argument("--out", type=Path, required=True, help="the file to write")
    fit.add_argument("--out", type=Path, help="the file to write, for `record`")
    model.add_argument("--out", type=Path, default=MODEL_RECORD, help="(default: %(default)s)")
    for one in (run, fit, model):
        one.add_argument("--shapes", type=Path, required=True)
    record.add_argument("parts", type=Path, nargs="+")
    record.add_argument("--record", type=Path, default=RECORD)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the command, which imports what it needs."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    options = command_line().parse_args(argv)
    if options.command == "plan":
        print(text_of(options.gpus, options.seconds))
        return
    modules = {"call": "calls", "run": "work", "fit": "fit", "model": "model", "record": "recorder"}
    importlib.import_module(f"benchmarks.ranks.{modules[options.command]}").main(options)


if __name__ == "__main__":
    main()
