"""Whether all sides train the same: a step of each on some or all trajectories, and the verdict on their gradients.

In a mixture of experts a rounding may make a router choose another expert, and then gradients of right kernels have
little in common. There all sides are told which experts to take (:mod:`harts_hf.bench.same_routes`).
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from harts_hf.bench import sides
from harts_hf.bench.parity import (
    ROUNDED,
    Parity,
    StepResult,
    differences_of,
    judge,
    relative_difference,
    scale_off,
    sketch_gradients,
)
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.same_routes import ReplayInStock, RoundedAgain, record_routes
from harts_hf.bench.sides import COLLAPSED, PACKED, TREE, BenchStep, Setting, Side, build_side, rows_at_once
from harts_hf.modeling import find_routers
from harts_hf.trainers.slicing import depends_on_slices
from harts_hf.trainers.weighing import trained

SMALLEST = 64  # tokens of a microbatch
_FLIPS = "tree/engine_routing_flips"


class Comparison:
    """Steps of all sides on the same rows and weights.

    Args:
        step: that is compared.
        own_routes: whether mixtures of experts are also compared with routers that choose for themselves.
        progress: is told what is done at the moment.
    """

    def __init__(
        self,
        step: BenchStep,
        *,
        own_routes: bool = True,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.step, self.own_routes, self.progress = step, own_routes, progress

    def verdict(self, chosen: Sequence[Setting], budget: int, dtype: torch.dtype) -> Parity:
        """The verdict.

        Args:
            chosen: what is timed: stock trainers are compared if they are among these.
            budget: of a microbatch of this package's sides that are not.
            dtype: that the model computes in.
        """
        in_rows = depends_on_slices(self.step.args) is not None
        known = self.step.rollouts
        settings = settings_compared(chosen, known, budget, in_rows=in_rows)
        own: dict[str, dict[str, float]] = {}
        if find_routers(self.step.model):
            tree = next(setting for setting in settings if setting.kind == TREE)
            if self.own_routes:
                kinds = {one.kind: one for one in reversed(settings) if one.kind in (PACKED, TREE)}
                once = list(dict.fromkeys([settings[0], *reversed(kinds.values())]))
                free = {setting.label: self._step(setting, known)[0] for setting in once}
                own = differences_of(free, once[0].label)
            self.progress("noting routes")
            known = record_routes(self.step, size=tree.size)
        results: dict[str, StepResult] = {}
        flips: dict[str, float] = {}
        for setting in settings:
            results[setting.label], part = self._step(setting, known)
            flips |= {} if part is None else {setting.label: part}
            if setting is settings[0] and setting.kind in sides.STOCK_KINDS:
                results[setting.label + ROUNDED], _ = self._step(setting, known, rounded=True)
        packed = results[next(setting.label for setting in settings if setting.kind == PACKED)]
        from_packed = {
            name: relative_difference(result.sketch, packed.sketch)
            for name, result in results.items()
            if name.startswith((PACKED, COLLAPSED, TREE)) and result is not packed
        }
        scales = {name: scale_off(results[name].sketch, packed.sketch) for name in from_packed}
        reference = settings[0].label
        differences = differences_of(results, reference)
        limits, failures = judge(differences, from_packed, flips, dtype, reference=reference, scales=scales)
        return Parity(
            reference=reference, differences=differences, from_packed=from_packed, limits=limits, failures=failures,
            tokens=known.num_tokens, trajectories=len(known.token_ids),
            routes="own" if known.routes is None else "same", flips=flips, own_routes=own,
            scales_from_packed=scales,
        )  # fmt: skip

    def _step(
        self, setting: Setting, rollouts: StepRollouts, *, rounded: bool = False
    ) -> tuple[StepResult, float | None]:
        """What a step came to, and the part of its routers' choices that would be others than told."""
        routes = rollouts.routes
        on = "" if routes is None else " on the same routes"
        self.progress(f"comparing {setting.label}{ROUNDED * rounded}{on}")
        side = build_side(setting, replace(self.step, rollouts=rollouts))
        # On a copy of the modules that is dropped with the side.
        replay = None
        if routes is not None and setting.kind in sides.STOCK_KINDS:
            replay = ReplayInStock(side.trainer.model, rollouts.token_ids, routes)
        if rounded:
            RoundedAgain(side.trainer.model)
        result = compared_step(side)
        flips = None if routes is None else side.log[_FLIPS] if replay is None else replay.flips
        del side, replay
        gc.collect()  # trainers are cycles, with tables on the GPU
        return result, flips


