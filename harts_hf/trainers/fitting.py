"""Limits of plans that fit into memory, found once, and steps that are begun again where it ran out all the same."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn

from harts_hf.errors import HartsWarning
from harts_hf.modeling import walking
from harts_hf.planner import PlannerConfig
from harts_hf.runtime.budgets import Budget, halved, limited, limited_to
from harts_hf.runtime.kept import KeptScores
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.ranks import Ranks, is_out_of_memory
from harts_hf.runtime.update import TreeUpdate, UpdateReport
from harts_hf.trainers.memory import measured_budget

_logger = logging.getLogger(__name__)
Found = TypeVar("Found")


class TreeBudgets:
    """The limits that a training's plans keep.

    What ``"auto"`` stands for is found when the first window is planned (the model is where it stays then), as the
    smallest of all processes, and logged; it stays for the rest of the run, but for halvings.

    Args:
        trainer: whose arguments have the tree options.
        ranks: its processes.

    Attributes:
        halvings: how often memory ran out so far.
        max_tokens: rows of a microbatch in the latest plan.
        begins_again: whether steps are, where memory runs out; a benchmark of limits wants the error.
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self._trainer, self._ranks = trainer, ranks
        self._budget: Budget | None = None
        self._smaller: PlannerConfig | None = None  # whose limits of rows hold since memory ran out
        self._logged = 0  # halvings that metrics have had
        self.halvings = 0
        self.max_tokens = 0
        self.begins_again = True

    def applied(self, planner: WindowPlanner) -> WindowPlanner:
        """A planner with the limits that hold now; the first call is a collective where there are several processes.

        Raises:
            DoesNotFitError: nothing is left for rows.
        """
        config = planner.config
        if self._trainer.args.asks_for_memory:
            if self._budget is None:
                self._budget = self._agreed()
            limits = self._trainer.args.limits(self._budget)
            config = replace(config, **limits)
        if self._smaller is not None:
            config = limited(config, self._smaller.max_tokens_per_microbatch, self._smaller.max_graph_tokens)
        self.max_tokens = config.max_tokens_per_microbatch
        return replace(planner, config=config)

    def shrink(self, smaller: PlannerConfig) -> None:
        """Keeps the limits of rows of all plans to come within those, after memory ran out."""
        self.halvings += 1
        before = self._smaller
        self._smaller = (
            smaller if before is None else limited(smaller, before.max_tokens_per_microbatch, before.max_graph_tokens)
        )
        self.max_tokens = self._smaller.max_tokens_per_microbatch

    def metrics(self) -> dict[str, float]:
        """Rows of a microbatch, and how often memory ran out since the last call."""
        ran_out, self._logged = self.halvings - self._logged, self.halvings
        return {"max_tokens_per_microbatch": float(self.max_tokens), "out_of_memory": float(ran_out)}

    def _agreed(self) -> Budget:
        with self._ranks.together():
            own = measured_budget(self._trainer)
        limits = (own.max_tokens, own.max_graph_tokens, own.max_handoff_bytes)
        # Which of them are None depends on settings alone, the same everywhere.
        smallest = [min(column) for column in zip(*self._ranks.gather(*(n or 0 for n in limits)), strict=True)]
        agreed = [None if mine is None else found for mine, found in zip(limits, smallest, strict=True)]
        found = Budget(
            max_tokens=smallest[0], max_graph_tokens=agreed[1], max_handoff_bytes=agreed[2], reason=own.reason
        )
        _logger.info("tree_max_tokens_per_microbatch: %s rows (%s)", f"{found.max_tokens:,}", found.reason)
        return found


