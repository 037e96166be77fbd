"""The console script `harts`: finds the command's module and hands over to it. Imports nothing heavy."""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from harts_hf.cli.output import printable_lines, reader_is_gone
from harts_hf.cli.signals import Terminated
from harts_hf.errors import missing_extra

COMMANDS = {
    "train": "train a model on rollout trees by a recipe: harts train RECIPE [--field value ...]",
    "plan": "what tree training would do for a rollout file: harts plan ROLLOUTS [--plot out.png]",
    "verify": "compare tree and expanded computation on your model: harts verify --model M ROLLOUTS",
    "bench": "time an optimizer step beside stock TRL: harts bench --model M ROLLOUTS, harts bench RECIPE",
}


def available_commands() -> list[str]:
    """Commands that this installation has."""
    return [name for name in COMMANDS if find_spec(f"harts_hf.cli.{name}") is not None]


def usage() -> str:
    """The text of `harts --help`."""
    lines = ["usage: harts COMMAND [options]", "", "Train RL policies on rollout trees.", "", "commands:"]
    lines += [f"  {name:<8}{COMMANDS[name]}" for name in available_commands()]
    return "\n".join([*lines, "", "harts COMMAND --help tells about a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: arguments after the program's name; None for those of the process.

    Returns:
        The exit status: 0; 1 where a command says no (`verify`) or fails in the middle (`train`); 2 for a command
        line or an input that cannot be used; as after a signal where the user interrupts (130), SIGTERM ends a
        training (143) or whoever reads stdout has gone (141). A broken pipe of somebody else's is an error as any
        other.
    """
    try:
        status = _run(argv)
        sys.stdout.flush()  # so that a reader that has gone is noticed here, not when Python shuts down
        return status
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor must what is still to be written
        return 141
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        notes = getattr(error, "__notes__", ())  # where the rollouts lie that were collected before
        lines = ["interrupted by SIGTERM" if terminated else "interrupted", *map(printable_lines, notes)]
        print("\nharts: " + "\n".join(lines), file=sys.stderr)
        return 143 if terminated else 130


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        import harts_hf

        print(harts_hf.__version__)
        return 0
    name = arguments[0]
    if name not in available_commands():
        close = get_close_matches(name, available_commands(), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        print(f"harts: expected a command ({', '.join(available_commands())}), got {name!r}{hint}", file=sys.stderr)
        return 2
    # TRL says from its import on, before anything is read, that rollout_func is experimental.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        return import_module(f"harts_hf.cli.{name}").main(arguments[1:]) or 0
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise  # in the middle of somebody's module, which the traceback names
        print(f"harts {name}: {missing}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"harts {name}: out of memory: {printable_lines(error)}", file=sys.stderr)
        return 2
    except (ImportError, OSError, EOFError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            raise
        print(f"harts {name}: {printable_lines(error)}", file=sys.stderr)
        return 2
