"""Whether all sides trained the same: sketches of gradients (:mod:`harts_hf.bench.sketching`), and what they say.

So gradients of any model are compared without a second copy of them.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from harts_hf.bench.sketching import sketch_of

BUCKETS = 256
_PACKED = "packed"  # how names of sides without sharing begin
ROUNDED = ", rounded again"  # behind the name of a side whose layers' answers were rounded once more
# Kernels of another kind may move the gradient by this much of what rounding every layer's answer once more does to
# it. Seen on tiny models of all families: 0.6 to 1.6 in bfloat16, 1.2 to 2.3 in float32.
KERNEL_FACTOR = 3.0
# Sharing may move it by this much of what other microbatches do to the same kernels without sharing. Seen on a whole
# model in bfloat16: 1.0 to 2.8.
SHARING_FACTOR = 4.0
# Both are allowed so much in any case.
FLOORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# A gradient that roundings alone move by more is nothing but roundings (equal trajectories), and no measure.
CEILINGS = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.1}
# Of the mean entropy of trained tokens.
ENTROPY = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# A wrong scale moves all parameters alike, roundings each in its own direction: how far the median ratio of a
# parameter's norms may be from 1, of other kernels and of sharing. Seen on tiny models of all families in bfloat16,
# three seeds each, whose gradients roundings move by up to 20 %: 2.1 % and 0.4 %.
SCALES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
SHARING_SCALES = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}
# Of the norms of whole steps, where routers choose for themselves.
WHOLE_NORMS = {torch.float32: 2e-2, torch.bfloat16: 0.2, torch.float16: 0.2}
# On the same routes, routers choose otherwise only where two experts are nearly equal: at most so many choices.
FLIPS = {torch.float32: 1e-2, torch.bfloat16: 0.12, torch.float16: 0.05}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step of one side came to.

    Attributes:
        sketch: by parameter ``[BUCKETS]`` float64, of the gradient that the optimizer got, times what clipping divided
            it by.
        grad_norm: before clipping; None where the trainer does not say.
        loss: as logged.
        entropy: mean over trained tokens.
    """

    sketch: Mapping[str, torch.Tensor]
    grad_norm: float | None
    loss: float
    entropy: float


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The verdict.

    Attributes:
        reference: the side that others are compared with: stock TRL where it is run, else the one without sharing.
        differences: of every other side, relative to the reference: ``gradients`` (by sketches), ``scale``
            (:func:`scale_off`), ``grad_norm``, ``entropy``. One of them is the reference itself with its layers'
            answers rounded once more (:data:`ROUNDED`), if that is stock TRL.
        from_packed: gradients of the sides of this package relative to the first without sharing: the same kernels, so
            that sharing alone differs, or the microbatches.
        limits: of ``gradients``, ``scale``, ``entropy``, ``sharing``, ``sharing_scale`` and ``flips``.
        failures: what is over its limit, of the tree and of baselines; empty if nothing.
        tokens: that were compared, of how many trajectories.
        trajectories: see ``tokens``.
        routes: ``"own"``, or ``"same"`` where all sides were told which experts to take
            (:mod:`harts_hf.bench.same_routes`).
        flips: on the same routes, by side, the part of all choices that its routers would have made otherwise.
        own_routes: on the same routes, the differences if every router chooses for itself.
        scales_from_packed: of the same sides as ``from_packed``, :func:`scale_off`.
    """

    reference: str
    differences: dict[str, dict[str, float]]
    from_packed: dict[str, float]
    limits: dict[str, float]
    failures: list[str]
    tokens: int
    trajectories: int
    routes: str = "own"
    flips: dict[str, float] = field(default_factory=dict)
    own_routes: dict[str, dict[str, float]] = field(default_factory=dict)
    scales_from_packed: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """The verdict."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"passed": self.passed, **asdict(self)}


