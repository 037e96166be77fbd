"""Supervised training on conversations beside stock TRL: `python -m benchmarks.sft` (one CPU core, some minutes).

200 conversations of several turns, a row per turn with the history before it, in three SGD steps; all trainers on the
same batches. `--device cuda` trains eight layers of Qwen3.5-4B's widths in bfloat16 on longer conversations, and
beside stock TRL the package's own kernels with nothing shared. Nothing is reported unless losses, gradients and (in
float32) parameters after the steps agree. results/sft_cpu.json, results/sft_h200.json.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.gpu import record
from benchmarks.gpu.registry import STEP_MODELS
from benchmarks.machine import RESULTS, describe_machine
from harts_hf import TreeSFTConfig, TreeSFTTrainer

SEED = 0
QWEN = STEP_MODELS["qwen3.5-4b"][1]
PERIOD = ["linear_attention"] * 3 + ["full_attention"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained on a device.

    Attributes:
        device: ``cpu``: float32 and one thread; ``cuda``: bfloat16.
        model: fields of a ``qwen3_5_text`` configuration.
        conversations: how many.
        system: tokens that all conversations begin with.
        task, turn, answer: least and most tokens of what follows: a task, then turns of the policy and answers.
        batch_size, accumulation: rows of a microbatch of stock TRL, microbatches of a step.
        warm, timed: optimizer steps that compile, and that are reported.
        learning_rate: of SGD.
        budgets: largest differences, see :func:`parity`.
        sharing: ways to train besides stock TRL's.
    """

    device: str
    model: Mapping[str, Any]
    conversations: int
    system: int
    task: tuple[int, int]
    turn: tuple[int, int]
    answer: tuple[int, int]
    batch_size: int
    accumulation: int
    warm: int
    timed: int
    learning_rate: float
    budgets: Mapping[str, float]
    sharing: tuple[str, ...] = ("always",)


TINY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "layer_types": PERIOD,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CASES = {
    # Three steps of 328 rows: each of the 983 rows once.
    "cpu": Case(
        device="cpu", model=TINY, conversations=200, system=100, task=(20, 100), turn=(10, 60), answer=(10, 120),
        batch_size=4, accumulation=82, warm=0, timed=3, learning_rate=0.5,
        # float32; gates of hybrid models are the widest.
        budgets={"losses": 1e-5, "gradients": 1e-4, "parameters": 1e-3},
    ),
    "cuda": Case(
        device="cuda", model={**QWEN, "num_hidden_layers": 8, "layer_types": PERIOD * 2}, conversations=40,
        system=1000, task=(200, 1000), turn=(100, 600), answer=(100, 1200), batch_size=2,
        accumulation=16, warm=1, timed=2, learning_rate=1e-6, sharing=("always", "never"),
        # bfloat16, in which stock TRL adds up the gradients of its 16 microbatches.
        budgets={"losses": 2e-3, "gradients": 5e-2},
    ),
}  # fmt: skip


def conversations(case: Case) -> Dataset:
    """A row per turn, of which the turn alone is labelled; conversations of 2 to 8 turns."""
    rng = np.random.default_rng(SEED)

    def some(least: int, most: int) -> list[int]:
        return rng.integers(3, case.model["vocab_size"], rng.integers(least, most)).tolist()

    system, rows = some(case.system, case.system + 1), []
    for _ in range(case.conversations):
        history = system + some(*case.task)
        for _ in range(int(rng.integers(2, 9))):
            turn = some(*case.turn)
            rows.append({"input_ids": history + turn, "labels": [-100] * len(history) + turn})
            history = history + turn + some(*case.answer)
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words that nobody writes: rows are token ids already."""
    inner = Tokenizer(WordLevel({f"t{i}": i for i in range(8)}, unk_token="t2"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t1", unk_token="t2")


def build_model(case: Case) -> Any:
    """A dense hybrid of random weights."""
    torch.manual_seed(SEED)
    with torch.device(case.device):
        config = AutoConfig.for_model("qwen3_5_text", **case.model)
        dtype = torch.bfloat16 if case.device == "cuda" else torch.float32
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


class Watch(TrainerCallback):
    """Seconds of each optimizer step, tokens that its batches have (padding too), gradients of the first one.

    On the CPU, seconds are the processor's, of the one thread: what else the machine does is not counted.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seconds: list[float] = []
        self.padded_tokens = 0
        self.gradients: list[torch.Tensor] = []

    def count(self, trainer: Any) -> None:
        """Counts tokens of what the trainer's steps are given."""
        step = trainer.training_step

        def counted(model: Any, inputs: Any, *more: Any) -> Any:
            self.padded_tokens += inputs["input_ids"].numel()
            return step(model, inputs, *more)

        trainer.training_step = counted

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = self._now()

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        if not self.gradients:
            self.gradients = [parameter.grad.clone() for parameter in model.parameters()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self._now() - self._started)

    def _now(self) -> float:
        if self.case.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """What a training leaves."""

    watch: Watch
    logs: list[dict[str, float]]
    parameters: list[torch.Tensor]
    order: Any
    peak_memory: int

    @property
    def losses(self) -> np.ndarray:
        """Of each step."""
        return np.array([log["loss"] for log in self.logs])