def kinds_compared(kinds: Sequence[str], *, routed: bool, own_routes: bool = True) -> list[str]:
    """Of each step that a verdict takes, at most, the kind of the side that makes it.

    Args:
        kinds: that are timed.
        routed: whether the model is a mixture of experts.
        own_routes: as for :class:`Comparison`.
    """
    stock = [kind for kind in sides.STOCK_KINDS if kind in kinds]
    # Stock TRL is also rounded again, without sharing and the tree are cut in half.
    found = [*stock, *stock[:1], PACKED, PACKED, TREE, TREE, *(kind for kind in kinds if kind == COLLAPSED)]
    if routed:
        found += [*([*stock[:1], PACKED, TREE] if own_routes else []), TREE]  # the last notes the routes
    return found


def compared_step(side: Side) -> StepResult:
    """One step, and what it came to."""
    sketches: list[dict[str, torch.Tensor]] = []
    entropies: list[float] = []

    def looked() -> None:
        sketches.append(sketch_gradients(side.trainer.model))
        entropies.append(entropy_of(side.trainer))

    side.clock.on_gradients = looked
    try:
        log = side.step()
    finally:
        side.clock.on_gradients = None
    norm, most = log.get("grad_norm"), side.trainer.args.max_grad_norm
    # Clipped to one norm, gradients of different scales would be equal; undone here, clipping is compared, too.
    clipped_by = max(1.0, norm / most) if norm is not None and most else 1.0
    sketch = {name: values * clipped_by for name, values in sketches[0].items()}
    return StepResult(sketch=sketch, grad_norm=norm, loss=log["loss"], entropy=entropies[0])


def entropy_of(trainer: Any) -> float:
    """Mean entropy of a step's trained tokens, before it is logged: TRL logs the mean of its batches' means."""
    means = trainer._metrics["train"]["entropy"]
    tokens = [float(trained(batch).sum()) for batch in trainer._buffered_inputs]
    return sum(mean * count for mean, count in zip(means, tokens, strict=True)) / sum(tokens)


def settings_compared(
    chosen: Sequence[Setting], rollouts: StepRollouts, budget: int, *, in_rows: bool = False
) -> list[Setting]:
    """Every side that was chosen; without padding, and the tree, in one microbatch or few and in half as large ones.

    Rows that fill a batch up change the advantages' scale, so stock trainers are compared in batches of one row, the
    others in one batch.

    Args:
        chosen: what is timed.
        rollouts: that are compared.
        budget: of a microbatch of this package's sides that are not timed.
        in_rows: whether all are compared in batches of one row, since the loss depends on which rows are in one.
    """
    size_of = {setting.kind: setting.size for setting in chosen}
    stock = [Setting(kind=kind, size=1) for kind in sides.STOCK_KINDS if kind in size_of]
    found = []
    batch = 1 if in_rows or rows_at_once(rollouts) < len(rollouts.token_ids) else None
    for kind, tokens in ((PACKED, rollouts.num_tokens), (TREE, rollouts.tree.num_tokens)):
        size = max(SMALLEST, min(size_of.get(kind, budget), tokens))
        found += [Setting(kind=kind, size=one, rows=batch) for one in (size, max(SMALLEST, size // 2))]
    if COLLAPSED in size_of:
        found.append(replace(found[0], kind=COLLAPSED))
    return [*stock, *dict.fromkeys(found)]
