"""Seconds of an optimizer step through each trainer, one after another in turns, with what explains them."""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from harts_hf.bench import sides
from harts_hf.bench.clipping import Clipping, measure_clipping
from harts_hf.bench.clock import PHASES
from harts_hf.bench.collapsing import is_contained
from harts_hf.bench.ideal import Ideal, Work, ideal_step, microbatch_constant
from harts_hf.bench.parity import Parity, StepResult, compare, sketch_gradients
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import COLLAPSED, PACKED, SORTED, STOCK, TREE, Setting, Side, build_side
from harts_hf.bench.stages import StageClock
from harts_hf.trainers import TreeGRPOConfig

BASELINES = (STOCK, SORTED, PACKED, COLLAPSED)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured.

    Attributes:
        budgets: tokens of a microbatch that sides without padding are tried with.
        batch_sizes: rows of a batch that stock trainers are tried with.
        kinds: sides; the tree is always one.
        steps: timed steps of each chosen side, at least 1.
        seconds_per_side: a side whose timed steps took so long is not timed again.
        fixed: by kind, the one size that it is run with, such as what was fastest on an earlier step.
        old_log_probs: whether TRL scores old log-probs in each step.
        stages: whether to time attention, the rule and the head, in one more step of the tree and of each baseline.

    Raises:
        ValueError: empty choices, unknown kinds, no baseline, numbers below 1.
    """

    budgets: tuple[int, ...] = (8192, 16384, 32768, 65536)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    kinds: tuple[str, ...] = (*BASELINES, TREE)
    steps: int = 5
    seconds_per_side: float = 120.0
    fixed: Mapping[str, int] = field(default_factory=dict)
    old_log_probs: bool = False
    stages: bool = True

    def __post_init__(self) -> None:
        for name in ("budgets", "batch_sizes"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"expected {name} to be numbers of at least 1, got {values}")
        unknown = [kind for kind in self.kinds if kind not in sides.KINDS]
        if unknown:
            raise ValueError(f"expected sides among {', '.join(sides.KINDS)}, got {', '.join(unknown)}")
        if TREE not in self.kinds or not set(self.kinds) & {STOCK, SORTED, PACKED}:
            raise ValueError(
                f"expected {TREE} and at least one of {STOCK}, {SORTED}, {PACKED} among the sides, got "
                f"{', '.join(self.kinds) or 'none'}"
            )
        if self.steps < 1:
            raise ValueError(f"expected at least one timed step, got {self.steps}")

    def settings(self, kind: str, rollouts: StepRollouts) -> list[Setting]:
        """What a side is tried with; budgets past what holds all rows are no different."""
        if kind == COLLAPSED and not is_contained(rollouts.tree).any():
            return []
        if kind in self.fixed:
            return [Setting(kind=kind, size=self.fixed[kind])]
        if kind in sides.STOCK_KINDS:
            return [Setting(kind=kind, size=size) for size in self.batch_sizes if size <= len(rollouts.token_ids)]
        budgets = sorted(set(self.budgets))
        most = rollouts.tree.num_tokens if kind == TREE else rollouts.num_tokens
        enough = next((budget for budget in budgets if budget >= most), budgets[-1])
        return [Setting(kind=kind, size=budget) for budget in budgets if budget <= enough]


@dataclass(eq=False, kw_only=True)
class Timed:
    """What was measured of one chosen side.

    Attributes:
        setting: the fastest that was tried.
        seconds: of its timed steps.
        phases_of_steps: seconds of each of them by phase.
        peak_memory: bytes on the GPU, the most of any timed step; None on a CPU.
        clocks: of the GPU, after each timed step.
        tried: seconds by the label of every setting; a text where it failed.
        microbatches: of every setting that was tried, by label; empty of stock trainers.
        stages: seconds by stage; empty if they were not asked for, or of stock trainers.
        work: of one pass; None of stock trainers.
        clip_fraction: part of trained tokens whose ratio TRL clipped, as logged; the weights have not moved, so only
            roundings clip. None where nothing is compared.
    """

    setting: Setting
    seconds: list[float] = field(default_factory=list)
    phases_of_steps: list[dict[str, float]] = field(default_factory=list)
    peak_memory: int | None = None
    clocks: list[dict[str, float]] = field(default_factory=list)
    tried: dict[str, float | str] = field(default_factory=dict)
    microbatches: dict[str, int] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    work: Work | None = None
    clip_fraction: float | None = None

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def phases(self) -> dict[str, float]:
        """Median seconds of each phase."""
        return {name: statistics.median(step[name] for step in self.phases_of_steps) for name in PHASES}


@dataclass(frozen=True, eq=False, kw_only=True)
class StepMeasured:
    """Everything about one step's rollouts.

    Attributes:
        rollouts: of the step.
        sides: by kind; a kind without a setting that ran is missing.
        failures: of such kinds, why.
        parity: whether all trained the same.
        ideals: by baseline without padding, where stages were timed.
        clippings: of old log-probs from elsewhere; empty if there are none.
        decision: the planner's, in its words.
    """

    rollouts: StepRollouts
    sides: dict[str, Timed]
    failures: dict[str, str]
    parity: Parity
    ideals: dict[str, Ideal]
    clippings: dict[str, Clipping]
    decision: str


def measure_step(
    model: nn.Module,
    rollouts: StepRollouts,
    args: TreeGRPOConfig,
    tokenizer: Any,
    options: BenchOptions,
    progress: Callable[[str], None] = lambda text: None,
) -> StepMeasured:
    """Tries every side's settings, takes the fastest of each, and times these in turns.

    Args:
        model: unpatched, on its device; its parameters stay as they are.
        rollouts: of the step.
        args: of all trainers: :func:`harts_hf.bench.sides.common_arguments`.
        tokenizer: of the trainers.
        options: what is measured.
        progress: is told what is done at the moment.

    Raises:
        ValueError, UnsupportedModelError: what the tree trainer refuses; no setting of the tree, or of any baseline,
            that runs.
    """
    return _Bench(model, rollouts, args, tokenizer, options, progress).run()


class _Bench:
    def __init__(
        self,
        model: nn.Module,
        rollouts: StepRollouts,
        args: TreeGRPOConfig,
        tokenizer: Any,
        options: BenchOptions,
        progress: Callable[[str], None],
    ) -> None:
        self.model, self.rollouts, self.args, self.tokenizer = model, rollouts, args, tokenizer
        self.options, self.progress = options, progress
        self.device = next(model.parameters()).device
        self.optimizer: Any = None
        self.chosen: dict[str, Side] = {}
        self.timed: dict[str, Timed] = {}
        self.results: dict[str, StepResult] = {}
        self.failures: dict[str, str] = {}
        self.decision = ""

    def run(self) -> StepMeasured:
        for kind in (kind for kind in sides.KINDS if kind in self.options.kinds):
            self._choose(kind)
        for kinds in ([TREE], [kind for kind in BASELINES if kind != COLLAPSED]):
            if not any(kind in self.chosen for kind in kinds):
                raise ValueError(f"expected a setting of {', '.join(kinds)} that runs, got {self.failures}")
        judged = [name for name in self.results if name.startswith(TREE)]
        dtype = torch.bfloat16 if self.args.bf16 else next(self.model.parameters()).dtype
        parity = compare(self.results, judged, dtype)
        if parity.passed:
            for number in range(self.options.steps):
                for kind, side in self.chosen.items():
                    if sum(self.timed[kind].seconds) < self.options.seconds_per_side or not self.timed[kind].seconds:
                        self.progress(f"step {number + 1} of {self.options.steps}: {side.setting.label}")
                        self._time(side, self.timed[kind])
        clippings = self._clippings()
        ideals = self._ideals() if parity.passed and self.options.stages else {}
        return StepMeasured(
            rollouts=self.rollouts, sides=self.timed, failures=self.failures, parity=parity, ideals=ideals,
            clippings=clippings, decision=self.decision,
        )  # fmt: skip

    def _choose(self, kind: str) -> None:
        """The fastest setting of a kind, by one step after a first that compiles and is compared."""
        settings = self.options.settings(kind, self.rollouts)
        timed, best = None, float("inf")
        for setting in settings:
            timed = timed or Timed(setting=setting)
            self.progress(f"trying {setting.label}")
            try:
                side, seconds = self._try(setting, timed, again=len(settings) > 1)
            except torch.OutOfMemoryError as error:
                timed.tried[setting.label] = f"out of memory: {str(error).splitlines()[0]}"
                self._forget()
                continue
            timed.tried[setting.label] = seconds
            if seconds < best:
                best, timed.setting, self.chosen[kind] = seconds, setting, side
            elif kind in sides.STOCK_KINDS:
                break  # larger batches pad more
        if kind in self.chosen and timed is not None:
            self.timed[kind] = timed
        elif timed is not None:
            self.failures[kind] = "; ".join(f"{label}: {why}" for label, why in timed.tried.items())

    def _try(self, setting: Setting, timed: Timed, *, again: bool) -> tuple[Side, float]:
        side = build_side(
            setting, self.model, self.rollouts, self.args, self.tokenizer, optimizer=self.optimizer,
            old_log_probs=self.options.old_log_probs,
        )  # fmt: skip
        if self.optimizer is None:
            side.trainer.create_optimizer()
            self.optimizer = side.trainer.optimizer
        sketches: list[dict[str, torch.Tensor]] = []
        side.clock.on_gradients = lambda: sketches.append(sketch_gradients(side.trainer.model))
        log = side.step()
        side.clock.on_gradients = None
        first = side.clock.seconds
        # TRL's means over a batch's rows depend on which rows are in it, so batches of one row are compared.
        if setting.kind not in sides.STOCK_KINDS or setting.size == 1 or not self.results:
            self.results[setting.label] = StepResult(
                sketch=sketches[0], grad_norm=log.get("grad_norm"), loss=log["loss"], entropy=log["entropy"]
            )
        if side.clock.report is not None:
            timed.microbatches[setting.label] = len(side.clock.report.window.schedule.microbatches)
        if again and first < self.options.seconds_per_side:
            side.step()
        return side, side.clock.seconds

    def _time(self, side: Side, timed: Timed) -> None:
        log = side.step()
        clock = side.clock
        timed.seconds.append(clock.seconds)
        timed.phases_of_steps.append(clock.phases)
        if clock.peak_memory is not None:
            timed.peak_memory = max(timed.peak_memory or 0, clock.peak_memory)
        if clock.clocks:
            timed.clocks.append(clock.clocks)
        timed.clip_fraction = log.get("clip_ratio/region_mean")

    def _ideals(self) -> dict[str, Ideal]:
        for kind in (PACKED, COLLAPSED, TREE):
            if kind in self.chosen:
                self.progress(f"stages of {self.chosen[kind].setting.label}")
                self._time_stages(self.chosen[kind], self.timed[kind])
        found = {}
        tree = self.timed[TREE]
        for kind in (PACKED, COLLAPSED):
            if kind in self.timed:
                timed = self.timed[kind]
                ran = [label for label, value in timed.tried.items() if not isinstance(value, str)]
                constant = microbatch_constant(
                    [timed.microbatches[label] for label in ran],
                    [timed.tried[label] for label in ran],  # type: ignore[misc]
                )
                assert timed.work is not None and tree.work is not None
                found[kind] = ideal_step(timed.phases, timed.stages, constant, timed.work, tree.work)
        return found

    def _time_stages(self, side: Side, timed: Timed) -> None:
        stages = StageClock(self.device)
        with stages.watching():
            side.step()
        timed.stages = stages.seconds()
        expanded, unique = self.rollouts.num_labels
        schedule = side.clock.report.window.schedule
        shares = schedule.tree.num_tokens < self.rollouts.num_tokens and side.setting.kind == TREE
        timed.work = Work.of(schedule, unique if shares else expanded, stages.attention_area)
        if side.setting.kind == TREE:
            self.decision = schedule.decision
        side.clock.report = None

    def _clippings(self) -> dict[str, Clipping]:
        """What recorded log-probs, and those that each side scored, say about one another."""
        if not self.options.old_log_probs:
            return {}
        scored = {kind: side.trainer.old_log_probs for kind, side in self.chosen.items()}
        return measure_clipping(self.rollouts, scored, TREE, epsilon=self.args.epsilon)

    def _forget(self) -> None:
        """After a step that ran out of memory."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def fastest(timed: dict[str, Timed], kinds: Sequence[str]) -> Timed | None:
    """Of some kinds, the one of the smallest median; None if none of them ran."""
    found = [timed[kind] for kind in kinds if kind in timed]
    return min(found, key=lambda one: one.median, default=None)
