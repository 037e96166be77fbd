"""What a verdict consists of: figures, their limits, and whether each is within its."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from harts_hf.verify.ways import Way


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
    """Gradient errors of a kind of parameter, pooled over layers and draws.

    They are relative to the reference's RMS, or where that is lost in roundings, to the size of what was summed.

    Attributes:
        kind: see :func:`harts_hf.verify.kinds.parameter_kinds`.
        num_tensors: parameters of the kind.
        way: the one of the judged ways that is nearer to its limit; the ratios below are its.
        errors: by way of computing; of "expanded, rounded" what roundings at random do, where that was worked out.
        ratio: the tree's error over the baseline's.
        limit: of the ratio.
        worst: the parameter whose own ratio is largest.
        worst_ratio: that ratio.
    """

    kind: str
    num_tensors: int
    way: Way
    errors: dict[Way, float]
    ratio: float
    limit: float
    worst: str
    worst_ratio: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Everything that was compared.

    Attributes:
        reference: what errors are differences from: the oracle or, without one, the expanded computation.
        differences: of log-probs from the expanded computation's, by way of computing.
        errors: of log-probs from the oracle's, by way of computing; empty without one.
        kinds: gradient errors.
        checks: what the verdict rests on.
    """

    reference: Literal["oracle", "expanded"]
    differences: dict[Way, Difference]
    errors: dict[Way, Difference]
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
