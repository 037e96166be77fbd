"""What a microbatch costs: a linear model of its work, with coefficients of a machine (NumPy only).

The defaults describe Ling-3.0-tiny (1.3 B active, 18 KDA + 6 MLA layers, bf16) on an H200: rows from 2.6 GFLOP each at
about 500 TFLOP/s, pairs from the measured 37.3 ms of the attention table in docs/planner.md, bytes from the layers'
shapes. `harts bench --fit-cost` fits them to a machine and a model; the file that it writes is read by
:meth:`CostModel.load` and given as ``PlannerConfig(cost=...)``. Nothing is read from anywhere else, so that every rank
plans with what it was given.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

FORMAT = "harts_hf.cost"
VERSION = 2
_SIZES = {
    "handoff_bytes_per_row": 1e18,
    "handoff_bytes_per_state": 1e18,
    "gradient_part_of_row": 1.0,
    "gradient_part_of_state": 1.0,
}
FEATURES = ("rows", "linear_rows", "pairs", "calls", "handoff_bytes", "microbatches")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one microbatch does.

    Attributes:
        rows: network rows.
        linear_rows: rows of the linear layers, replay included.
        pairs: query-key pairs of full attention, handed keys included.
        calls: sequential calls of the linear rule.
        handoff_bytes: bytes of boundary states read.
        microbatches: 1.
    """

    rows: float = 0
    linear_rows: float = 0
    pairs: float = 0
    calls: float = 0
    handoff_bytes: float = 0
    microbatches: float = 1


@dataclass(frozen=True, kw_only=True)
class UnitSeconds:
    """Seconds per unit of each kind of work, in one direction."""

    rows: float
    linear_rows: float
    pairs: float
    calls: float
    handoff_bytes: float
    microbatches: float

    def seconds(self, work: Work) -> float:
        """Time of one pass over ``work``."""
        return float(sum(getattr(self, name) * getattr(work, name) for name in FEATURES))

    def seconds_of_rows(self, rows: int, pairs: float) -> float:
        """Time of ``rows`` that pass through all layers once and see ``pairs`` keys, without calls or handoffs."""
        return (self.rows + self.linear_rows) * rows + self.pairs * pairs


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of the ops of a schedule and bytes of boundary states.

    Attributes:
        forward: of the ops S and F.
        backward: of the op B.
        handoff_bytes_per_row: of one handed row, all full-attention layers, gradient included.
        handoff_bytes_per_state: of one boundary of all linear layers: state, replayed rows, gradients.
        gradient_part_of_row: the part of a row's bytes that is gradient, from 0 to 1; gradients live shorter than
            values.
        gradient_part_of_state: the same of a boundary.
        source: where the coefficients come from.

    Raises:
        ValueError: a value that is negative, not finite, above its range, or no number.
    """

    forward: UnitSeconds = UnitSeconds(
        rows=3.3e-6, linear_rows=0.9e-6, pairs=0.125e-9, calls=0.5e-3, handoff_bytes=1e-12, microbatches=3e-3
    )
    backward: UnitSeconds = UnitSeconds(
        rows=6.6e-6, linear_rows=2.4e-6, pairs=0.315e-9, calls=1e-3, handoff_bytes=3e-12, microbatches=6e-3
    )
    handoff_bytes_per_row: float = 20_736
    handoff_bytes_per_state: float = 56e6
    gradient_part_of_row: float = 2 / 3
    gradient_part_of_state: float = 1 / 2
    source: str = "default: Ling-3.0-tiny on an H200"

    def seconds(self, kind: str, work: Work) -> float:
        """Time of op ``kind`` ("S", "F" or "B") on ``work``."""
        return (self.backward if kind == "B" else self.forward).seconds(work)

    def step(self, forwards: int = 2) -> UnitSeconds:
        """Of ``forwards`` forwards and one backward together."""
        return UnitSeconds(**{n: forwards * getattr(self.forward, n) + getattr(self.backward, n) for n in FEATURES})

    def step_parts(self, forwards: int = 2) -> tuple[UnitSeconds, UnitSeconds]:
        """The same as two parts: all forwards, and the backward."""
        return UnitSeconds(**{n: forwards * getattr(self.forward, n) for n in FEATURES}), self.backward

    def __post_init__(self) -> None:
        for name, highest in _SIZES.items():
            if not _is_number(getattr(self, name), highest):
                raise ValueError(f"expected {name} between 0 and {highest:g}, got {getattr(self, name)!r}")
        for direction in ("forward", "backward"):
            unit_seconds = getattr(self, direction)
            if not isinstance(unit_seconds, UnitSeconds):
                raise ValueError(f"expected UnitSeconds as {direction}, got {unit_seconds!r}")
            if not all(_is_number(value, 1e18) for value in vars(unit_seconds).values()):
                raise ValueError(
                    f"expected coefficients of at least 0 in {direction} (and at most 1e+18), got {unit_seconds}"
                )
        if not isinstance(self.source, str):
            raise ValueError(f"expected source to be text, got {self.source!r}")

    def to_dict(self) -> dict[str, Any]:
        """The model as what JSON can hold, versioned."""
        sizes = {name: _plain(getattr(self, name)) for name in _SIZES}
        directions = {
            name: {feature: _plain(getattr(getattr(self, name), feature)) for feature in FEATURES}
            for name in ("forward", "backward")
        }
        return {"format": FORMAT, "version": VERSION, **directions, **sizes, "source": self.source}

    @classmethod
    def from_dict(cls, content: object) -> "CostModel":
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: another format or version, a missing or unknown key, a bad coefficient.
        """
        if not isinstance(content, dict) or not is_version(content, FORMAT, VERSION):
            raise ValueError(f"expected a cost model of format {FORMAT!r}, version {VERSION}, got {str(content)[:80]}")
        values = {name: value for name, value in content.items() if name not in ("format", "version")}
        expected = {f.name for f in fields(cls)}
        if set(values) != expected:
            raise ValueError(f"expected the keys {sorted(expected)} in a cost model, got {sorted(values)}")
        for direction in ("forward", "backward"):
            given = values[direction]
            if not isinstance(given, dict) or set(given) != set(FEATURES):
                raise ValueError(f"expected the coefficients {', '.join(FEATURES)} in {direction}, got {given}")
            values[direction] = UnitSeconds(**given)
        return cls(**values)

    def to_json(self) -> str:
        """The model as versioned JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "CostModel":
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: text that is no JSON, and what :meth:`from_dict` raises.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected a cost model as JSON, got text that is none: {error}") from None
        return cls.from_dict(content)

    def save(self, path: str | Path) -> None:
        """Writes :meth:`to_json` to ``path``."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "CostModel":
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: there is no such file, or it holds no cost model.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"expected a cost model that harts bench --fit-cost wrote, got {str(path)!r}: {error}"
            ) from error


