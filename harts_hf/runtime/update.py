"""One update on rollout trees: plan, score, loss and backward, for any loss of what a tree forward answers."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from harts_hf.modeling import LABEL_VALUES, LOG_PROB, WITHOUT_GRADIENT
from harts_hf.runtime.leaves import check_reach, collect, placeholders, spread
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.run import RunOptions, WindowRun
from harts_hf.runtime.values import TreeValues
from harts_hf.runtime.window import TreeWindow
from harts_hf.tree import IntArray

Slice = TypeVar("Slice")
Leaves = Mapping[str, torch.Tensor]
Index = Mapping[str, NDArray[np.int64]]
# Whether a loss's derivatives can be known before what they are taken by is: see TreeUpdate.run.
Unscored = Literal["always", "never", "probe"]


class SliceRows(Protocol):
    """The trajectories of a slice, and where its values lie on them."""

    def trajectories(self) -> list[IntArray]:
        """Those that have something to score; may be none."""

    def stand_in(self) -> IntArray:
        """One that is run if no slice of an update has any, so that every parameter still gets its zero gradient."""

    def index(self, paths: Sequence[IntArray]) -> Index:
        """For each name of a value per row, in any shape, the row of the tree; -1 where nothing is asked for.

        Args:
            paths: rows of the tree of each of :meth:`trajectories`, ``[L]``.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class UpdateReport:
    """What an update did.

    Attributes:
        loss: the sum of the slices' losses, detached.
        window: what was planned and run.
        limits_raised: whether a limit of the plan could not be kept.
        scoring_skipped: whether the scoring pass of a cut plan was left out. (A window of one microbatch has none: its
            one forward scores and trains.)
        scoring_needed_by: what made one necessary; None where nothing did.
        recompute_difference: the largest difference of a log-prob computed again from its score.
        seconds: of ``planning``, ``scoring``, ``backward``.
    """

    loss: torch.Tensor
    window: TreeWindow
    limits_raised: bool
    scoring_skipped: bool
    scoring_needed_by: str | None
    recompute_difference: float
    seconds: dict[str, float] = field(default_factory=dict)


