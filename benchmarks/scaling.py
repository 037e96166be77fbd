"""Time and memory of an optimizer step over unique tokens, at one depth: more branches, no longer paths.

    export HARTS_COMMIT=$(git rev-parse --short HEAD)
    python -m benchmarks.scaling --out scaling.json               # 64k to 1M tokens, one GPU, within 150 seconds
    python -m benchmarks.scaling --dry-run --out dry.json         # 1k to 16k, a tiny model on a CPU

Real trainers (``TreeGRPOTrainer``), a trunk with as many equal subtrees of four ragged leaves as it takes, the leaves
trained. Microbatches, execution and limit of handed bytes are the same for all sizes; without ``--handoff-bytes`` the
limit is what the smallest size holds alive. A small case of the same model is compared with rows that share nothing
first: if they do not train the same, nothing is timed. Each size is written as it is done; what the file has of this
commit is not run again, and no size is begun that may not end within ``--seconds``.
"""

import argparse
import gc
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.gpu import record
from benchmarks.update.models import MODELS, build
from harts_hf.bench.about import about_machine
from harts_hf.bench.measure import measure_step
from harts_hf.bench.results import BenchOptions
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import PACKED, TREE, BenchStep, Setting, Side, build_side, common_arguments
from harts_hf.bench.subject import word_tokenizer
from harts_hf.modeling import vocab_size_of
from harts_hf.rollouts.recorded import RolloutGroup
from harts_hf.rollouts.shapes import shape_group
from harts_hf.trainers import TreeGRPOConfig

STEPS, TIMED_SECONDS = 3, 20.0  # timed steps of a size, fewer where they take longer together
SIDES = ("seconds", "forward_backward_seconds")


