"""What `harts bench` may be told."""

import argparse

from harts_hf.cli.checks import seed
from harts_hf.cli.loading import add_rollouts
from harts_hf.cli.parsing import CommandParser

# As harts_hf.bench.sides and harts_hf.bench.rollouts have them, which take seconds to import; a test compares them.
SIDES = ("stock", "stock sorted", "packed", "collapsed", "tree")
LABELS = ("recorded", "all")
# Steps of a file that are measured unless the command line says which groups.
STEPS_MEASURED = 3


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The command's parser."""
    parser = CommandParser(
        prog="harts bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add_rollouts(parser, tokenizer="folder or cached name, for rows with messages (default: the model's)")
    subject = parser.add_argument_group("what is trained (without --model, ROLLOUTS is a recipe)")
    subject.add_argument("--model", metavar="M", help="model folder, configuration or name")
    subject.add_argument("--random-weights", action="store_true", help="read the configuration only")
    subject.add_argument("--dtype", choices=("bfloat16", "float32"), help="(default: bfloat16 on a GPU, else float32)")
    subject.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    subject.add_argument("--optim", default="sgd", help="Transformers' name of an optimizer (default: %(default)s)")
    subject.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank on all linear layers")
    subject.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="(default: on, as in TRL)"
    )
    subject.add_argument("--cost", metavar="FILE", help="cost model that `harts bench --fit-cost` wrote")
    subject.add_argument("--seed", type=seed, default=0, help="of rewards, random tokens and weights")
    step = parser.add_argument_group("a step")
    step.add_argument("--groups-per-step", type=int, default=1, metavar="N", help="(default: %(default)s)")
    step.add_argument("--groups", type=int, nargs="+", metavar="I", help="only these groups, counted from 0")
    step.add_argument(
        "--max-groups", type=int, metavar="N", help=f"at most so many (default: those of {STEPS_MEASURED} steps)"
    )
    step.add_argument(
        "--labels",
        choices=LABELS,
        default=LABELS[0],
        help="train what the file's masks say, or every token but the first (default: %(default)s)",
    )
    step.add_argument(
        "--old-log-probs", action="store_true", help="have TRL score old log-probs, as for users of an engine"
    )
    measure = parser.add_argument_group("what is measured")
    measure.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES, help="(default: all)")
    measure.add_argument(
        "--budgets", type=int, nargs="+", default=[8192, 16384, 32768, 65536],
        help="tokens of a microbatch that sides without padding are tried with (default: %(default)s)",
    )  # fmt: skip
    measure.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8],
        help="rows of a batch that stock trainers are tried with (default: %(default)s)",
    )  # fmt: skip
    measure.add_argument(
        "--slice-rows", type=int, nargs="+", default=[],
        help="rows of a batch that sides without padding are tried with, each at every budget (default: all rows, or "
        "as many as have TRL's loss computed on the CPU)",
    )  # fmt: skip
    measure.add_argument("--steps", type=int, default=5, help="timed steps of each side (default: %(default)s)")
    measure.add_argument(
        "--max-seconds",
        type=float,
        default=120.0,
        help="after so many a side is not timed again (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE", help="draw steps by phase and speed-ups")
    return parser
