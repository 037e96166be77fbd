"""Peaks of windows on a GPU beside what the package's memory model predicts of them.

Models are whole (``STEP_MODELS``) or have four layers of real widths (``FAMILIES``); with ``:float32`` behind, float32
weights run under autocast to bfloat16, with ``:stock`` modules are not fused. Gradients are None when a window begins.
"""

import argparse
import gc
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu import record
from benchmarks.gpu.registry import MEMORY_CASES, MEMORY_CASES_OF_FAMILIES, SEED, STEP_MODELS
from benchmarks.gpu.trees import draw_tokens, spine
from benchmarks.gpu.whole.models import build_model
from benchmarks.gpu.whole.step import build
from harts_hf import PlannerConfig, patch
from harts_hf.modeling import LABEL_VALUES, LOG_PROB
from harts_hf.modeling.memory import peak_of_rows, row_bytes
from harts_hf.runtime import RunOptions, TreeValues, TreeWindow, WindowRun

DRY_DIVISOR = 40  # of rows


class Measured:
    """One model on the device.

    Args:
        name: of the registry, with variants behind.
        dry: tiny, on the CPU.
    """

    def __init__(self, name: str, dry: bool) -> None:
        self.name, self.dry, self.device = name, dry, "cpu" if dry else "cuda"
        family, *variants = name.split(":")
        self.wide, self.fused = "float32" in variants, "stock" not in variants
        model = build(family, dry) if family in STEP_MODELS else build_model(family, dry)
        self.model: nn.Module = patch(model.float() if self.wide else model).train()

    def window(self, rows: int, budget: int, execution: str) -> TreeWindow:
        """A spine of forks, cut or not."""
        if self.dry:
            rows, budget = rows // DRY_DIVISOR, max(64, budget // DRY_DIVISOR)
        limits = {"max_graph_tokens": 2 * budget} if execution == "nested" else {}
        config: Any = {"max_tokens_per_microbatch": budget, "sharing": "always", "execution": execution, **limits}
        trajectories = draw_tokens(spine(rows), self.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        return TreeWindow(trajectories, PlannerConfig(**config)).to(self.device)

    def run(self, window: TreeWindow) -> None:
        """Scored first in replay, else not; derivatives are random."""
        options = RunOptions(
            fused_modules=self.fused,
            **({"context": lambda: torch.autocast(self.device, torch.bfloat16)} if self.wide else {}),
        )
        generator = torch.Generator().manual_seed(SEED)
        weights = torch.randn(window.tree.num_tokens, generator=generator).to(self.device)
        coefficients = TreeValues(rows={LOG_PROB: weights})
        if window.schedule.execution == "nested":
            wanted = dict.fromkeys(LABEL_VALUES, torch.ones_like(weights).bool())
            run = WindowRun(self.model, window, options, mode="unscored")
            run.backward_unscored(coefficients, wanted, torch.Tensor.backward)
        else:
            run = WindowRun(self.model, window, options)
            run.score(LABEL_VALUES)
            run.backward(coefficients, torch.Tensor.backward)

    def peak(self, window: TreeWindow) -> dict[str, Any]:
        """Bytes allocated and reserved at most, in a second run; the first one compiles."""
        found: dict[str, Any] = {}
        for _ in range(2):
            self.model.zero_grad(set_to_none=True)
            gc.collect()
            if not self.dry:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            begun = time.monotonic()
            self.run(window)
            if not self.dry:
                torch.cuda.synchronize()
                found = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            found["seconds"] = time.monotonic() - begun
        return found

    def row(self, rows: int, budget: int, execution: str, checkpointing: bool) -> dict[str, Any]:
        """One row of the record."""
        switch: Any = self.model
        if checkpointing:
            switch.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            switch.gradient_checkpointing_disable()
        window = self.window(rows, budget, execution)
        dtype = torch.bfloat16 if self.wide else next(self.model.parameters()).dtype
        states = sum(p.numel() * p.element_size() for p in self.model.parameters())
        bytes_per_row = row_bytes(self.model, dtype=dtype, checkpointing=checkpointing, fused=self.fused)
        return {
            "model": self.name,
            "checkpointing": checkpointing,
            "execution": execution,
            "budget": window.schedule.config.max_tokens_per_microbatch,
            "spine": rows,
            "rows": window.tree.num_tokens,
            "microbatches": len(window.batches),
            "predicted": states + peak_of_rows(window.schedule, bytes_per_row, gradients=float(states)),
            **self.peak(window),
        }


def main(options: argparse.Namespace) -> None:
    """Case after case; what a case finds is written at once."""
    result: dict[str, Any] = {**record.about(), "failures": {}, "rows": []}
    for name in options.models:
        measured = Measured(name, options.dry_run)
        for case in MEMORY_CASES.get(name, MEMORY_CASES_OF_FAMILIES):
            try:
                row = measured.row(*case)
                result["rows"].append(row)
                ratio = np.nan if options.dry_run else row["predicted"] / row["peak"]
                print(name, case, f"predicted / measured {ratio:.3f}", flush=True)
            except Exception:
                result["failures"][f"{name} {case}"] = record.failure()
            record.write(options.out, result)
        del measured
        gc.collect()
        if not options.dry_run:
            torch.cuda.empty_cache()
