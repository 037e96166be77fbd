"""From measured log-probs and gradient errors to a verdict, with stated limits."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

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

TREE, PARTS = "tree", "tree in parts"
EXPANDED, AGAIN, BATCHED, ORACLE = "expanded", "expanded again", "expanded re-batched", "oracle"
# The ways that are judged.
JUDGED = (TREE, PARTS)
# Squared gradient errors by parameter and way of computing, and squares of the reference, one a draw.
SquaredErrors = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison that the verdict rests on.

    Attributes:
        name: what is compared.
        value: the tree's figure.
        limit: the largest that passes.
    """

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the figure is within its limit (a NaN is not)."""
        return self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest and root mean square difference of two sets of log-probs."""

    largest: float
    rms: float


@dataclass(frozen=True, kw_only=True)
class KindErrors:
    """Gradient errors of a kind of parameter, relative to the reference's RMS, pooled over layers and draws.

    Attributes:
        kind: see :func:`harts_hf.verify.kinds.parameter_kinds`.
        num_tensors: parameters of the kind.
        way: the one of the judged ways that is nearer to its limit; the ratios below are its.
        errors: by way of computing.
        ratio: the tree's error over the baseline's.
        limit: of the ratio.
        worst: the parameter whose own ratio is largest.
        worst_ratio: that ratio.
    """

    kind: str
    num_tensors: int
    way: str
    errors: dict[str, float]
    ratio: float
    limit: float
    worst: str
    worst_ratio: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Everything that was compared.

    Attributes:
        reference: what errors are differences from: "oracle" or, without one, "expanded".
        differences: of log-probs from the expanded computation's, by way of computing.
        errors: of log-probs from the oracle's, by way of computing; empty without one.
        kinds: gradient errors.
        checks: what the verdict rests on.
    """

    reference: str
    differences: dict[str, Difference]
    errors: dict[str, Difference]
    kinds: tuple[KindErrors, ...]
    checks: tuple[Check, ...]

    @property
    def failures(self) -> list[Check]:
        """Checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """The verdict."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers and strings."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {**asdict(self), "checks": checks, "passed": self.passed}


def judge(
    log_probs: dict[str, list[torch.Tensor]],
    squared_errors: SquaredErrors,
    squares: dict[str, list[float]],
    kinds: dict[str, str],
    *,
    epsilon: float,
    num_layers: int,
) -> Verdict:
    """Compares the tree with the expanded computation.

    Args:
        log_probs: by way of computing, ``[P]`` float64 a draw; with "oracle" if there is one. All ways of ``JUDGED``.
        squared_errors: sums over a parameter's entries of squared differences from the reference.
        squares: sums of the reference's squares, by parameter, a draw.
        kinds: kind of each parameter.
        epsilon: of the dtype that the model computes in.
        num_layers: of the model.
    """
    has_oracle = ORACLE in log_probs
    joined = {way: torch.cat(parts) for way, parts in log_probs.items()}
    differences = {way: _difference(joined[way], joined[EXPANDED]) for way in (AGAIN, BATCHED, *JUDGED)}
    against_oracle = (EXPANDED, BATCHED, *JUDGED) if has_oracle else ()
    errors = {way: _difference(joined[way], joined[ORACLE]) for way in against_oracle}
    # Each layer rounds; without an oracle nothing else tells how much of that reaches the end.
    size = joined[EXPANDED].square().mean().sqrt().item()
    rounding = epsilon * math.sqrt(num_layers) * size
    checks = _log_prob_checks(differences, errors, rounding)
    if has_oracle:
        # Log-probs are float32 or wider: half a unit in their last place is nobody's error.
        floor = (torch.finfo(torch.float32).eps / 2 * size) ** 2
        squared = {
            way: [max(_mean_square(a, b), floor) for a, b in zip(log_probs[way], log_probs[ORACLE], strict=True)]
            for way in (EXPANDED, *JUDGED)
        }
        for way in JUDGED:
            ratio, limit = _ratio(squared[way], squared[EXPANDED])
            checks.append(Check(name=f"log-probs of the {way}: RMS error over expanded's", value=ratio, limit=limit))
    baseline = EXPANDED if has_oracle else BATCHED
    pooled = []
    for kind in dict.fromkeys(kinds[name] for name in squared_errors):
        names = [name for name in squared_errors if kinds[name] == kind]
        floor = _allowed_error(kind, epsilon, has_oracle=has_oracle)
        judged = [_kind_errors(kind, way, names, squared_errors, squares, baseline, floor) for way in JUDGED]
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
    differences: dict[str, Difference], errors: dict[str, Difference], rounding: float
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


def _kind_errors(
    kind: str,
    way: str,
    names: Sequence[str],
    squared_errors: SquaredErrors,
    squares: dict[str, list[float]],
    baseline: str,
    floor: float,
) -> KindErrors:
    reference = [sum(draw) for draw in zip(*(squares[name] for name in names), strict=True)]
    pooled = {
        one: [sum(draw) for draw in zip(*(squared_errors[name][one] for name in names), strict=True)]
        for one in squared_errors[names[0]]
    }
    relative = {one: _relative(errors, reference, 0.0) for one, errors in pooled.items()}
    ratio, limit = _ratio(*(_relative(pooled[one], reference, floor) for one in (way, baseline)))
    single = {
        name: _ratio(*(_relative(squared_errors[name][one], squares[name], floor) for one in (way, baseline)))[0]
        for name in names
    }
    worst = max(names, key=lambda name: math.inf if math.isnan(single[name]) else single[name])
    return KindErrors(
        kind=kind,
        num_tensors=len(names),
        way=way,
        errors={way: math.sqrt(sum(draws) / len(draws)) for way, draws in relative.items()},
        ratio=ratio,
        limit=limit,
        worst=worst,
        worst_ratio=single[worst],
    )


def _relative(errors: Sequence[float], squares: Sequence[float], floor: float) -> list[float]:
    """Squared errors over the reference's squares, a draw, at least ``floor`` squared."""
    return [
        max(error / square, floor**2) if square else (floor**2 if error == 0 else math.inf)
        for error, square in zip(errors, squares, strict=True)
    ]


def _ratio(tree: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """The ratio of RMS errors over all draws, and its limit from the jackknife of that ratio over the draws."""
    total, base, count = sum(tree), sum(baseline), len(tree)
    ratio = math.sqrt(total / base)
    if count == 1 or not math.isfinite(ratio):
        return ratio, SINGLE_FACTOR
    logs = [math.log((total - a) / (base - b)) / 2 for a, b in zip(tree, baseline, strict=True)]
    mean = sum(logs) / count
    scatter = math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in logs))
    allowed = scatter * STUDENT_T[min(count, len(STUDENT_T)) - 1]
    return ratio, min(SINGLE_FACTOR, POOLED_FACTOR * math.exp(min(allowed, 10.0)))


def _difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    return Difference(largest=(one - other).abs().max().item(), rms=math.sqrt(_mean_square(one, other)))


def _mean_square(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).square().mean().item()