class TreeUpdate:
    """Computes slices of trajectories together: each token they share once, with the gradients of the slices' losses.

    Args:
        model: patched, wrapped or not.
        planner: limits of the plan.
        options: how forwards run.
        ranks: the processes of the training.
        device: where windows are computed; where the model's first parameter is if None.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: WindowPlanner,
        options: RunOptions | None = None,
        *,
        ranks: Ranks | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.model, self.planner, self.options = model, planner, options or RunOptions()
        self.ranks = ranks or Ranks()
        self.device = next(model.parameters()).device if device is None else device

    def score(self, rows: SliceRows, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Values of one slice in the shapes of its index, without gradients."""
        window, (index,) = self._plan(self.planner, [rows])
        scores = self._run(window, "score").score(names)
        return {name: spread(scores.rows[name], index[name]) for name in names}

    def run(
        self,
        slices: Sequence[Slice],
        rows_of: Callable[[Slice], SliceRows],
        loss: Callable[[Slice, Leaves], torch.Tensor],
        *,
        names: tuple[str, ...] = LABEL_VALUES,
        unscored: Unscored = "never",
        reason: str = "loss",
        probing: Callable[[], AbstractContextManager[object]] = nullcontext,
        loss_device: torch.device | str | None = None,
    ) -> UpdateReport:
        """The gradient of the sum of the slices' losses, added to the parameters' gradients.

        Args:
            slices: whatever ``rows_of`` and ``loss`` understand; at least one. They are taken in order.
            rows_of: the trajectories of a slice and where its values lie on them, as a :class:`SliceRows`.
            loss: of a slice and its values (by name, in the shapes of its index) a scalar. Sums are those of the whole
                window, the same for every slice: a loss of several slices takes its own part of them. It may be called
                several times for a slice, the last time on true values.
            names: of the values and sums that the loss reads.
            unscored: whether the loss's derivatives can be known without the values: "always", where they depend on
                none (supervised training); "never"; or "probe", where they are believed not to, which is then tried on
                placeholders. If they can be, and the plan is cut, in the nested execution and one process, the scoring
                pass is left out.
            reason: why they cannot be, for the report, where ``unscored`` is "never".
            probing: entered around calls of the loss whose value nobody wants.
            loss_device: where the values that the loss gets lie; where windows are computed if None. Losses of a few
                numbers per token are faster on the CPU than by a hundred launches each.

        Raises:
            ValueError: no slices, a name that the slices' index lacks, sums on several processes, a loss that
                reaches trainable tensors other than its values or depends on none of them, trajectories that cannot be
                planned; after the backward, a loss with ``unscored="always"`` whose derivatives depend on values.
        """
        if not slices:
            raise ValueError("expected at least one slice, got none")
        if isinstance(names, str) or unscored not in get_args(Unscored):
            raise ValueError(
                f"expected a tuple of names and unscored to be one of {', '.join(get_args(Unscored))}, got {names!r} "
                f"and {unscored!r}"
            )
        started = time.perf_counter()
        needed_by = "several_processes" if self.ranks.count > 1 else reason if unscored == "never" else None
        planner = self.planner.with_execution_chosen(can_skip_scoring=needed_by is None)
        window, indices = self._plan(planner, [rows_of(one) for one in slices])
        seconds = {"planning": time.perf_counter() - started}
        missing = [name for name in names if name not in indices[0]]
        if missing and unscored != "never":
            raise ValueError(
                f"expected names that the slices' index has with unscored={unscored!r}, got {', '.join(missing)} "
                f"besides {', '.join(indices[0])} (sums are known after scoring only)"
            )
        if missing and self.ranks.count > 1:
            raise ValueError(f"expected values per row with several processes, got the sums {', '.join(missing)}")
        job = _Job(
            slices, indices, loss, names, window, self._like(), self.device if loss_device is None else loss_device
        )
        coefficients = None
        if needed_by is None and window.schedule.execution == "nested" and len(window.batches) > 1:
            with probing():
                coefficients = job.coefficients_of_placeholders(compare=unscored == "probe")
            needed_by = None if coefficients is not None else "loss_of_log_probs"
        if coefficients is None:
            total, difference = self._scored(job, seconds)
        else:
            total, difference = self._unscored(job, coefficients, seconds, on_trust=unscored == "always"), 0.0
        return UpdateReport(
            loss=total.to(self.device),
            window=window,
            limits_raised=window.schedule.config != planner.config,
            scoring_skipped=coefficients is not None,
            scoring_needed_by=needed_by,
            recompute_difference=difference,
            seconds=seconds,
        )

    def _like(self) -> torch.Tensor:
        """A tensor of the dtype and device of the model's values."""
        dtype = next(self.model.parameters()).dtype
        return torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=self.device)

    def _plan(self, planner: WindowPlanner, rows: Sequence[SliceRows]) -> tuple[TreeWindow, list[Index]]:
        trajectories = [one.trajectories() for one in rows]
        together = [tokens for part in trajectories for tokens in part]
        window = planner(together or [rows[0].stand_in()])
        paths = iter([window.tree.path(number) for number in range(len(together))])
        indices = [one.index([next(paths) for _ in part]) for one, part in zip(rows, trajectories, strict=True)]
        return window.to(self.device), indices

    def _run(self, window: TreeWindow, mode: Literal["train", "score", "unscored"]) -> WindowRun:
        return WindowRun(self.model, window, self.options, ranks=self.ranks, mode=mode)

    def _scored(self, job: "_Job", seconds: dict[str, float]) -> tuple[torch.Tensor, float]:
        started = time.perf_counter()
        run = self._run(job.window, "train")
        scores = run.score(job.names)
        seconds["scoring"] = time.perf_counter() - started
        total, coefficients = job.loss_and_coefficients(scores)
        started = time.perf_counter()
        run.backward(coefficients)
        seconds["backward"] = time.perf_counter() - started
        return total, run.recompute_difference

    def _unscored(
        self, job: "_Job", coefficients: TreeValues, seconds: dict[str, float], *, on_trust: bool
    ) -> torch.Tensor:
        """The schedule with coefficients that are known before, then the loss on the true values."""
        started = time.perf_counter()
        scores = self._run(job.window, "unscored").backward_unscored(coefficients, job.wanted())
        if on_trust:
            total, found = job.loss_and_coefficients(scores)
            for name, value in found.rows.items():
                if not torch.allclose(value, coefficients.rows.get(name, torch.zeros_like(value)), rtol=1e-4):
                    raise ValueError(
                        f"expected a loss whose derivatives by {name} depend on no value (unscored='always'), got "
                        "others on true values: the gradients that were added are wrong; use 'never' or 'probe'"
                    )
        else:
            with torch.no_grad():
                total = torch.stack(job.losses(job.leaves(scores))).sum()
        seconds |= {"scoring": 0.0, "backward": time.perf_counter() - started}
        return total


