"""From measured log-probs and gradient errors to a verdict, with stated limits."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harts_hf.verify.figures import Check, Difference, KindErrors, Verdict
from harts_hf.verify.roundings import ROUNDING_PER_MOVE
from harts_hf.verify.ways import AGAIN, BATCHED, EXPANDED, JUDGED, ORACLE, ROUNDED, Way

# The tree's RMS error may be this much of the expanded computation's, beyond what the scatter between the draws may
# do: Student's t at 99.9 %, one-sided, by the number of draws less one ...
POOLED_FACTOR = 1.1
STUDENT_T = (math.inf, 318.3, 22.3, 10.2, 7.17, 5.89, 5.21, 4.79, 4.50, 4.30, 4.14, 4.02, 3.93, 3.85, 3.79, 3.73)
# ... and at most this much, as may that of any single parameter.
SINGLE_FACTOR = 4.0
# A log-prob of the tree and of the expanded computation may differ by this much of the latter's own variation and
# error (two independent errors of one size differ by 1.4 of it).
RMS_FACTOR, LARGEST_FACTOR = 2.0, 4.0
# Relative gradient errors that arithmetic is allowed in any case, in units of the dtype's epsilon: a rounding of the
# result, and without an oracle the errors against float64 that were seen in tiny models of all families.
ROUNDING_UNITS, ROUNDING_UNITS_WITHOUT_ORACLE = 0.5, 100.0
# Transformers' float32 rule itself is off by this much in these gradients, sums that nearly cancel: without an oracle
# a difference from it says nothing below.
DECAY_KINDS, DECAY_ERROR_WITHOUT_ORACLE = ("A_log", "dt_bias", "linear attention gates"), 0.05


@dataclass(eq=False, kw_only=True)
class LogProbs:
    """Log-probs of every draw.

    Attributes:
        values: by way of computing, ``[P]`` float64 per draw; of all ways but "expanded, rounded" and "oracle", and of
            the latter if there is one.
        changes: mean squares of what :class:`~harts_hf.verify.roundings.RandomRoundings` change in them, per draw;
            empty if that is not known.
    """

    values: dict[Way, list[torch.Tensor]] = field(default_factory=dict)
    changes: list[float] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class GradientErrors:
    """Errors of one parameter's gradient, summed over its entries.

    Attributes:
        kind: see :func:`harts_hf.verify.kinds.parameter_kinds`.
        squares: the reference's squares, per draw.
        errors: squared differences from the reference, by way of computing, per draw.
        changes: squares of what :class:`~harts_hf.verify.roundings.RandomRoundings` change in it, per draw; empty if
            that is not known.
    """

    kind: str
    squares: list[float] = field(default_factory=list)
    errors: dict[Way, list[float]] = field(default_factory=dict)
    changes: list[float] = field(default_factory=list)


def judge(log_probs: LogProbs, gradients: Mapping[str, GradientErrors], *, epsilon: float, num_layers: int) -> Verdict:
    """Compares the tree with the expanded computation.

    Args:
        log_probs: of every draw.
        gradients: errors by parameter.
        epsilon: of the dtype that the model computes in.
        num_layers: of the model.
    """
    has_oracle = ORACLE in log_probs.values
    joined = {way: torch.cat(parts) for way, parts in log_probs.values.items()}
    differences = {way: _difference(joined[way], joined[EXPANDED]) for way in (AGAIN, BATCHED, *JUDGED)}
    against_oracle = (EXPANDED, BATCHED, *JUDGED) if has_oracle else ()
    errors = {way: _difference(joined[way], joined[ORACLE]) for way in against_oracle}
    # Each layer rounds; without an oracle nothing else tells how much of that reaches the end.
    size = joined[EXPANDED].square().mean().sqrt().item()
    rounding = max(epsilon * math.sqrt(num_layers) * size, math.sqrt(_mean(_roundings(log_probs.changes))))
    checks = _log_prob_checks(differences, errors, rounding)
    if has_oracle:
        checks += _log_prob_error_checks(log_probs, size)
    baseline: Way = EXPANDED if has_oracle else BATCHED
    pooled = []
    for kind in dict.fromkeys(one.kind for one in gradients.values()):
        of_kind = {name: one for name, one in gradients.items() if one.kind == kind}
        floor = _allowed_error(kind, epsilon, has_oracle=has_oracle)
        judged = [_kind_errors(kind, way, of_kind, baseline, floor, epsilon) for way in JUDGED]
        for one in judged:
            name = f"gradients of {kind} on the {one.way}: RMS error over {baseline}'s"
            checks.append(Check(name=name, value=one.ratio, limit=one.limit))
            name = f"gradient of {one.worst} on the {one.way}"
            checks.append(Check(name=name, value=one.worst_ratio, limit=SINGLE_FACTOR))
        pooled.append(max(judged, key=lambda one: math.inf if math.isnan(one.ratio) else one.ratio / one.limit))
    return Verdict(
        reference=ORACLE if has_oracle else EXPANDED,
        differences=differences,
        errors=errors,
        kinds=tuple(pooled),
        checks=tuple(checks),
    )


def _allowed_error(kind: str, epsilon: float, *, has_oracle: bool) -> float:
    """A relative error that is never counted against the tree."""
    if has_oracle:
        return ROUNDING_UNITS * epsilon
    rounding = ROUNDING_UNITS_WITHOUT_ORACLE * epsilon
    return max(rounding, DECAY_ERROR_WITHOUT_ORACLE) if kind in DECAY_KINDS else rounding


def _log_prob_checks(
    differences: dict[Way, Difference], errors: dict[Way, Difference], rounding: float
) -> list[Check]:
    """The tree's differences from expanded against the expanded computation's own variation and error."""
    own = [differences[AGAIN], differences[BATCHED], *([errors[EXPANDED]] if errors else [])]
    # The largest of thousands of normal errors is about four RMS ones.
    largest = max(*(one.largest for one in own), 4 * rounding)
    rms = max(*(one.rms for one in own), rounding)
    checks = []
    for way in JUDGED:
        found, name = differences[way], f"log-probs of the {way}"
        checks += [
            Check(name=f"{name}: RMS difference from expanded", value=found.rms, limit=RMS_FACTOR * rms),
            Check(
                name=f"{name}: largest difference from expanded", value=found.largest, limit=LARGEST_FACTOR * largest
            ),
        ]
    return checks


def _log_prob_error_checks(log_probs: LogProbs, size: float) -> list[Check]:
    """The tree's errors against the oracle's log-probs, of RMS ``size``, over the expanded computation's."""
    values = log_probs.values
    # Log-probs are float32 or wider: half a unit in their last place is nobody's error.
    floor = max((torch.finfo(torch.float32).eps / 2 * size) ** 2, sys.float_info.min)
    floors = [floor] * len(values[ORACLE])
    squared = {
        way: [_mean_square(a, b) for a, b in zip(values[way], values[ORACLE], strict=True)]
        for way in (EXPANDED, *JUDGED)
    }
    checks = []
    for way in JUDGED:
        ratio, limit = _ratio(squared[way], squared[EXPANDED], floors, _roundings(log_probs.changes))
        checks.append(Check(name=f"log-probs of the {way}: RMS error over expanded's", value=ratio, limit=limit))
    return checks


