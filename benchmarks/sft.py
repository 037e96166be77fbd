"""Supervised training on conversations beside stock TRL: `python -m benchmarks.sft` (one CPU, some minutes).

200 conversations of several turns, a row per turn with the history before it; three SGD steps of 64 rows each, both
trainers on the same batches. Nothing is reported unless losses and parameters after the steps agree.
"""

import json
import tempfile
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from benchmarks.machine import describe_machine, output_path
from harts_hf import TreeSFTConfig, TreeSFTTrainer

VOCABULARY, CONVERSATIONS, STEPS = 512, 200, 3
# Of what training moved parameters by, and of losses, in float32: gates of hybrid models are the widest.
PARITY_BUDGET = 1e-2


def conversations(count: int, seed: int) -> Dataset:
    """A row per turn: 120 to 200 tokens of system prompt and task, turns of 10 to 60, answers of 10 to 120."""
    rng = np.random.default_rng(seed)
    system, rows = rng.integers(3, VOCABULARY, 100).tolist(), []
    for _ in range(count):
        history = system + rng.integers(3, VOCABULARY, rng.integers(20, 100)).tolist()
        for _ in range(int(rng.integers(2, 9))):
            turn = rng.integers(3, VOCABULARY, rng.integers(10, 60)).tolist()
            rows.append({"input_ids": history + turn, "labels": [-100] * len(history) + turn})
            history = history + turn + rng.integers(3, VOCABULARY, rng.integers(10, 120)).tolist()
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words that nobody writes: rows are token ids already."""
    inner = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t1", unk_token="t2")


def model() -> Any:
    """A dense hybrid of four layers, random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


class Timed:
    """Seconds of each training step of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self.seconds: list[float] = []
        self._step, self._trainer = trainer.training_step, trainer
        trainer.training_step = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        loss = self._step(*args, **kwargs)
        self.seconds.append(time.perf_counter() - started)
        return loss


def train(kind: type, config: type, rows: Dataset, order: Any, steps: int) -> tuple[Any, list[float], Any]:
    """Trains; the trainer, seconds of each optimizer step, and the order of rows."""
    with tempfile.TemporaryDirectory() as folder:
        accumulation = 16
        args = config(
            output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
            max_length=None, max_steps=steps, learning_rate=0.05, lr_scheduler_type="constant", optim="sgd",
            max_grad_norm=1e9, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            bf16=False, disable_tqdm=True, gradient_checkpointing=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = kind(model(), args, train_dataset=rows, processing_class=tokenizer())
        order = order or trainer._get_train_sampler()
        trainer._get_train_sampler = lambda train_dataset=None: order
        timed = Timed(trainer)
        trainer.train()
    seconds = np.array(timed.seconds).reshape(steps, accumulation).sum(axis=1).tolist()
    return trainer, seconds, order


def main() -> None:
    """Runs both and writes benchmarks/results/sft_cpu.json."""
    path = output_path("sft_cpu", __doc__)
    torch.set_num_threads(1)
    rows = conversations(CONVERSATIONS, seed=0)
    tree, tree_seconds, order = train(TreeSFTTrainer, TreeSFTConfig, rows, None, STEPS)
    stock, stock_seconds, _ = train(SFTTrainer, SFTConfig, rows, order, STEPS)
    start = dict(model().named_parameters())
    pairs = [(start[name].detach(), mine.detach(), theirs.detach()) for (name, mine), theirs in zip(
        tree.model.named_parameters(), stock.model.parameters(), strict=True)]  # fmt: skip
    moved = max(float((theirs - before).abs().max()) for before, _, theirs in pairs)
    apart = max(float((mine - theirs).abs().max()) for _, mine, theirs in pairs) / moved
    losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (tree, stock)]
    gap = float(np.abs(np.subtract(*losses)).max())
    if apart > PARITY_BUDGET or gap > PARITY_BUDGET or moved < 1e-4:
        raise SystemExit(f"not the same training: parameters {apart:.1e} of {moved:.1e} apart, losses {gap:.1e}")
    ratios = [log["tree/sharing_ratio"] for log in tree.state.log_history if "tree/sharing_ratio" in log]
    result = {
        "machine": {**describe_machine(), "torch": torch.__version__, "threads": 1},
        "seed": 0,
        "conversations": CONVERSATIONS,
        "rows": len(rows),
        "rows_per_step": 64,
        "parity": {"parameters_apart_of_movement": apart, "loss_gap": gap},
        "stock_seconds": stock_seconds,
        "tree_seconds": tree_seconds,
        "speed_up": float(np.median(stock_seconds) / np.median(tree_seconds)),
        "sharing_ratio": float(np.mean(ratios)),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("speed_up", "sharing_ratio", "stock_seconds", "tree_seconds", "parity")}))


if __name__ == "__main__":
    main()
