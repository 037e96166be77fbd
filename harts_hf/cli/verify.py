"""`harts verify`: compares tree and expanded computation on your model and your rollouts, with a verdict."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import harts_hf
from harts_hf.cli.checks import check_output_file, find_device, refuse_to_overwrite, seed
from harts_hf.cli.loading import (
    add_rollouts,
    check_token_ids,
    is_random,
    load_model,
    parse_all,
    read_rollouts,
    summary,
    tokenizer_name,
    tokenizer_on_demand,
)
from harts_hf.cli.output import printable, write_json
from harts_hf.cli.parsing import CommandParser
from harts_hf.names import check_model_name

if TYPE_CHECKING:
    from harts_hf.planner import PlannerConfig
    from harts_hf.rollouts.files import RolloutFile, RolloutGroup
    from harts_hf.verify import Draw

DESCRIPTION = """\
Computes log-probs and gradients of sampled trajectories on the tree and, with the unpatched model, one trajectory at a
time, again, and in padded batches; compares them with one another and with a float64 copy of the model where that fits
into memory, else one layer at a time. The last line is the verdict: PASS; FAIL and why; or NOTHING SHARED, where the
rollouts left nothing to compare. The exit status is 0 for PASS, else 1, or 2 for a model or an input that cannot be
used.
"""
# Where stderr is no terminal, progress is a line, and at most one in so many seconds.
SECONDS_PER_LINE = 10.0


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    return 0 if _run(parse_all(_parser(), argv)) else 1


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="harts verify", description=DESCRIPTION)
    add_rollouts(parser, tokenizer="folder or cached name, for rows with messages (default: the model's)")
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="model folder or name; a config (.json, or a folder with nothing else) gets random weights",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        help="expanded tokens of each draw of trajectories (default: %(default)s)",
    )
    parser.add_argument("--draws", type=int, default=5, help="draws of trajectories (default: %(default)s)")
    parser.add_argument(
        "--max-tokens-per-microbatch",
        type=int,
        default=16384,
        help="network rows of one forward of the tree (default: %(default)s)",
    )
    parser.add_argument("--no-oracle", action="store_true", help="do not compare with float64")
    parser.add_argument(
        "--router-loss",
        type=float,
        default=0.0,
        metavar="C",
        help="compare gradients with C times the router's auxiliary loss added (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of draws, weights and random models")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser


def _run(options: argparse.Namespace) -> bool:
    if not math.isfinite(options.router_loss):
        raise ValueError(f"expected --router-loss to be a finite number, got {options.router_loss}")
    if options.draws < 1:
        raise ValueError(f"expected at least one draw, got {options.draws}")
    refuse_to_overwrite(options.json, options.rollouts, options.model, options.tokenizer)
    check_output_file("--json", options.json)
    check_model_name("--model", options.model)
    import torch

    from harts_hf.planner import PlannerConfig
    from harts_hf.verify import format_verdict, verify
    from harts_hf.verify.report import SHARED

    device = find_device(options.device)
    planner = PlannerConfig(max_tokens_per_microbatch=options.max_tokens_per_microbatch, sharing="always")
    file = read_rollouts(options, tokenizer_on_demand(tokenizer_name(options)))
    check_token_ids(file, options.model)
    progress = _Progress(options.draws)
    progress.say(f"loading {printable(options.model)} on {device}")
    with torch.device(device):  # billions of random weights take minutes on a CPU
        model = load_model(options.model, getattr(torch, options.dtype), seed=options.seed).to(device).eval()
    draws = _draws(file.groups, model, options)
    about_draws, untried = _about_draws(draws, planner)
    about = {**_about(model, options, file, device), **about_draws}
    print("\n".join(f"{name:<10}{text}" for name, text in about.items()), end="\n\n", flush=True)
    verdict = verify(
        model,
        [draw.trajectories for draw in draws],
        planner=planner,
        with_oracle=not options.no_oracle,
        seed=options.seed,
        router_loss=options.router_loss,
        progress=progress.show,
    )
    print(format_verdict(verdict, untried))
    passed = verdict.passed and SHARED not in untried
    if options.json:
        write_json(options.json, {"about": about, "untried": untried, **verdict.to_dict(), "passed": passed})
    return passed


class _Progress:
    """What is computed at the moment, on stderr: a line that changes or, where that is no terminal, a few lines."""

    def __init__(self, num_draws: int) -> None:
        self._num_draws = num_draws
        self._begun = self._next = time.monotonic()

    def show(self, draw: int, way: str) -> None:
        self.say(f"draw {draw + 1} of {self._num_draws}: {way} ({time.monotonic() - self._begun:.0f} s)")

    def say(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text:<50}", end="\r", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._next:
            print(f"harts verify: {text}", file=sys.stderr, flush=True)
            self._next = time.monotonic() + SECONDS_PER_LINE


def _draws(groups: Sequence["RolloutGroup"], model: Any, options: argparse.Namespace) -> list["Draw"]:
    from harts_hf.modeling import vocab_size_of
    from harts_hf.verify import draw_trajectories

    trees = [group.tree for group in groups]
    vocab_size = vocab_size_of(model)
    return [
        draw_trajectories(trees, max_tokens=options.max_tokens, vocab_size=vocab_size, seed=options.seed + index)
        for index in range(options.draws)
    ]


def _about(model: Any, options: argparse.Namespace, file: "RolloutFile", device: Any) -> dict[str, str]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    installed = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    versions = f"harts_hf {harts_hf.__version__}, {installed}"
    return {
        "model": f"{printable(options.model)}: {model.config.model_type}, {parameters:,} parameters"
        f"{' (RANDOM WEIGHTS)' if is_random(options.model) else ''}, {options.dtype} on {device}",
        "rollouts": f"{printable(options.rollouts)}{f': {summary(file)}' if file.num_conversations else ''}",
        "versions": f"{versions}; seed {options.seed}",
        **({"loss": f"with {options.router_loss} times the router's"} if options.router_loss else {}),
    }


def _about_draws(draws: Sequence["Draw"], planner: "PlannerConfig") -> tuple[dict[str, str], list[str]]:
    """A line about the draws, and what they leave untried."""
    from harts_hf.planner import plan_window
    from harts_hf.tree import RolloutTree
    from harts_hf.verify import planner_of_parts

    trees = [RolloutTree.from_trajectories(draw.trajectories) for draw in draws]
    expanded, unique = (sum(getattr(tree, key) for tree in trees) for key in ("num_expanded_tokens", "num_tokens"))
    parts = sum(
        len(plan_window(tree, planner_of_parts(draw.trajectories, planner)).microbatches)
        for draw, tree in zip(draws, trees, strict=True)
    )
    missing = {
        "shared": ("NOTHING IS SHARED", expanded == unique),
        "handed over": ("NOTHING IS HANDED OVER", parts == len(trees)),
        "branches": ("NOTHING BRANCHES", not any((tree.num_children > 1).any() for tree in trees)),
    }
    notes = [
        "trajectories cut to fit" if any(draw.is_cut for draw in draws) else "",
        "tokens drawn at random" if any(draw.is_filled for draw in draws) else "",
        *(note for note, is_missing in missing.values() if is_missing),
    ]
    text = (
        f"{len(draws)}, of {sum(tree.num_trajectories for tree in trees)} trajectories, {expanded:,} tokens, "
        f"{unique:,} unique (ratio {expanded / unique:.2f}), {parts} parts"
    )
    untried = [name for name, (_, is_missing) in missing.items() if is_missing]
    return {"draws": "; ".join([text, *filter(None, notes)])}, untried
