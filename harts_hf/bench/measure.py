"""Seconds of an optimizer step through each trainer, one after another in turns, with what explains them."""

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from harts_hf.bench import sides
from harts_hf.bench.clipping import Clipping, measure_clipping
from harts_hf.bench.collapsing import collapse
from harts_hf.bench.comparing import Comparison
from harts_hf.bench.ideal import Ideal, Work, ideal_step, microbatch_constant
from harts_hf.bench.parity import Parity, judge_whole
from harts_hf.bench.results import BASELINES, BenchOptions, StepMeasured, Timed
from harts_hf.bench.sides import COLLAPSED, PACKED, TREE, BenchStep, Setting, Side, build_side
from harts_hf.bench.stages import StageClock


def measure_step(
    step: BenchStep, options: BenchOptions, progress: Callable[[str], None] = lambda text: None
) -> StepMeasured:
    """Tries every side's settings, takes the fastest of each, and times these in turns.

    Args:
        step: what all trainers train; the model's parameters stay as they are.
        options: what is measured.
        progress: is told what is done at the moment.

    Raises:
        ValueError, UnsupportedModelError: what the tree trainer refuses; no setting of the tree, or of any baseline,
            that runs.
    """
    return _Bench(step, options, progress).run()


class _Bench:
    def __init__(self, step: BenchStep, options: BenchOptions, progress: Callable[[str], None]) -> None:
        self.step, self.options, self.progress = step, options, progress
        parameter = next(step.model.parameters())
        self.device = parameter.device
        self._dtype = torch.bfloat16 if step.args.bf16 else parameter.dtype
        self.chosen: dict[str, Side] = {}
        self.timed: dict[str, Timed] = {}
        self.failures: dict[str, str] = {}
        self.microbatch_seconds: dict[str, float] = {}
        self.decision = ""
        self._once: set[str] = set()  # kinds that were timed when they were tried

    def run(self) -> StepMeasured:
        # What the tree refuses, before stock trainers have run for minutes; the smallest size, since that is refused.
        build_side(self.options.settings(TREE, self.step.rollouts)[0], self.step)
        for kind in (kind for kind in sides.KINDS if kind in self.options.kinds):
            self._choose(kind)
        needed = [[TREE]]
        if not self.options.baseline_elsewhere:
            needed.append([kind for kind in BASELINES if kind != COLLAPSED])
        for kinds in needed:
            if not any(kind in self.chosen for kind in kinds):
                raise ValueError(f"expected a setting of {', '.join(kinds)} that runs, got {self.failures}")
        parity = self._parity()
        goes_on = parity.passed or self.options.times_anyway
        if goes_on:
            for number in range(self.options.steps):
                for kind, side in self.chosen.items():
                    if kind in self._once:
                        continue
                    done = self.timed[kind].seconds
                    wanted = min(self.options.steps_of.get(kind, self.options.steps), self.options.steps)
                    if not done or (len(done) < wanted and sum(done) < self.options.seconds_per_side):
                        self.progress(f"step {number + 1} of {self.options.steps}: {side.setting.label}")
                        self._time(side, self.timed[kind])
            parity = replace(parity, failures=[*parity.failures, *self._whole_steps()])
            goes_on = parity.passed or self.options.times_anyway
        if not goes_on:
            for timed in self.timed.values():
                timed.seconds, timed.phases_of_steps = [], []
        clippings = self._clippings()
        ideals = self._ideals() if goes_on and self.options.stages else {}
        return StepMeasured(
            rollouts=self.step.rollouts, sides=self.timed, failures=self.failures, parity=parity, ideals=ideals,
            microbatch_seconds=self.microbatch_seconds, clippings=clippings, decision=self.decision,
        )  # fmt: skip

    def _parity(self) -> Parity:
        part = replace(self.step, rollouts=self.step.rollouts.part(self.options.parity_tokens))
        comparison = Comparison(part, own_routes=self.options.own_routes, progress=self.progress)
        chosen = [side.setting for side in self.chosen.values()]
        return comparison.verdict(chosen, max(self.options.budgets), self._dtype)

    def _whole_steps(self) -> list[str]:
        """What timed steps say of one another: the comparison before them may be of a part of the trajectories."""
        rows = self.timed[TREE].rows_per_batch  # means of other batches are others
        alike = [timed for kind, timed in self.timed.items() if kind not in sides.STOCK_KINDS]
        logs = {timed.setting.label: timed.log for timed in alike if timed.rows_per_batch == rows}
        return judge_whole(logs, self._dtype)

    def _choose(self, kind: str) -> None:
        """The fastest setting of a kind, by one step after a first that compiles."""
        settings = self.options.settings(kind, self.step.rollouts)
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
            self._collect()
            if seconds < best:
                best, timed.setting, self.chosen[kind] = seconds, setting, side
                timed.rows_per_batch = side.rows_per_batch
            elif kind in sides.STOCK_KINDS:
                break  # larger batches pad more
        if kind in self.chosen and timed is not None:
            self.timed[kind] = timed
        elif timed is not None:
            self.failures[kind] = "; ".join(f"{label}: {why}" for label, why in timed.tried.items())

    def _try(self, setting: Setting, timed: Timed, *, again: bool) -> tuple[Side, float]:
        side = build_side(setting, self.step)
        if self.step.optimizer is None:
            side.trainer.create_optimizer()
            self.step = replace(self.step, optimizer=side.trainer.optimizer)
        options = self.options
        if options.stages and options.stages_when_tried and setting.kind in (PACKED, COLLAPSED) and not again:
            self._time_stages(side, timed)
            if side.clock.seconds > options.once_above:
                self._note(side, timed)
                self._once.add(setting.kind)
        else:
            side.step()
        first = side.clock.seconds
        if side.clock.report is not None:
            timed.microbatches[setting.label] = len(side.clock.report.window.schedule.microbatches)
        if again and first < self.options.seconds_per_side:
            side.step()
        side.clock.report = None
        return side, side.clock.seconds

    def _time(self, side: Side, timed: Timed) -> None:
        side.step()
        self._note(side, timed)
        side.clock.report = None

    @staticmethod
    def _note(side: Side, timed: Timed) -> None:
        """The side's last step as a timed one."""
        clock = side.clock
        timed.seconds.append(clock.seconds)
        timed.phases_of_steps.append(clock.phases)
        if clock.peak_memory is not None:
            timed.peak_memory = max(timed.peak_memory or 0, clock.peak_memory)
        if clock.clocks:
            timed.clocks.append(clock.clocks)
        timed.log = {name: side.log[name] for name in ("loss", "grad_norm", "entropy") if name in side.log}
        timed.clip_fraction = side.log.get("clip_ratio/region_mean")

    def _ideals(self) -> dict[str, Ideal]:
        for kind in (PACKED, COLLAPSED, TREE):
            if kind in self.chosen and self.timed[kind].work is None:
                self.progress(f"stages of {self.chosen[kind].setting.label}")
                self._time_stages(self.chosen[kind], self.timed[kind])
                self.chosen[kind].clock.report = None
        found = {}
        tree = self.timed[TREE]
        for kind in (PACKED, COLLAPSED):
            if kind in self.timed:
                timed = self.timed[kind]
                ran = [label for label, value in timed.tried.items() if not isinstance(value, str)]
                constant = self.options.microbatch_seconds.get(kind, 0.0)
                if len(ran) > 1:
                    constant = microbatch_constant(
                        [timed.microbatches[label] for label in ran],
                        [timed.tried[label] for label in ran],  # type: ignore[misc]
                    )
                self.microbatch_seconds[kind] = constant
                assert timed.work is not None and tree.work is not None
                found[kind] = ideal_step(timed.phases, timed.stages, constant, timed.work, tree.work)
        return found

    def _time_stages(self, side: Side, timed: Timed) -> None:
        # What TRL scores before the step is a phase of its own.
        stages = StageClock(self.device, counts=lambda: not side.clock.is_preparing)
        with stages.watching():
            side.step()
        timed.stages = stages.seconds()
        schedule = side.clock.report.window.schedule
        rollouts = self.step.rollouts
        expanded, unique = rollouts.num_labels
        if schedule.tree.num_tokens == rollouts.num_tokens:  # nothing is shared
            labels = expanded
        elif side.setting.kind == COLLAPSED:
            labels = rollouts.labels_on(collapse(rollouts.tree))
        else:
            labels = unique
        timed.work = Work.of(schedule, labels, stages.attention_area)
        if side.setting.kind == TREE:
            self.decision = schedule.decision

    def _clippings(self) -> dict[str, Clipping]:
        """What recorded log-probs, and those that each side scored, say about one another."""
        if not self.step.old_log_probs:
            return {}
        scored = {kind: side.trainer.old_log_probs for kind, side in self.chosen.items()}
        return measure_clipping(self.step.rollouts, scored, TREE, epsilon=self.step.args.epsilon)

    def _forget(self) -> None:
        """After a step that ran out of memory."""
        self.step.model.zero_grad(set_to_none=True)
        self._collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _collect(self) -> None:
        """Trainers are cycles: those that were not chosen would keep tables on the GPU."""
        if self.device.type == "cuda":
            gc.collect()
