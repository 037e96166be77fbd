"""Whether all sides trained the same: sketches of gradients, small enough to keep, and what they say.

A sketch adds a gradient's entries up, each with a random sign, in a few buckets. The squared difference of two
sketches is an unbiased estimate of that of the gradients (Charikar, Chen and Farach-Colton, 2002: the count
sketch), whose relative error shrinks with the number of buckets and of parameters. So gradients of any model are
compared without a second copy of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

BUCKETS = 256
_PIECE = 2**24  # entries whose signs are drawn at a time
# The tree may differ from the first baseline by this much of what baselines differ by among themselves ...
NOISE_FACTOR = 2.0
# ... or by this much of the gradient, if that is more: baselines that run alike round alike. Seen on tiny models in
# float32: up to 5e-6; in bfloat16 a rounding is 4e-3, and there are many.
FLOORS = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Baselines that differ among themselves by more than roundings could explain are no measure: what one of them has in
# common with the tree may be wrong, or the gradient zero but for roundings (equal trajectories).
CEILINGS = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.1}
# On the same routes, routers choose otherwise only where two experts are nearly equal: at most so many choices.
FLIP_CEILINGS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step of one side came to.

    Attributes:
        sketch: by parameter ``[BUCKETS]`` float64, of the gradient that the optimizer got.
        grad_norm: before clipping; None where nothing is clipped.
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
        reference: the side that others are compared with.
        differences: of every other side, relative to the reference: ``gradients`` (by sketches), ``grad_norm``,
            ``entropy``.
        limits: of the tree's.
        failures: what is over its limit, of the tree and of baselines; empty if nothing.
        routes: ``"own"``, or ``"same"`` where all sides were told which experts to take
            (:mod:`harts_hf.bench.same_routes`).
        flips: on the same routes, by side, the part of all choices that its routers would have made otherwise.
        tokens: that were compared, of how many trajectories.
        trajectories: see ``tokens``.
        from_packed: on the same routes, gradients of sides of this package relative to the first without sharing: the
            same kernels, so that sharing alone differs.
        own_routes: on the same routes, the differences of whole steps in which every router chose for itself.
    """

    reference: str
    differences: dict[str, dict[str, float]]
    limits: dict[str, float]
    failures: list[str]
    routes: str = "own"
    flips: dict[str, float] = field(default_factory=dict)
    tokens: int | None = None
    trajectories: int | None = None
    from_packed: dict[str, float] = field(default_factory=dict)
    own_routes: dict[str, dict[str, float]] = field(default_factory=dict)

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
        total = torch.zeros(BUCKETS, dtype=torch.float64, device=parameter.device)
        if parameter.grad is not None:
            generator = torch.Generator(parameter.device).manual_seed(seed + number)
            for piece in parameter.grad.detach().flatten().split(_PIECE):
                signs = torch.randint(0, 2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8)
                signed = torch.where(signs.bool(), piece, -piece).float()
                padded = torch.nn.functional.pad(signed, (0, -len(signed) % BUCKETS))
                total += padded.view(-1, BUCKETS).sum(0, dtype=torch.float64)
        found[name] = total.cpu()
    return found


def relative_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Of two sketches, over the second: all parameters together. NaN if there is one; infinite if only one is zero."""
    apart = sum(float((one[name] - other[name]).square().sum()) for name in other)
    size = sum(float(values.square().sum()) for values in other.values())
    if size == 0:
        return 0.0 if apart == 0 else math.inf
    return math.sqrt(apart / size)


def compare(results: Mapping[str, StepResult], judged: Sequence[str], dtype: torch.dtype) -> Parity:
    """The verdict on sides that trained the same rows from the same weights.

    Args:
        results: by side; the first that is not judged is the reference, the others tell what roundings do.
        judged: those that have to agree with it to twice what the others differ by; never by more than
            :data:`CEILINGS`, which nothing may.
        dtype: that the model computes in.

    Raises:
        ValueError: no side to compare with.
    """
    baselines = [name for name in results if name not in judged]
    if not baselines:
        raise ValueError("expected a baseline to compare the tree with, got none")
    differences = differences_of(results, baselines[0])
    limits, failures = judge(differences, judged, dtype, reference=baselines[0])
    return Parity(reference=baselines[0], differences=differences, limits=limits, failures=failures)


def differences_of(results: Mapping[str, StepResult], reference: str) -> dict[str, dict[str, float]]:
    """Of all other sides, relative to the reference."""
    return {name: _differences(result, results[reference]) for name, result in results.items() if name != reference}


def judge(
    differences: Mapping[str, Mapping[str, float]], judged: Sequence[str], dtype: torch.dtype, *, reference: str
) -> tuple[dict[str, float], list[str]]:
    """Limits of what is judged, and what is over its own; arguments as :func:`compare` has them."""
    baselines = [name for name in differences if name not in judged]
    known = dtype if dtype in FLOORS else torch.bfloat16
    floor, ceiling = FLOORS[known], CEILINGS[known]
    limits, failures = {}, []
    for what in ("gradients", "grad_norm", "entropy"):
        noise = max((differences[name][what] for name in baselines), default=0.0)
        limits[what] = min(max(NOISE_FACTOR * noise, floor), ceiling) if math.isfinite(noise) else floor
        failures += [
            f"{what} of {name}, which shares nothing, differ from {reference}'s by {differences[name][what]:.2e}, at "
            f"most {ceiling:.0e} expected: one of them is wrong, or the gradient is nothing but roundings"
            for name in baselines
            if not differences[name][what] <= ceiling
        ]
        failures += [
            f"{what} of {name} differ from {reference}'s by {differences[name][what]:.2e}, at most "
            f"{limits[what]:.2e} expected"
            for name in judged
            if not differences[name][what] <= limits[what]
        ]
    return limits, failures


def judge_flips(flips: Mapping[str, float], dtype: torch.dtype) -> list[str]:
    """Sides whose routers disagree with the routes of another by more than near-ties."""
    most = FLIP_CEILINGS.get(dtype, FLIP_CEILINGS[torch.bfloat16])
    return [
        f"routers of {name} would choose {part:.1%} of the experts otherwise, given the same before them, at most "
        f"{most:.1%} expected"
        for name, part in flips.items()
        if not part <= most
    ]


def _differences(one: StepResult, other: StepResult) -> dict[str, float]:
    return {
        "gradients": relative_difference(one.sketch, other.sketch),
        "grad_norm": _relative(one.grad_norm, other.grad_norm),
        "entropy": _relative(one.entropy, other.entropy),
    }


def _relative(one: float | None, other: float | None) -> float:
    if one is None or other is None or one == other:
        return 0.0
    return abs(one - other) / abs(other) if other else math.inf
