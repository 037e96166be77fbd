"""The command line: `python -m benchmarks.gpu COMMAND WHAT ...`. A command imports what it needs when it runs."""

import argparse
import importlib
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.record import RESULTS
from benchmarks.gpu.registry import (
    FAMILIES,
    FLASH_VARIANTS,
    FLEX_DTYPES,
    HEAD_DIMS,
    LINEAR_CHECKS,
    LINEAR_KINDS,
    LINEAR_LAYOUTS,
    MEMORY_VARIANTS,
    STEP_MODELS,
    STEP_ROWS,
    WHOLE_PARTS,
)  # fmt: skip

Argument = tuple[str, dict[str, Any]]


class Command(NamedTuple):
    """``module`` of benchmarks.gpu, whose ``main`` takes the parsed arguments; a line of help; the arguments."""

    module: str
    help: str
    arguments: tuple[Argument, ...]


def path(name: str, help: str, **options: Any) -> Argument:
    """A file or folder."""
    return name, {"type": Path, "help": help, **options}


def choice(name: str, choices: Any, help: str | None = None) -> Argument:
    """One of the registry."""
    return name, {"choices": choices, "help": help}


def some(name: str, choices: Any, help: str) -> Argument:
    """Some of the registry, or all of it."""
    return name, {"nargs": "+", "choices": choices, "default": list(choices), "metavar": "NAME", "help": help}


OUT = path("--out", "the file to write", required=True)
SHAPES = path("--shapes", "folder of shape files", required=True)
DRY: Argument = ("--dry-run", {"action": "store_true", "help": "tiny models on the CPU"})
DIM, VARIANT = choice("head_dim", HEAD_DIMS), choice("--variant", FLASH_VARIANTS, "another way to call FA4")
KINDS = some("--kinds", LINEAR_KINDS, "of layers (default: all)")
LAYOUTS = some("--layouts", LINEAR_LAYOUTS, "in the order in which they are timed (default: all)")
FAMILY = some("--families", FAMILIES, "of models (default: all)")
FUSED = ("auto", "off")  # tree_fused_modules
KERNELS_RECORD = path("--record", "(default: %(default)s)", default=RESULTS / "kernels_h200.json")
WHOLE_RECORD = path("--record", "(default: %(default)s)", default=RESULTS / "whole_h200.json")
STEP_RECORD = path("--record", "(default: %(default)s)", default=RESULTS / "step_h200.json")
PARTS = path("parts", "result files; without any, the record is checked and drawn anew", nargs="*")


def run(seconds: int, stages: tuple[str, ...], help: str, *more: Argument) -> Command:
    """All that is measured of an operation, in processes within a time limit."""
    shared = (
        path("--site", "folder with what a bare host lacks"),
        path("--shapes", "folder of shape files (default: SITE/shapes)"),
        path("--out", "folder for what is found", required=True),
        path("--work", "folder of parts and logs, from which a later run goes on"),
        ("--seconds", {"type": float, "default": seconds, "help": "for everything (default: %(default)s)"}),
        some("--stages", stages, f"of {', '.join(stages)} (default: all)"),
    )
    return Command("runs", help, (*shared, *more))


COMMANDS = {
    ("run", "linear"): run(440, ("parity", "time"), "linear attention: checks, then times", KINDS, LAYOUTS),
    ("run", "attention"): run(350, ("parity", "time"), "attention: checks, then times"),
    ("run", "whole"): run(480, ("tests", *WHOLE_PARTS), "whole models: verdicts, then times", FAMILY, DRY),
    ("parity", "linear"): Command(
        "linear.parity", "a check against fp64, beside stock FLA's errors", (choice("check", LINEAR_CHECKS), OUT)
    ),
    ("parity", "attention"): Command(
        "attention.parity", "a check of FA4 as the package calls it, a variant, or FlexAttention against fp64",
        (DIM, VARIANT, choice("--flex", FLEX_DTYPES), OUT),
    ),
    ("time", "linear"): Command(
        "linear.timing", "layers and convolutions on trees against stock FLA on the expanded trajectories",
        (path("--parity", "the checks, merged", required=True), KINDS, LAYOUTS, SHAPES, OUT),
    ),
    ("time", "attention"): Command(
        "attention.timing", "tree attention against FA4 varlen on the expanded trajectories",
        (path("--parity", "what the checks wrote", nargs="+", required=True), SHAPES, OUT),
    ),
    ("warm", "linear"): Command("linear.warm", "compiles into Triton's cache", (choice("kind", LINEAR_KINDS),)),
    ("tune", "states"): Command("linear.tune", "times the widths of the two state kernels", (OUT,)),
    **{
        ("stage", stage): Command(
            "whole.stage", f"of a whole model: {', '.join(parts)}",
            (choice("family", FAMILIES), path("--folder", "where parts are written", required=True), SHAPES, DRY),
        )
        for stage, parts in WHOLE_PARTS.items()
    },
    **{
        ("step", model): Command(
            "whole.step", "whole optimizer steps beside a floor, and what their time goes to",
            (some("--rows", STEP_ROWS, "workloads (default: all)"), some("--fused", FUSED, "modules (default: both)"),
             ("--host", {"action": "store_true", "help": "also where Python's time goes"}), SHAPES, OUT, DRY),
        )
        for model in STEP_MODELS
    },
    ("memory", "windows"): Command(
        "whole.memory", "peaks of windows beside what the memory model predicts",
        (some("--models", (*STEP_MODELS, *FAMILIES, *MEMORY_VARIANTS), "(default: all)"), OUT, DRY),
    ),
    ("record", "kernels"): Command(
        "recorder", "merges result files into the record; refuses where a parity check fails",
        (PARTS, path("--parity", "the checks of linear attention, for its rows"), KERNELS_RECORD),
    ),
    ("record", "whole"): Command(
        "recorder", "merges result files into the record; refuses a speed without its verdict", (PARTS, WHOLE_RECORD)
    ),
    ("record", "step"): Command(
        "recorder", "merges result files into the record; refuses rows of a run that failed", (PARTS, STEP_RECORD)
    ),
    ("predict", "memory"): Command(
        "linear.predict", "peak memory of linear layers; needs FLA and Triton, no GPU", (KINDS, SHAPES, OUT)
    ),
    ("predict", "windows"): Command(
        "whole.peaks", "the recorded peaks of windows anew, without a GPU",
        (WHOLE_RECORD, OUT),
    ),
    ("compile", "whole"): Command(
        "whole.launches", "what whole models launch, for Hopper; needs FLA and Triton, no GPU",
        (FAMILY, ("--dtype", {"choices": ("bfloat16", "float32"), "default": "bfloat16"})),
    ),
    ("compile", "attention"): Command(
        "attention.machine_code", "FA4 with our mask, as ptx and cubin; needs FA4, no GPU",
        (DIM, VARIANT, path("--out", "folder", required=True)),
    ),
}  # fmt: skip


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Benchmarks for one Hopper GPU.")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    groups: dict[str, Any] = {}
    for (name, what), command in COMMANDS.items():
        if name not in groups:
            help = ", ".join(other for group, other in COMMANDS if group == name)
            groups[name] = commands.add_parser(name, help=help).add_subparsers(required=True, dest="what")
        one = groups[name].add_parser(what, help=command.help, description=command.help)
        for argument, options in command.arguments:
            one.add_argument(argument, **options)
    return parser


def main() -> None:
    """Parses the command line and runs the command."""
    options = command_line().parse_args()
    module = COMMANDS[options.command, options.what].module
    importlib.import_module(f"benchmarks.gpu.{module}").main(options)


if __name__ == "__main__":
    main()