def sketch_gradients(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """``[BUCKETS]`` float64 by trainable parameter, on the CPU; the same signs for the same seed and device."""
    found = {}
    for number, (name, parameter) in enumerate((n, p) for n, p in model.named_parameters() if p.requires_grad):
        gradient = torch.zeros(1) if parameter.grad is None else parameter.grad
        found[name] = sketch_of(gradient, buckets=BUCKETS, seed=seed + number)
    return found


def relative_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Of two sketches, over the second, all parameters together.

    NaN if there is one or both are zero; infinite if the second is.
    """
    apart = sum(float((one[name] - other[name]).square().sum()) for name in other)
    size = sum(float(values.square().sum()) for values in other.values())
    if size == 0:
        return math.nan if apart == 0 else math.inf
    return math.sqrt(apart / size)


def scale_off(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """How far the median over parameters of the ratio of two sketches' norms is from 1; NaN if all are zero."""
    sizes = [(float(one[name].norm()), float(values.norm())) for name, values in other.items()]
    ratios = [size / own for size, own in sizes if own]
    return abs(statistics.median(ratios) - 1) if ratios else math.nan


def differences_of(results: Mapping[str, StepResult], reference: str) -> dict[str, dict[str, float]]:
    """Of all other sides, relative to the reference."""
    return {name: _differences(result, results[reference]) for name, result in results.items() if name != reference}


def judge(
    differences: Mapping[str, Mapping[str, float]],
    from_packed: Mapping[str, float],
    flips: Mapping[str, float],
    dtype: torch.dtype,
    *,
    reference: str,
    scales: Mapping[str, float] | None = None,
) -> tuple[dict[str, float], list[str]]:
    """Limits, and what is over them.

    Args:
        differences: as :class:`Parity` has them; kernels are judged where the rounded reference is among them.
        from_packed: likewise; a side without sharing among them is the measure of what sharing may do.
        flips: likewise.
        dtype: that the model computes in.
        reference: the side of ``differences``.
        scales: ``scales_from_packed``, likewise; None where they are not known.
    """
    known = dtype if dtype in FLOORS else torch.bfloat16
    # None where all trajectories fit into the smallest microbatch.
    half = next((value for name, value in from_packed.items() if name.startswith(_PACKED)), 0.0)
    limits = {
        "entropy": ENTROPY[known],
        "flips": FLIPS[known],
        "scale": SCALES[known],
        "sharing_scale": SHARING_SCALES[known],
        "sharing": max(SHARING_FACTOR * half, FLOORS[known]),
    }
    failures = []
    for name, one in differences.items():
        if name.endswith(ROUNDED):
            limits["gradients"] = max(KERNEL_FACTOR * one["gradients"], FLOORS[known])
            limits["scale"] = max(KERNEL_FACTOR * one.get("scale", 0.0), SCALES[known])
            if not one["gradients"] <= CEILINGS[known]:
                failures.append(
                    f"rounding once more behind each layer moves the gradient of {reference} by "
                    f"{one['gradients']:.2e}, at most {CEILINGS[known]:.0e} expected: it is nothing but roundings"
                )
            if one["gradients"] == 0:
                failures.append(f"rounding once more behind each layer does not move the gradient of {reference}")
    for name, one in differences.items():
        for what in ("gradients", "scale", "entropy"):
            if what in limits and what in one and not name.endswith(ROUNDED) and not one[what] <= limits[what]:
                most = f"at most {limits[what]:.2e} expected"
                failures.append(f"{what} of {name} differ from {reference}'s by {one[what]:.2e}, {most}")
    if not half <= CEILINGS[known]:
        failures.append(
            f"smaller microbatches move the gradient without sharing by {half:.2e}, at most "
            f"{CEILINGS[known]:.0e} expected: it is nothing but roundings"
        )
    failures += [
        f"sharing moves the gradient of {name} by {value:.2e}, at most {limits['sharing']:.2e} expected"
        for name, value in from_packed.items()
        if not name.startswith(_PACKED) and not value <= limits["sharing"]
    ]
    failures += [
        f"sharing moves the scale of the gradient of {name} by {value:.2e}, at most "
        f"{limits['sharing_scale']:.2e} expected"
        for name, value in (scales or {}).items()
        if not name.startswith(_PACKED) and not value <= limits["sharing_scale"]
    ]
    failures += [
        f"routers of {name} would choose {part:.1%} of the experts otherwise, given the same before them, at most "
        f"{limits['flips']:.1%} expected"
        for name, part in flips.items()
        if not part <= limits["flips"]
    ]
    return limits, failures


def judge_whole(logs: Mapping[str, Mapping[str, float]], dtype: torch.dtype) -> list[str]:
    """What whole steps of sides with the same batches have logged, where only a part of them was compared.

    Routers choose for themselves there, so gradients may be far apart, and norms may be by :data:`WHOLE_NORMS`. It is
    a coarse check: trajectories that are missing or counted twice show.

    Args:
        logs: by side, ``grad_norm`` and ``entropy``; others are compared with the first.
        dtype: that the model computes in.
    """
    known = dtype if dtype in FLOORS else torch.bfloat16
    first = next(iter(logs), "")
    return [
        f"{what} of the timed step of {name} differs from {first}'s by {apart:.2e}, at most {limit:.0e} expected"
        for name, log in logs.items()
        for what, limit in (("grad_norm", WHOLE_NORMS[known]), ("entropy", ENTROPY[known]))
        if not (apart := relative(log.get(what), logs[first].get(what))) <= limit
    ]


def _differences(one: StepResult, other: StepResult) -> dict[str, float]:
    return {
        "gradients": relative_difference(one.sketch, other.sketch),
        "scale": scale_off(one.sketch, other.sketch),
        "grad_norm": relative(one.grad_norm, other.grad_norm),
        "entropy": relative(one.entropy, other.entropy),
    }


def relative(one: float | None, other: float | None) -> float:
    """How far two numbers are apart, over the second; 0 if one of them is not known."""
    if one is None or other is None or one == other:
        return 0.0
    return abs(one - other) / abs(other) if other else math.inf