class Shape(NamedTuple):
    """A trunk, and per subtree a middle and its leaves; tokens of each."""

    trunk: int
    middle: int
    leaves: tuple[int, ...]
    budget: int
    sizes: tuple[int, ...]
    compared: int  # unique tokens, at least, of the case that is compared; microbatches hold a third of it

    @property
    def subtree(self) -> int:
        """Tokens of one."""
        return self.middle + sum(self.leaves)

    def group(self, tokens: int) -> RolloutGroup:
        """At least so many unique tokens, two subtrees at least; the leaves are trained."""
        count = max(2, -(-(tokens - self.trunk) // self.subtree))
        parent, length, sample_node, trained = [-1], [self.trunk], [], []
        for _ in range(count):
            middle = len(parent)
            parent += [0, *[middle] * len(self.leaves)]
            length += [self.middle, *self.leaves]
            sample_node += range(middle + 1, len(parent))
            start = self.trunk + self.middle
            trained += [[[start, start + leaf]] for leaf in self.leaves]
        row = {"parent": parent, "length": length, "sample_node": sample_node, "trained": trained}
        return shape_group(row, f"{tokens} tokens")


WHOLE = Shape(8192, 2048, (1800, 1400, 1700, 1244), 16384, tuple(2**power for power in range(16, 21)), 24576)
DRY = Shape(512, 128, (112, 88, 106, 78), 1024, tuple(2**power for power in range(10, 15)), 1536)


def run(options: argparse.Namespace) -> None:
    """Size after size."""
    warnings.simplefilter("ignore", FutureWarning)  # of TRL
    until, dry = time.monotonic() + options.seconds, options.dry_run
    shape = DRY if dry else WHOLE
    budget, device = options.budget or shape.budget, torch.device("cpu" if dry else "cuda")
    about = about_machine(device)
    result = record.read(options.out) if options.out.exists() else {}
    if result.get("commit", about["commit"]) != about["commit"]:
        raise SystemExit(f"expected --out to be of commit {about['commit']}, got {options.out} of {result['commit']}")
    record.write(options.out, result)  # whether it can be written is seen before a model is built
    model = build(options.model, dry=dry, layers=None if dry else options.layers)
    vocab, layers = vocab_size_of(model), int(model.config.num_hidden_layers)
    print(f"built {options.model}, {layers} layers", flush=True)
    setting = {"model": options.model, "layers": layers, "execution": options.execution, "budget": budget}
    if not result:
        result = {**about, "setting": setting, "parity": None, "failures": {}, "rows": []}
    if result["setting"] != setting:
        raise SystemExit(f"expected --out to be of {setting}, got {options.out} of {result['setting']}")
    args = common_arguments(
        bf16=not dry, use_cpu=dry, optim="sgd", dataloader_pin_memory=False, activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False}, router_aux_loss_coef=0.0, tree_sharing="always",
        tree_execution=options.execution, tree_max_handoff_bytes=options.handoff_bytes,
    )  # fmt: skip
    if result["parity"] is None:
        rollouts = StepRollouts.of([shape.group(shape.compared)], vocab_size=vocab)
        result["parity"] = compared(model, rollouts, args)
        record.write(options.out, result)
    if not result["parity"]["passed"]:
        raise SystemExit(f"refused: {'; '.join(result['parity']['failures'])}")
    print(f"parity passed, {until - time.monotonic():.0f} s left", flush=True)
    limit = options.handoff_bytes or result.get("max_handoff_bytes")
    for tokens in options.tokens or shape.sizes:
        rows = {row["asked"]: row for row in result["rows"]}
        if tokens in rows:
            continue
        expected = max((row["first_seconds"] * tokens / row["asked"] for row in rows.values()), default=0.0)
        if time.monotonic() + 1.2 * expected > until:
            print(f"no time left for {tokens:,} tokens", flush=True)
            break
        rollouts = StepRollouts.of([shape.group(tokens)], vocab_size=vocab)
        own = replace(args, tree_max_handoff_bytes=limit, generation_batch_size=None)
        try:
            side = build_side(
                Setting(kind=TREE, size=budget),
                BenchStep(model=model, rollouts=rollouts, args=own, tokenizer=word_tokenizer()),
            )
            row = {"asked": tokens, **timed(side, rollouts, until)}
        except Exception:
            result["failures"][str(tokens)] = record.failure()
            record.write(options.out, result)
            break
        limit = result["max_handoff_bytes"] = limit or row["peak_handoff_bytes"]
        result["rows"] = [*result["rows"], {**row, "max_handoff_bytes": limit}]
        result["fit"] = {name: fit(result["rows"], name) for name in SIDES} if len(result["rows"]) > 2 else {}
        record.write(options.out, result)
        per_token = row["seconds"] / row["tokens"] * 1e6
        said = f"{row['tokens']:,} tokens: {row['seconds']:.3f} s, {per_token:.2f} us a token"
        print(f"{said}, peak {(row['peak_memory'] or 0) / 1e9:.1f} GB", flush=True)
        del side
        model.zero_grad(set_to_none=True)
        gc.collect()  # trainers are cycles
    draw(result, options.out.with_suffix(".png"))
    for name, found in result.get("fit", {}).items():
        print(
            f"{name}: {found['constant']:.3g} s + {found['per_token'] * 1e6:.3g} us a token, at most "
            f"{found['largest_residual']:.1%} off; grows with tokens to the power of {found['exponent']:.3f}"
        )


def compared(model: nn.Module, rollouts: StepRollouts, args: TreeGRPOConfig) -> dict[str, Any]:
    """The verdict of a step that is cut into several microbatches, beside packed rows without sharing."""
    bench = BenchOptions(
        budgets=(max(64, rollouts.tree.num_tokens // 3),), kinds=(PACKED, TREE), steps=1, stages=False
    )
    measured = measure_step(
        BenchStep(model=model, rollouts=rollouts, args=args, tokenizer=word_tokenizer()), bench, progress=print
    )
    model.zero_grad(set_to_none=True)
    return measured.parity.to_dict()


def timed(side: Side, rollouts: StepRollouts, until: float) -> dict[str, Any]:
    """A row: a step that is thrown away if time allows, then some that count."""
    clock = side.clock
    log = side.step()
    first, schedule = clock.seconds, clock.report.window.schedule
    found: list[tuple[float, float, float]] = []
    peak = clock.peak_memory
    while len(found) < STEPS and sum(step[0] for step in found) < TIMED_SECONDS:
        if time.monotonic() + 1.2 * first > until:
            break
        log = side.step()
        found.append((clock.seconds, clock.phases["forward_backward"], clock.phases["planning"]))
        peak = clock.peak_memory
    is_first = not found  # its kernels may have been compiled in it
    found = found or [(clock.seconds, clock.phases["forward_backward"], clock.phases["planning"])]
    seconds, forward_backward, planning = (float(np.median(values)) for values in zip(*found, strict=True))
    return {
        "tokens": rollouts.tree.num_tokens,
        "expanded_tokens": rollouts.num_tokens,
        "trajectories": len(rollouts.token_ids),
        "depth": int(rollouts.tree.depth.max()) + 1,
        "microbatches": len(schedule.microbatches),
        "forward_tokens": schedule.forward_tokens,
        "backward_tokens": schedule.backward_tokens,
        "peak_handoff_bytes": schedule.peak_handoff_bytes,
        "limits_raised": log["tree/limits_raised"],
        "first_seconds": first,
        "is_first_step": is_first,
        "seconds_of_steps": [step[0] for step in found],
        "seconds": seconds,
        "forward_backward_seconds": forward_backward,
        "planning_seconds": planning,
        "peak_memory": peak,
        "clocks": clock.clocks,
    }


def fit(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Seconds as a constant and a time per token, by relative least squares; and the power of tokens they grow by.

    Args:
        rows: of at least two sizes.
        name: of the seconds.
    """
    tokens, seconds = (np.array([row[key] for row in rows], float) for key in ("tokens", name))
    table = np.stack([np.ones_like(tokens), tokens], axis=1) / seconds[:, None]
    constant, per_token = np.linalg.lstsq(table, np.ones_like(seconds), rcond=None)[0]
    residual = np.abs((constant + per_token * tokens) / seconds - 1).max()
    exponent = np.polyfit(np.log(tokens), np.log(seconds), 1)[0]
    return {
        "constant": float(constant),
        "per_token": float(per_token),
        "largest_residual": float(residual),
        "exponent": float(exponent),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Time per token, and memory, over tokens."""
    rows, setting = result["rows"], result["setting"]
    if not rows:
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [row["tokens"] for row in rows]
    for name, label in zip(SIDES, ("whole step", "forwards and backwards"), strict=True):
        left.plot(tokens, [row[name] / row["tokens"] * 1e6 for row in rows], "o-", label=label)
    left.set(xscale="log", ylabel="microseconds per unique token", ylim=0)
    left.legend(fontsize=8)
    if all(row["peak_memory"] for row in rows):
        right.plot(tokens, [row["peak_memory"] / 1e9 for row in rows], "o-", label="peak on the GPU")
    right.plot(tokens, [row["peak_handoff_bytes"] / 1e9 for row in rows], "s-", label="handed states, as planned")
    right.set(xscale="log", ylabel="GB", ylim=0)
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.set_xlabel(f"unique tokens, paths of {rows[0]['depth']:,}")
    title = f"{setting['model']}, {setting['layers']} layers, {setting['execution']}, {result['device']}"
    figure.suptitle(title, fontsize=10, parse_math=False)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, fits and draws."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="ling-3.0-tiny")
    parser.add_argument("--layers", type=int, default=8, help="the first ones of the model (default: %(default)s)")
    parser.add_argument("--execution", choices=("nested", "replay"), default="nested")
    parser.add_argument("--budget", type=int, help="tokens of a microbatch")
    parser.add_argument("--handoff-bytes", type=int, help="tree_max_handoff_bytes")
    parser.add_argument("--tokens", type=int, nargs="+", help="unique tokens, ascending")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the call (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, required=True)
    run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
