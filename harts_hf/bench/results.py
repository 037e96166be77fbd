"""What is measured, and what was: options of a benchmark, figures of its sides."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harts_hf.bench import sides
from harts_hf.bench.clipping import Clipping
from harts_hf.bench.clock import PHASES
from harts_hf.bench.collapsing import is_contained
from harts_hf.bench.ideal import Ideal, Work
from harts_hf.bench.parity import Parity
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import COLLAPSED, PACKED, SORTED, STOCK, TREE, Setting

BASELINES = (STOCK, SORTED, PACKED, COLLAPSED)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured.

    Attributes:
        budgets: tokens of a microbatch that sides without padding are tried with.
        batch_sizes: rows of a batch that stock trainers are tried with.
        slice_rows: rows of a batch that sides without padding are tried with; empty for those of
            :func:`harts_hf.bench.sides.rows_at_once`.
        kinds: sides; the tree is always one.
        steps: timed steps of each chosen side, at least 1.
        steps_of: by kind, fewer of them.
        seconds_per_side: a side whose timed steps took so long is not timed again.
        fixed: by kind, the one size that it is run with, such as what was fastest on an earlier step.
        baseline_elsewhere: whether other steps are timed with a baseline. Then the tree may be the only side; it is
            compared with the one without sharing all the same.
        parity_tokens: sides are compared on so many tokens of trajectories at most.
        microbatch_seconds: by kind, what each microbatch takes whatever is in it, as an earlier step told: where a
            kind is tried with one size only, that cannot be measured.
        times_anyway: whether steps are timed although sides did not train the same; whoever reads the result has to
            look at its verdict.
        stages: whether to time attention, the rule and the head, in one more step of the tree and of each baseline.
        stages_when_tried: whether that step of a baseline is the one in which its size was tried: for long ones, once
            their kernels are compiled.
        once_above: seconds; a baseline whose such step took longer is not timed again, and that step is its timed
            one. Noting stages changes its time by 1 % at most, as far as was seen.
        own_routes: whether mixtures of experts are also compared with routers that choose for themselves.

    Raises:
        ValueError: empty choices, unknown kinds, no baseline, numbers below 1.
    """

    budgets: tuple[int, ...] = (8192, 16384, 32768, 65536)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    slice_rows: tuple[int, ...] = ()
    kinds: tuple[str, ...] = (*BASELINES, TREE)
    steps: int = 5
    steps_of: Mapping[str, int] = field(default_factory=dict)
    seconds_per_side: float = 120.0
    fixed: Mapping[str, int] = field(default_factory=dict)
    baseline_elsewhere: bool = False
    parity_tokens: int = 65536
    microbatch_seconds: Mapping[str, float] = field(default_factory=dict)
    times_anyway: bool = False
    stages: bool = True
    stages_when_tried: bool = False
    once_above: float = math.inf
    own_routes: bool = True

    def __post_init__(self) -> None:
        for name in ("budgets", "batch_sizes"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"expected {name} to be numbers of at least 1, got {values}")
        if min(self.slice_rows, default=1) < 1:
            raise ValueError(f"expected slice_rows to be numbers of at least 1, got {self.slice_rows}")
        unknown = [kind for kind in self.kinds if kind not in sides.KINDS]
        if unknown:
            raise ValueError(f"expected sides among {', '.join(sides.KINDS)}, got {', '.join(unknown)}")
        compared = self.baseline_elsewhere or set(self.kinds) & {STOCK, SORTED, PACKED}
        if TREE not in self.kinds or not compared:
            raise ValueError(
                f"expected {TREE} and at least one of {STOCK}, {SORTED}, {PACKED} among the sides, got "
                f"{', '.join(self.kinds) or 'none'}"
            )
        if self.steps < 1:
            raise ValueError(f"expected at least one timed step, got {self.steps}")
        if self.parity_tokens < 1:
            raise ValueError(f"expected at least one token to compare, got {self.parity_tokens}")
        if not self.seconds_per_side > 0:
            raise ValueError(f"expected seconds per side above 0, got {self.seconds_per_side}")

    def settings(self, kind: str, rollouts: StepRollouts) -> list[Setting]:
        """What a side is tried with; budgets past what holds all rows are no different."""
        if kind == COLLAPSED and not is_contained(rollouts.tree).any():
            return []
        count = len(rollouts.token_ids)
        if kind in sides.STOCK_KINDS:
            batches = [self.fixed[kind]] if kind in self.fixed else sorted({min(s, count) for s in self.batch_sizes})
            return [Setting(kind=kind, size=size) for size in batches]
        budgets = [self.fixed[kind]] if kind in self.fixed else sorted(set(self.budgets))
        most = rollouts.tree.num_tokens if kind == TREE else rollouts.num_tokens
        enough = next((budget for budget in budgets if budget >= most), budgets[-1])
        rows: list[int | None] = [*sorted({min(s, count) for s in self.slice_rows})] or [None]
        return [Setting(kind=kind, size=size, rows=one) for size in budgets if size <= enough for one in rows]


@dataclass(eq=False, kw_only=True)
class Timed:
    """What was measured of one chosen side.

    Attributes:
        setting: the fastest that was tried.
        rows_per_batch: that its trainer had.
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
        log: ``loss``, ``grad_norm`` and ``entropy`` of the latest timed step, as the trainer logged them.
    """

    setting: Setting
    rows_per_batch: int = 0
    seconds: list[float] = field(default_factory=list)
    phases_of_steps: list[dict[str, float]] = field(default_factory=list)
    peak_memory: int | None = None
    clocks: list[dict[str, float]] = field(default_factory=list)
    tried: dict[str, float | str] = field(default_factory=dict)
    microbatches: dict[str, int] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    work: Work | None = None
    clip_fraction: float | None = None
    log: dict[str, float] = field(default_factory=dict)

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
        microbatch_seconds: by the same baselines, what each microbatch takes whatever is in it.
        clippings: of old log-probs from elsewhere; empty if there are none.
        decision: the planner's, in its words.
    """

    rollouts: StepRollouts
    sides: dict[str, Timed]
    failures: dict[str, str]
    parity: Parity
    ideals: dict[str, Ideal]
    microbatch_seconds: dict[str, float]
    clippings: dict[str, Clipping]
    decision: str


def fastest(timed: dict[str, Timed], kinds: Sequence[str]) -> Timed | None:
    """Of some kinds, the one of the smallest median; None if none of them ran."""
    found = [timed[kind] for kind in kinds if kind in timed]
    return min(found, key=lambda one: one.median, default=None)