def train(case: Case, rows: Dataset, order: Any, sharing: str | None) -> Trained:
    """Trains on rows in a given order, or (None) in that of the trainer; ``sharing=None`` is stock TRL."""
    kind, config, options = (
        (SFTTrainer, SFTConfig, {}) if sharing is None else (TreeSFTTrainer, TreeSFTConfig, {"tree_sharing": sharing})
    )
    on_gpu = case.device == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            output_dir=folder, per_device_train_batch_size=case.batch_size,
            gradient_accumulation_steps=case.accumulation, max_length=None, max_steps=case.warm + case.timed,
            learning_rate=case.learning_rate, lr_scheduler_type="constant", optim="sgd", max_grad_norm=1e9,
            logging_steps=1, save_strategy="no", report_to="none", use_cpu=not on_gpu, bf16=on_gpu, disable_tqdm=True,
            gradient_checkpointing=on_gpu, dataloader_pin_memory=False, seed=SEED, **options,
        )  # fmt: skip
        watch = Watch(case)
        trainer: Any = kind(
            build_model(case), args, train_dataset=rows, processing_class=tokenizer(), callbacks=[watch]
        )
        trainer.remove_callback(PrinterCallback)
        watch.count(trainer)
        order = order or trainer._get_train_sampler()
        trainer._get_train_sampler = lambda train_dataset=None: order
        trainer.train()
    return Trained(
        watch=watch,
        logs=[log for log in trainer.state.log_history if "loss" in log],
        parameters=[parameter.detach() for parameter in trainer.model.parameters()],
        order=order,
        peak_memory=torch.cuda.max_memory_allocated() if on_gpu else 0,
    )


def parity(case: Case, stock: Trained, tree: Trained) -> dict[str, float]:
    """How far two trainings are apart.

    ``losses``: largest difference, relative to the loss. ``gradients`` of the first step: norm of the difference over
    the norm. ``parameters`` after the steps, in float32: largest difference over the largest movement.
    """
    pairs = list(zip(tree.watch.gradients, stock.watch.gradients, strict=True))
    apart = sum(float((mine.double() - theirs.double()).square().sum()) for mine, theirs in pairs)
    whole = sum(float(theirs.double().square().sum()) for _, theirs in pairs)
    found = {
        "losses": float((np.abs(tree.losses - stock.losses) / stock.losses).max()),
        "gradients": (apart / whole) ** 0.5,
    }
    if "parameters" in case.budgets:
        trained = list(zip(build_model(case).parameters(), tree.parameters, stock.parameters, strict=True))
        moved = max(float((theirs - start).detach().abs().max()) for start, _, theirs in trained)
        if moved < 1e-3:
            raise SystemExit(f"expected steps that move parameters by 1e-3 at least, got {moved:.1e}")
        found["parameters"] = max(float((mine - theirs).abs().max()) for _, mine, theirs in trained) / moved
    return found


def measure(case: Case) -> dict[str, Any]:
    """Trains in each way; the result's content, with whether everything agreed (``met``)."""
    rows = conversations(case)
    ways = {sharing: None for sharing in case.sharing}
    trained: dict[str, Trained] = {}
    order = None
    for sharing in ways:
        trained[sharing] = train(case, rows, order, sharing)
        order = trained[sharing].order
        print(f"tree_sharing={sharing}: {trained[sharing].watch.seconds} s", flush=True)
    stock = train(case, rows, order, None)
    print(f"stock TRL: {stock.watch.seconds} s", flush=True)
    apart = {sharing: parity(case, stock, one) for sharing, one in trained.items()}
    met = all(figures[name] < budget for figures in apart.values() for name, budget in case.budgets.items())
    timed = slice(case.warm, None)
    seconds = {name: float(np.median(one.watch.seconds[timed])) for name, one in {**trained, "stock": stock}.items()}
    steps, logs = case.warm + case.timed, trained["always"].logs
    return {
        "about": about(case),
        "model": {"model_type": "qwen3_5_text", **case.model},
        "conversations": case.conversations,
        "rows": len(rows),
        "rows_per_step": case.batch_size * case.accumulation,
        "tokens_per_step": float(np.mean([log["tree/expanded_tokens"] for log in logs])),
        "padded_tokens_per_step": stock.watch.padded_tokens / steps,
        "sharing_ratio": float(np.mean([log["tree/sharing_ratio"] for log in logs])),
        "microbatches": [log["tree/microbatches"] for log in logs],
        "parity": apart,
        "budgets": dict(case.budgets),
        "met": met,
        "losses": stock.losses.tolist(),
        "seconds": {name: one.watch.seconds for name, one in {**trained, "stock": stock}.items()},
        "peak_memory": {name: one.peak_memory for name, one in {**trained, "stock": stock}.items()},
        "speed_up": {name: seconds[name] / seconds["always"] for name in seconds if name != "always"},
    }


def about(case: Case) -> dict[str, Any]:
    """What it was measured on."""
    if case.device == "cuda":
        return record.about()
    return {**describe_machine(), "torch": torch.__version__, "threads": torch.get_num_threads(), "seed": SEED}


def tiny(case: Case) -> Case:
    """Small enough for a CPU, to see that it runs."""
    return replace(
        case, device="cpu", model=TINY, conversations=8, system=20, task=(10, 20), turn=(2, 12), answer=(5, 20),
        batch_size=2, accumulation=4, timed=1, learning_rate=0.05, budgets=CASES["cpu"].budgets,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Trains in each way and writes the result; the exit status is 1, and nothing is written, where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=CASES, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="(default: benchmarks/results/sft_cpu.json or sft_h200.json)")
    parser.add_argument("--dry-run", action="store_true", help="a tiny case on the CPU; writes to --out alone")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    case = tiny(CASES[options.device]) if options.dry_run else CASES[options.device]
    result = measure(case)
    print(json.dumps({key: result[key] for key in ("speed_up", "sharing_ratio", "parity", "losses", "peak_memory")}))
    if not result["met"]:
        print(f"not the same training (budgets: {dict(case.budgets)}): nothing is reported", file=sys.stderr)
        return 1
    out = options.out or (
        None if options.dry_run else RESULTS / f"sft_{'cpu' if case.device == 'cpu' else 'h200'}.json"
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        record.write(out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
