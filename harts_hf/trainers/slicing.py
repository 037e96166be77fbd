"""How a step's rows are split into micro-steps, each of which has a loss of its own (a slice).

Forwards and backwards of a tree trainer are planned over all rows of a step, so that smaller slices save none of their
memory; a slice's loss sees ``[B, C]`` numbers of each kind. What slices cost is operations: about 120 each.
"""

import logging
from typing import Any

import torch

from harts_hf.trainers.skipping import has_custom_loss
from harts_hf.trainers.weighing import UNITS

_logger = logging.getLogger(__name__)

# Entries of a slice's largest tensor up to which its loss is computed on the CPU.
MOST_ON_CPU = 2**20
# Below as many entries of [B, C] a loss on the CPU takes hardly longer for more of them (0.7 ms for 1,024, 1.2 ms for
# 16,384, then 50 ns an entry: one core of an x86 server).
SMALL = 2**14
# Slices from which on that is worth a word: some 15 ms a step on the same core.
MANY = 24


def depends_on_slices(trainer: Any) -> str | None:
    """What makes the gradient of a step depend on which rows are in one micro-step; None where equally many rows in
    each give the same whatever is with what.

    TRL's losses are means over a micro-step's rows, sums over what the whole step has, or means over a micro-step's
    tokens; these alone weigh rows by their company.

    Args:
        trainer: of TRL's GRPO, or its arguments.
    """
    if UNITS.get(trainer.loss_type, "tokens") == "tokens":
        return f"loss_type={trainer.loss_type!r}"
    args = getattr(trainer, "args", trainer)
    for name, off in (("top_entropy_quantile", 1.0), ("entropy_coef", 0.0), ("use_adaptive_entropy", False)):
        if getattr(args, name) != off:
            return name
    # None, of arguments alone, is what the model's configuration says.
    has_router_loss = getattr(trainer, "aux_loss_enabled", args.router_aux_loss_coef != 0.0)
    return "router_aux_loss_coef" if has_router_loss else None


class SlicingHint:
    """Says once where a step is split into many small slices for nothing.

    Args:
        trainer: with TRL's loss, or another, of which nothing is said.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_open = trainer.is_world_process_zero()

    def note(self, batches: list[dict[str, Any]]) -> None:
        """Looks at the first step's batches."""
        if not self._is_open or len(batches) < MANY:
            return
        self._is_open = False
        trainer = self._trainer
        if getattr(trainer, "loss_type", None) not in UNITS or has_custom_loss(trainer) or depends_on_slices(trainer):
            return
        mask: torch.Tensor = batches[0]["completion_mask"]
        if mask.numel() > SMALL:
            return
        _logger.warning(
            "each of the step's %d micro-steps has a loss of its own, of %d row%s: per_device_train_batch_size=%d and "
            "gradient_accumulation_steps=%d train the same in less time, and need no more memory for it (docs/"
            "training.md, \"How many rows at once\")",
            len(batches), len(mask), "" if len(mask) == 1 else "s", *fewer(len(batches), mask.numel(), len(mask)),
        )  # fmt: skip


def fewer(slices: int, entries: int, rows: int) -> tuple[int, int]:
    """Rows of a batch and batches of the same step, none larger than is quick.

    Args:
        slices: that there are.
        entries: of each.
        rows: of each.
    """
    together = next(n for n in range(slices, 0, -1) if slices % n == 0 and (n == 1 or n * entries <= MOST_ON_CPU))
    return rows * together, slices // together