def _kind_errors(
    kind: str, way: Way, gradients: Mapping[str, GradientErrors], baseline: Way, floor: float, epsilon: float
) -> KindErrors:
    pooled = _pooled(kind, list(gradients.values()))
    relative = _relative(pooled, epsilon)
    ratio, limit = _gradient_ratio(pooled, way, baseline, floor, epsilon)
    single = {name: _gradient_ratio(one, way, baseline, floor, epsilon)[0] for name, one in gradients.items()}
    worst = max(single, key=lambda name: math.inf if math.isnan(single[name]) else single[name])
    return KindErrors(
        kind=kind,
        num_tensors=len(gradients),
        way=way,
        errors={one: math.sqrt(_mean(draws)) for one, draws in relative.items()},
        ratio=ratio,
        limit=limit,
        worst=worst,
        worst_ratio=single[worst],
    )


def _pooled(kind: str, gradients: Sequence[GradientErrors]) -> GradientErrors:
    """All entries of several parameters taken for one."""
    return GradientErrors(
        kind=kind,
        squares=_sums([one.squares for one in gradients]),
        errors={way: _sums([one.errors[way] for one in gradients]) for way in gradients[0].errors},
        changes=_sums([one.changes for one in gradients]),
    )


def _gradient_ratio(
    gradient: GradientErrors, way: Way, baseline: Way, floor: float, epsilon: float
) -> tuple[float, float]:
    relative = _relative(gradient, epsilon)
    floors = [floor**2] * len(gradient.squares)
    return _ratio(relative[way], relative[baseline], floors, relative.get(ROUNDED, []))