class FittingUpdate(TreeUpdate):
    """An update that is begun again, once and with half the rows, where memory runs out in it; so is scoring.

    Half of the limit, or of the largest microbatch that ran where the limit was larger than that.

    Gradients, what TRL logs, and attributes of the trainer become what they were before, so that the result is that of
    an update which had been planned so. State of one's own that a loss changes in place is not brought back.

    Args:
        budgets: of the training.
        trainer: what a loss may change.
        more: of :class:`TreeUpdate`.
    """

    def __init__(self, *args: Any, budgets: TreeBudgets, trainer: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._budgets, self._trainer = budgets, trainer

    def run(self, *args: Any, **kwargs: Any) -> UpdateReport:
        """See :meth:`TreeUpdate.run`.

        Raises:
            torch.OutOfMemoryError: memory ran out again, or where the processes cannot begin again.
        """
        before = _Before(self._trainer, self.model) if self.ranks.can_begin_again else None
        run = super().run
        return self._twice(lambda: run(*args, **kwargs), before)

    def scored(self, *args: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor], KeptScores]:
        """See :meth:`TreeUpdate.scored`.

        Raises:
            torch.OutOfMemoryError: memory ran out again, or where the processes cannot begin again.
        """
        scored = super().scored
        return self._twice(lambda: scored(*args, **kwargs), None)

    def _twice(self, work: Callable[[], Found], before: "_Before | None") -> Found:
        rows = self.planner.config.max_tokens_per_microbatch
        try:
            return work()
        except Exception as error:
            everywhere = self.ranks.ran_out(error)
            if not self._budgets.begins_again:
                raise
            smaller = self._smaller(with_graphs=before is not None) if everywhere else None
            if smaller is None:
                if is_out_of_memory(error):
                    raise torch.OutOfMemoryError(f"{error}\n{self._why_not()}") from error
                raise
            said = str(error).partition("\n")[0]
        # Here, since the error's traceback held the tensors of the step.
        if before is not None:
            before.restore()
        clear_device_cache(garbage_collection=True)
        self._use(smaller)
        warnings.warn(
            f"memory ran out with {rows:,} rows a microbatch ({said}): what ran is begun again with "
            f"{smaller.max_tokens_per_microbatch:,}, and so are the steps to come",
            HartsWarning,
            stacklevel=4,
        )
        try:
            return work()
        except Exception as error:
            self.ranks.ran_out(error)
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(
                    f"{error}\nexpected memory for {smaller.max_tokens_per_microbatch:,} rows a microbatch after it "
                    f"had run out with {rows:,} in the same step, got none: {_HELP}"
                ) from error
            raise

    def _smaller(self, *, with_graphs: bool) -> PlannerConfig | None:
        """Half of the limits, or of what ran within them where that was less; a collective.

        None where nothing can be halved.
        """
        config = self.planner.config
        if self.planned is not None:
            config = limited_to(config, self.planned.schedule, with_graphs=with_graphs)
        # Windows differ where each rank plans its own.
        most = self.ranks.agree(config.max_tokens_per_microbatch, config.max_graph_tokens or 0)
        return halved(limited(self.planner.config, most[0], most[1] or None))

    def _use(self, smaller: PlannerConfig) -> None:
        self.planner = replace(self.planner, config=smaller)
        self._budgets.shrink(smaller)

    def _why_not(self) -> str:
        rows = self.planner.config.max_tokens_per_microbatch
        if self.ranks.can_begin_again and self.ranks.count == 1:
            return f"expected memory for {rows:,} rows a microbatch, which cannot be halved, got none: {_HELP}"
        reason = (
            "in the step's last backward, while gradients are reduced"
            if self.ranks.can_begin_again
            else "where processes share parameters or gradients (FSDP2, DeepSpeed)"
        )
        return (
            f"expected memory for {rows:,} rows a microbatch, got none; the step cannot be begun again {reason}, "
            f"since the others wait in a collective: start from the last checkpoint with "
            f"tree_max_tokens_per_microbatch={rows // 2}, or {_HELP}"
        )


_HELP = (
    "set gradient_checkpointing, a smaller tree_max_graph_tokens or tree_max_handoff_bytes, tree_offload_handoff, "
    "another tree_execution than 'keep' (which has the graphs of all rows alive, whatever the limits), or an "
    "optimizer with smaller states"
)


class _Before:
    """What an update may change, as it was before.

    Gradients that are there already (Trainer has none when a step begins) are copied to the CPU, since backwards add
    to them in place.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self._trainer = trainer
        self._gradients = [
            (parameter, None if parameter.grad is None else parameter.grad.to("cpu", copy=True))
            for parameter in walking.parameters(model)
            if parameter.requires_grad
        ]
        self._attributes = dict(vars(trainer))
        self._metrics = {
            mode: {name: list(values) for name, values in metrics.items()} for mode, metrics in _metrics_of(trainer)
        }

    def restore(self) -> None:
        """Once."""
        for parameter, gradient in self._gradients:
            if gradient is None:
                parameter.grad = None
            else:
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)
        now = vars(self._trainer)
        for name in now.keys() - self._attributes.keys():
            del now[name]
        now.update(self._attributes)
        for mode, metrics in _metrics_of(self._trainer):
            metrics.clear()
            metrics.update(self._metrics[mode])


def _metrics_of(trainer: Any) -> list[tuple[str, dict[str, list[float]]]]:
    return list(trainer._metrics.items())
