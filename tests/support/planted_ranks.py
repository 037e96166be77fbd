"""Bugs of ranks that share one forest, planted like those of :mod:`support.planted`."""

from dataclasses import replace
from typing import Any

from harts_hf.runtime import Ranks, TreeValues, passes, update
from harts_hf.runtime.ops import Mode, ops_of
from harts_hf.runtime.window import TreeWindow
from support.planted import _wrap


def coefficients_of_one_rank(monkeypatch: Any) -> None:
    """A rank runs its microbatches with the derivatives of its own losses, not of all ranks'."""
    seen: set[int] = set()

    def add_up(original: Any, values: TreeValues, ranks: Ranks) -> TreeValues:
        if ranks.index in seen:  # after the scores
            return values
        seen.add(ranks.index)
        return original(values, ranks)

    _wrap(monkeypatch, passes, "add_up_values", add_up)


def values_of_a_rank_missing(monkeypatch: Any) -> None:
    """Losses see 0 for the rows that another rank computed."""
    seen: set[int] = set()

    def add_up(original: Any, values: TreeValues, ranks: Ranks) -> TreeValues:
        if ranks.index not in seen:
            seen.add(ranks.index)
            return values
        return original(values, ranks)

    _wrap(monkeypatch, passes, "add_up_values", add_up)


def sums_of_one_rank(monkeypatch: Any) -> None:
    """A rank's losses see the sums of its own rows."""

    def add_up(original: Any, values: TreeValues, ranks: Ranks) -> TreeValues:
        return replace(original(values, ranks), sums=values.sums)

    _wrap(monkeypatch, passes, "add_up_values", add_up)


def own_trajectories_first(monkeypatch: Any) -> None:
    """Every rank takes the first trajectories of the forest for its own."""
    _wrap(monkeypatch, update, "place", lambda original, *args, **kwargs: replace(original(*args, **kwargs), first=0))


def dummies_left_out(monkeypatch: Any) -> None:
    """Ranks run their own ops alone: strings of other lengths, which backends with collectives in them hang on."""

    def without(window: TreeWindow, mode: Mode, ranks: Ranks) -> Any:
        ops, count = ops_of(window, mode, ranks)
        return [op for op in ops if op[1] >= 0], sum(op[1] >= 0 for op in ops[:count])

    from harts_hf.runtime import run

    monkeypatch.setattr(run, "ops_of", without)