def is_version(content: dict[str, Any], name: str, version: int) -> bool:
    """Whether JSON says that it is of a format and version."""
    given = content.get("version")
    return content.get("format") == name and type(given) is int and given == version  # True is no version


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: object, highest: float) -> bool:
    is_real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return bool(is_real and 0 <= value <= highest)  # type: ignore[operator]  # False for NaN


DEFAULT_COST = CostModel()
Rows = TypeVar("Rows", int, NDArray[np.int64])


def causal_pairs(rows: Rows) -> Rows:
    """Query-key pairs of paths of ``rows`` from their roots: a row of depth ``d`` sees ``d + 1`` keys."""
    return rows * (rows + 1) // 2


def fit_unit_seconds(works: Sequence[Work], seconds: Sequence[float]) -> UnitSeconds:
    """Coefficients, none negative, that explain measured times with the smallest sum of squared relative errors.

    Args:
        works: at least one per coefficient, differing in every kind of work that is to be told apart.
        seconds: measured time of each, above 0.

    Raises:
        ValueError: fewer measurements than coefficients, or a time that is not positive.
    """
    if len(works) != len(seconds) or len(works) < len(FEATURES):
        raise ValueError(
            f"expected a time for each of at least {len(FEATURES)} works, got {len(works)} and {len(seconds)}"
        )
    if not all(0 < value < float("inf") for value in seconds):
        raise ValueError("expected times above 0")
    table = np.array([[getattr(work, name) for name in FEATURES] for work in works], np.float64)
    solution = nonnegative_fit(table / np.asarray(seconds, np.float64)[:, None])
    return UnitSeconds(**dict(zip(FEATURES, solution.tolist(), strict=True)))


def nonnegative_fit(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of ``table @ x`` to 1, no entry of ``x`` below 0, with columns brought to one scale.

    Args:
        table: ``[rows, units]``; of relative errors, each row is divided by what was measured.
    """
    scale = np.abs(table).max(axis=0)
    scale[scale == 0] = 1.0
    return _nonnegative_least_squares(table / scale, np.ones(len(table))) / scale


def _nonnegative_least_squares(table: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23."""
    count = table.shape[1]
    solution, passive = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        gradient = table.T @ (target - table @ solution)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-10:
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(table[:, passive], target, rcond=None)[0]
            if (trial[passive] > 0).all():
                break
            blocked = passive & (trial <= 0)
            step = float((solution[blocked] / (solution[blocked] - trial[blocked])).min())
            solution = solution + step * (trial - solution)
            passive &= solution > 1e-15
            if not passive.any():
                break
        solution = trial
    return solution