class _Job:
    """The slices of one update on their window: leaves, losses, derivatives."""

    def __init__(
        self,
        slices: Sequence[Any],
        indices: Sequence[Index],
        loss: Callable[[Any, Leaves], torch.Tensor],
        names: tuple[str, ...],
        window: TreeWindow,
        like: torch.Tensor,
        loss_device: torch.device | str,
    ) -> None:
        self.slices, self.indices, self.loss, self.names = slices, indices, loss, names
        self.window, self.like, self.loss_device = window, like, loss_device

    def leaves(self, values: TreeValues) -> list[dict[str, torch.Tensor]]:
        """What the loss of each slice is given, on its device.

        Raises:
            ValueError: a value that an index does not place.
        """
        for index in self.indices:
            missing = [name for name in values.rows if name not in index]
            if missing:
                raise ValueError(
                    f"expected the index of every slice to name each value asked for, got {', '.join(index)} for "
                    f"{', '.join(values.rows)}: ask for other names, or let index() place {', '.join(missing)}"
                )
        rows = {name: value.to(self.loss_device) for name, value in values.rows.items()}
        return [
            {name: spread(value, index[name]) for name, value in rows.items()}
            | {name: value.to(self.loss_device, copy=True) for name, value in values.sums.items()}
            for index in self.indices
        ]

    def losses(self, leaves: Sequence[Leaves]) -> list[torch.Tensor]:
        """The loss of each slice."""
        return [self.loss(one, given) for one, given in zip(self.slices, leaves, strict=True)]

    def loss_and_coefficients(self, values: TreeValues) -> tuple[torch.Tensor, TreeValues]:
        """The sum of the losses, detached, and its derivatives by each value of the tree and each sum."""
        given = self.leaves(values)
        leaves = [{k: leaf.requires_grad_() for k, leaf in one.items() if k not in WITHOUT_GRADIENT} for one in given]
        losses = self.losses(given)
        for loss, one in zip(losses, leaves, strict=True):
            check_reach(loss, list(one.values()))
        gradients = [
            dict(zip(one, torch.autograd.grad(loss, list(one.values()), allow_unused=True), strict=True))
            for loss, one in zip(losses, leaves, strict=True)
        ]
        coefficients = TreeValues(
            rows={
                name: collect(
                    [one[name] for one in gradients], [index[name] for index in self.indices], len(value)
                ).to(self.like.device)
                for name, value in values.rows.items()
                if name not in WITHOUT_GRADIENT
            },
            sums={
                name: sum(
                    (one[name].to(value.device) for one in gradients if one[name] is not None), torch.zeros_like(value)
                )
                for name, value in values.sums.items()
            },
        )
        return torch.stack([loss.detach() for loss in losses]).sum(), coefficients

    def coefficients_of_placeholders(self, *, compare: bool) -> TreeValues | None:
        """The derivatives; None if those by log-probs are not the same at all placeholders, or others are not 0.

        Args:
            compare: whether that is tried; if not, they are taken at the first placeholders as they are.
        """
        first: TreeValues | None = None
        for values in placeholders(self.names, self.window.tree.num_tokens, self.like.to(self.loss_device)):
            _, found = self.loss_and_coefficients(values)
            found = found.without(name for name, value in found.rows.items() if name != LOG_PROB and not value.any())
            if not compare:
                return found
            if found.names != (LOG_PROB,) or not torch.equal((first or found).rows[LOG_PROB], found.rows[LOG_PROB]):
                return None
            first = found
        return first

    def wanted(self) -> dict[str, torch.Tensor]:
        """By name, ``[N]`` bool, rows whose values the loss reads."""
        found = {}
        for name in self.names:
            mask = np.zeros(self.window.tree.num_tokens, bool)
            for index in self.indices:
                mask[index[name][index[name] >= 0]] = True
            found[name] = torch.from_numpy(mask).to(self.like.device)
        return found
