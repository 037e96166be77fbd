"""From which sharing ratio on a tree pays on one CPU core: `python -m benchmarks.break_even` (some minutes).

Eight rollouts of 256 tokens share a prefix of 0 to 90 % of them; a dense hybrid of four layers, float32. Real
trainers, in turns: see docs/performance.md. Nothing is recorded unless all trained the same.
"""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.record import write
from benchmarks.machine import describe_machine, output_path
from harts_hf.bench.about import about_machine
from harts_hf.bench.measure import measure_step
from harts_hf.bench.plot import plot_rows
from harts_hf.bench.report import row_of, table_of
from harts_hf.bench.results import BenchOptions
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import PACKED, STOCK, TREE, BenchStep, common_arguments
from harts_hf.bench.subject import word_tokenizer
from harts_hf.rollouts.shapes import shape_group

BRANCHES, LENGTH, SHARED = 8, 256, (0.0, 0.15, 0.25, 0.5, 0.75, 0.9)
VOCABULARY, STEPS, SEED = 512, 5, 0
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def rollouts_of(shared: float) -> StepRollouts:
    """A prefix of a part of each rollout; all tokens of the branches are trained."""
    prefix = round(LENGTH * shared)
    own = LENGTH - prefix
    shape = {
        "parent": [-1] + [0] * BRANCHES,
        "length": [prefix] + [own] * BRANCHES,
        "sample_node": list(range(1, BRANCHES + 1)),
        "trained": [[[max(1, prefix), LENGTH]]] * BRANCHES,
    }
    return StepRollouts.of([shape_group(shape, f"{shared:.0%}")], vocab_size=VOCABULARY, seed=SEED)


def main() -> None:
    """Runs all and writes benchmarks/results/break_even_cpu.json and its plot."""
    path = output_path("break_even_cpu", __doc__)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **MODEL))
    args = common_arguments(use_cpu=True, bf16=False, activation_checkpointing=False, optim="sgd")
    options = BenchOptions(kinds=(STOCK, PACKED, TREE), budgets=(4096,), batch_sizes=(1, 2, 4, 8), steps=STEPS)
    rows = []
    for shared in SHARED:
        measured = measure_step(
            BenchStep(model=model, rollouts=rollouts_of(shared), args=args, tokenizer=word_tokenizer()), options
        )
        row = row_of(measured, model="qwen3_5_text, hidden size 128", workload="eight branches of one prefix")
        print(table_of(row), flush=True)
        if not row["parity"]["passed"]:
            raise SystemExit(json.dumps(row["parity"]))
        rows.append(row)
    about = {**about_machine(torch.device("cpu")), "machine": describe_machine(), "seed": SEED}
    write(path, {**about, "commit": about["machine"]["commit"], "configuration": MODEL, "rows": rows})
    plot_rows(rows, path.with_suffix(".png"), f"{about['device']}: four layers, float32")


if __name__ == "__main__":
    main()