def _relative(gradient: GradientErrors, epsilon: float) -> dict[Way, list[float]]:
    """Squared errors over the square of the gradient's scale, per draw, and those of roundings where known.

    The scale is the reference itself. But if moving every number by epsilon changes it by more than that, it is zero
    in theory, or lost: then the scale is the change over epsilon, the size of what was summed.
    """
    scales = gradient.squares
    errors = dict(gradient.errors)
    if gradient.changes:
        errors[ROUNDED] = _roundings(gradient.changes)
        scales = [
            square if square > change else change / epsilon**2
            for square, change in zip(scales, gradient.changes, strict=True)
        ]
    return {
        way: [
            error / scale if scale else (0.0 if error == 0 else math.inf)
            for error, scale in zip(draws, scales, strict=True)
        ]
        for way, draws in errors.items()
    }


def _ratio(
    tree: Sequence[float], baseline: Sequence[float], floors: Sequence[float], roundings: Sequence[float]
) -> tuple[float, float]:
    """The ratio of RMS errors over all draws, and its limit from the jackknife of that ratio over the draws.

    Args:
        tree: squared errors, per draw.
        baseline: likewise.
        floors: that are nobody's error, per draw.
        roundings: what roundings at random do, per draw, nobody's error either; empty if that is not known.
    """
    tree, baseline = _at_least(tree, floors), _at_least(baseline, floors)
    limit = _limit(tree, baseline)
    if roundings:
        tree, baseline = _at_least(tree, roundings), _at_least(baseline, roundings)
    return math.sqrt(sum(tree) / sum(baseline)), limit


def _limit(tree: Sequence[float], baseline: Sequence[float]) -> float:
    total, base, count = sum(tree), sum(baseline), len(tree)
    if count == 1 or not math.isfinite(total / base):
        return SINGLE_FACTOR
    logs = [math.log((total - a) / (base - b)) / 2 for a, b in zip(tree, baseline, strict=True)]
    mean = sum(logs) / count
    scatter = math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in logs))
    allowed = scatter * STUDENT_T[min(count, len(STUDENT_T)) - 1]
    return min(SINGLE_FACTOR, POOLED_FACTOR * math.exp(min(allowed, 10.0)))


def _roundings(changes: Sequence[float]) -> list[float]:
    """What roundings do, squared, where moves of epsilon make these squared changes."""
    return [ROUNDING_PER_MOVE**2 * change for change in changes]


def _at_least(values: Sequence[float], floors: Sequence[float]) -> list[float]:
    """The larger of each two; a NaN stays one."""
    return [max(value, floor) for value, floor in zip(values, floors, strict=True)]


def _sums(per_draw: Sequence[Sequence[float]]) -> list[float]:
    return [sum(draw) for draw in zip(*per_draw, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    return Difference(largest=(one - other).abs().max().item(), rms=math.sqrt(_mean_square(one, other)))


def _mean_square(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).square().mean().item()
