"""One update on rollout trees: plan, score, loss and backward, for any loss of what a tree forward answers."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
import torch
from torch import nn

from harts_hf.modeling import LABEL_VALUES
from harts_hf.runtime.exchange import add_up_values, any_of_ranks, hash_of
from harts_hf.runtime.job import Index, Job, Leaves, without_zeros
from harts_hf.runtime.leaves import spread
from harts_hf.runtime.ops import Mode
from harts_hf.runtime.placing import PLACEMENTS, Placement, PlacementChoice, place
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.replay import RoutingCounts
from harts_hf.runtime.routes import TokenRoutes, TreeRoutes, marked, merge_marked, merge_routes
from harts_hf.runtime.run import RunOptions, WindowRun
from harts_hf.runtime.slices import SliceTable
from harts_hf.runtime.values import TreeValues
from harts_hf.runtime.window import TreeWindow
from harts_hf.tree import IntArray, RolloutTree

Slice = TypeVar("Slice")
# Of a slice's rows, experts known before by trajectory, in the order of their trajectories.
RoutesOf = Callable[[Any], Sequence[TokenRoutes | None] | None]
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
        window: what was planned and run; in global placement the same forest and schedule on all ranks.
        placement: "global" if the window holds all ranks' trajectories, "local" if this rank's own.
        limits_raised: whether a limit of the plan could not be kept.
        scoring_skipped: whether the scoring pass of a cut plan was left out. (A window of one microbatch has none: its
            one forward scores and trains.)
        scoring_needed_by: what made one necessary; None where nothing did.
        recompute_difference: the largest difference of a log-prob computed again from its score.
        seconds: of ``planning``, ``scoring``, ``backward``; on several ranks, ``exchange`` is the part of them in
            which ranks exchanged numbers and waited for one another outside forwards and backwards.
        exchanged_bytes: what this rank got from the others: token ids, values, coefficients.
        sums: over the trajectories of all ranks, of the names that were observed.
        routing: what came of choices of experts that were replayed here.
    """

    loss: torch.Tensor
    window: TreeWindow
    placement: Placement
    limits_raised: bool
    scoring_skipped: bool
    scoring_needed_by: str | None
    recompute_difference: float
    seconds: dict[str, float] = field(default_factory=dict)
    exchanged_bytes: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    routing: RoutingCounts = field(default_factory=RoutingCounts)


class TreeUpdate:
    """Computes slices of trajectories together: each token they share once, with the gradients of the slices' losses.

    Args:
        model: patched, wrapped or not.
        planner: limits of the plan.
        options: how forwards run.
        ranks: the processes of the training.
        device: where windows are computed; where the model's first parameter is if None.
        placement: on several processes, whether the trajectories of all of them make one forest that they share
            ("global"), each computes its own ("local"), or what the cost model estimates to be faster ("auto").
        observed: names of sums that no loss reads and reports have; they never take a scoring pass.
        routes_of: of rows, the experts that are known before for each of their trajectories, which forwards then take;
            None for rows of which none are known. Every process has it or none has.
        splits_on_routes: whether tokens whose routes differ between trajectories are computed apart.
        on_scored: given the rows of :meth:`score` and the experts that its forwards took, by trajectory.

    Raises:
        ValueError: another placement, a planner for several ranks, or ``splits_on_routes`` without ``routes_of``.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: WindowPlanner,
        options: RunOptions | None = None,
        *,
        ranks: Ranks | None = None,
        device: torch.device | str | None = None,
        placement: PlacementChoice = "auto",
        observed: tuple[str, ...] = (),
        routes_of: RoutesOf | None = None,
        splits_on_routes: bool = False,
        on_scored: Callable[[Any, list[TokenRoutes]], None] | None = None,
    ) -> None:
        if splits_on_routes and routes_of is None:
            raise ValueError("expected routes_of with splits_on_routes=True, got None: no routes are known")
        if placement not in PLACEMENTS:
            raise ValueError(f"expected placement to be one of {', '.join(PLACEMENTS)}, got {placement!r}")
        if planner.config.world_size != 1:
            raise ValueError(
                "expected a planner for one rank (world_size=1; TreeUpdate plans for as many as there are), got "
                f"world_size={planner.config.world_size}"
            )
        self.placement: PlacementChoice = placement
        self.observed = observed
        self._routes_of, self._splits_on_routes, self._on_scored = routes_of, splits_on_routes, on_scored
        self.model, self.planner, self.options = model, planner, options or RunOptions()
        self.ranks = ranks or Ranks()
        self.device = next(model.parameters()).device if device is None else device

    def score(self, rows: SliceRows, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Values of one slice in the shapes of its index, and sums over its trajectories, without gradients.

        On several processes, each scores its own, in as many forwards as the one that has most.
        """
        with self.ranks.together():
            trajectories = rows.trajectories()
            known = self._known([rows], [len(trajectories)])
            window = self.planner(self._merge(self._marked(trajectories, known) or [rows.stand_in()]))
            paths = [window.tree.path(number) for number in range(len(trajectories))]
            index = rows.index(paths)
            routes = None if known is None else merge_routes(window.tree.num_tokens, paths, known, Ranks())
        run = self._run(window.to(self.device), "score", routes=routes)
        with self._together_if_alone():
            scores = run.score(names)
        if self._on_scored is not None:
            taken = run.replay.taken()
            assert taken is not None
            self._on_scored(rows, [TokenRoutes(((taken, torch.from_numpy(path)),)) for path in paths])
        return {name: spread(value, index[name]) for name, value in scores.rows.items()} | scores.sums

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
            loss: of a slice and its values (by name, in the shapes of its index) a scalar. Sums are over the
                trajectories of all slices of all ranks, the same for every slice: a loss of several slices takes its
                own part of them. Of a sum by slice (:attr:`harts_hf.modeling.TreePass.slice_counts`), entry
                ``r * len(slices) + i`` is that of slice ``i`` of rank ``r``. It may be called several times for a
                slice, the last time on true values.
            names: of the values and sums that the loss reads.
            unscored: whether the loss's derivatives can be known without the values: "always", where they depend on
                none (supervised training); "never"; or "probe", where they are believed not to, which is then tried on
                placeholders. If they can be, on every process, and the plan is cut, in the nested execution, the
                scoring pass is left out.
            reason: why they cannot be, for the report, where ``unscored`` is "never".
            probing: entered around calls of the loss whose value nobody wants.
            loss_device: where the values that the loss gets lie; where windows are computed if None. Losses of a few
                numbers per token are faster on the CPU than by a hundred launches each.

        On several processes every one has equally many slices, whose losses all run in the same order; gradients are
        those of the mean over processes, as the wrapper of the model takes it.

        Raises:
            ValueError: no slices, a name that the slices' index lacks, a loss that reaches trainable tensors other
                than its values or depends on none of them, trajectories that cannot be planned; after the backward, a
                loss with ``unscored="always"`` whose derivatives depend on values.
            OtherRankError: another process raised any of these, or another error outside a forward or backward.
        """
        if not slices:
            raise ValueError("expected at least one slice, got none")
        if isinstance(names, str) or unscored not in get_args(Unscored):
            raise ValueError(
                f"expected a tuple of names and unscored to be one of {', '.join(get_args(Unscored))}, got {names!r} "
                f"and {unscored!r}"
            )
        ranks, observed, started = self.ranks, self.observed, time.perf_counter()
        bytes_before, seconds_before = ranks.exchanged_bytes, ranks.exchange_seconds
        with ranks.together():
            rows = [rows_of(one) for one in slices]
            trajectories = [_checked(one.trajectories()) for one in rows]
            known = self._known(rows, list(map(len, trajectories)))
            own = self._marked([tokens for part in trajectories for tokens in part], known)
        needed_by = self._agreed_reason(
            (reason or "loss") if unscored == "never" else "", len(slices), (*names, *observed)
        )
        placed = place(
            self.planner,
            own,
            rows[0].stand_in,
            ranks,
            choice=self.placement,
            can_skip_scoring=needed_by is None,
            names=(*names, *observed),
            merge=self._merge,
        )
        window = placed.window.to(self.device)
        seconds = {"planning": time.perf_counter() - started}
        with ranks.together():
            paths = [window.tree.path(placed.first + number) for number in range(len(own))]
            left = iter(paths)
            indices = [one.index([next(left) for _ in part]) for one, part in zip(rows, trajectories, strict=True)]
            missing = [name for name in names if name not in indices[0]]
            if missing and unscored != "never":
                raise ValueError(
                    f"expected names that the slices' index has with unscored={unscored!r}, got {', '.join(missing)} "
                    f"besides {', '.join(indices[0])} (sums are known after scoring only)"
                )
        shared = ranks if placed.placement == "global" else Ranks()
        routes = None if known is None else merge_routes(window.tree.num_tokens, paths, known, shared)
        table = None
        if missing or observed:
            sizes = [len(part) for part in trajectories]
            is_global = placed.placement == "global"
            number = window.tree.num_trajectories
            table = SliceTable.of(sizes, ranks, is_global=is_global, num_trajectories=number)
        job = Job(
            slices=slices,
            indices=indices,
            loss=loss,
            names=names,
            observed=observed,
            window=window,
            table=table,
            routes=routes,
            like=self._like(),
            loss_device=self.device if loss_device is None else loss_device,
        )
        coefficients = None
        if needed_by is None and window.schedule.execution == "nested" and self._is_cut(window):
            coefficients = self._known_coefficients(job, shared, probing, compare=unscored == "probe")
            needed_by = None if coefficients is not None else "loss_of_log_probs"
        if coefficients is None:
            total, scores, run = self._scored(job, shared, seconds)
        else:
            total, scores, run = self._unscored(job, shared, coefficients, seconds, on_trust=unscored == "always")
        if ranks.count > 1:
            seconds["exchange"] = ranks.exchange_seconds - seconds_before
        return UpdateReport(
            loss=total.to(self.device),
            window=window,
            placement=placed.placement,
            limits_raised=window.schedule.config != placed.planner.config,
            scoring_skipped=coefficients is not None,
            scoring_needed_by=needed_by,
            recompute_difference=run.recompute_difference,
            seconds=seconds,
            exchanged_bytes=ranks.exchanged_bytes - bytes_before,
            sums={name: scores.sums[name] for name in observed},
            # Of a shared forest every rank knows all routes.
            routing=run.replay.counts if shared.index == 0 else run.replay.counts.of_forwards(),
        )

    def _agreed_reason(self, own: str, num_slices: int, names: tuple[str, ...]) -> str | None:
        """Why scores are needed: the first reason of any rank, since all have to call their losses equally often.

        What decides which collectives come next is compared first: with other settings, ranks would meet in different
        ones, before any plan could be compared.
        """
        if self.ranks.count == 1:
            return own or None
        settings = hash_of(self.planner, names, self._splits_on_routes)
        found = self.ranks.gather(int(bool(own)), num_slices, PLACEMENTS.index(self.placement), settings)
        if len({numbers[1:3] for numbers in found}) > 1:
            listed = ", ".join(f"{number} and {PLACEMENTS[choice]}" for _, number, choice, _ in found)
            raise ValueError(f"expected the same number of slices and placement on every process, got {listed}")
        if len({numbers[3] for numbers in found}) > 1:
            listed = ", ".join(f"{one[3]:016x} on process {rank}" for rank, one in enumerate(found))
            raise ValueError(
                "expected the same settings of plans (tree_*, the cost model) and names of values on every process, "
                f"got the hashes {listed}; this one has {self.planner.config}"
            )
        return next(filter(None, self.ranks.gather_texts(own))) if any(one for one, *_ in found) else None

    def _is_cut(self, window: TreeWindow) -> bool:
        """Whether any rank has several microbatches."""
        return self.ranks.agree(len(window.batches))[0] > 1

    def _known_coefficients(
        self, job: Job, shared: Ranks, probing: Callable[[], AbstractContextManager[object]], *, compare: bool
    ) -> TreeValues | None:
        """The derivatives of all losses on the window before any value is known, or None on every rank."""
        with self.ranks.together(), probing():
            found = job.coefficients_of_placeholders(compare=compare)
        (unknown,) = self.ranks.agree(int(found is None))
        if unknown or found is None:
            return None
        return without_zeros(add_up_values(found, shared))

    def _together_if_alone(self) -> AbstractContextManager[object]:
        """Around forwards without gradients: where ranks do not wait for one another in them, they meet afterwards."""
        return nullcontext() if self.ranks.forwards_meet else self.ranks.together()

    def _like(self) -> torch.Tensor:
        """A tensor of the dtype and device of the model's values."""
        dtype = next(self.model.parameters()).dtype
        return torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=self.device)

    def _run(
        self,
        window: TreeWindow,
        mode: Mode,
        *,
        slices: SliceTable | None = None,
        routes: TreeRoutes | None = None,
    ) -> WindowRun:
        return WindowRun(self.model, window, self.options, ranks=self.ranks, slices=slices, routes=routes, mode=mode)

    def _known(self, rows: Sequence[SliceRows], counts: Sequence[int]) -> list[TokenRoutes | None] | None:
        """Routes of all trajectories of some rows; None where the update knows none of any."""
        if self._routes_of is None:
            return None
        found: list[TokenRoutes | None] = []
        for one, count in zip(rows, counts, strict=True):
            known = self._routes_of(one)
            if known is not None and len(known) != count:
                raise ValueError(f"expected routes of {count} trajectories, got {len(known)}")
            found += [None] * count if known is None else known
        return found

    def _marked(self, trajectories: list[IntArray], known: Sequence[TokenRoutes | None] | None) -> list[IntArray]:
        if known is None or not self._splits_on_routes:
            return trajectories
        return [marked(tokens, routes) for tokens, routes in zip(trajectories, known, strict=True)]

    @property
    def _merge(self) -> Callable[[Sequence[IntArray]], RolloutTree]:
        return merge_marked if self._splits_on_routes else RolloutTree.from_trajectories

    def _add_up(self, values: TreeValues, shared: Ranks) -> TreeValues:
        """Values per row over the ranks that share the window; sums over all ranks, whoever computed them."""
        rows = add_up_values(TreeValues(rows=values.rows), shared).rows
        return TreeValues(rows=rows, sums=add_up_values(TreeValues(sums=values.sums), self.ranks).sums)

    def _scored(
        self, job: Job, shared: Ranks, seconds: dict[str, float]
    ) -> tuple[torch.Tensor, TreeValues, WindowRun]:
        started = time.perf_counter()
        run = self._run(job.window, "train", slices=job.table, routes=job.routes)
        with self._together_if_alone():
            scores = run.score((*job.names, *job.observed))
        scores = self._add_up(scores, shared)
        seconds["scoring"] = time.perf_counter() - started
        with self.ranks.together():
            total, coefficients = job.loss_and_coefficients(scores)
        coefficients = self._add_up(coefficients, shared)
        started = time.perf_counter()
        run.backward(coefficients)
        seconds["backward"] = time.perf_counter() - started
        return total, scores, run

    def _unscored(
        self, job: Job, shared: Ranks, coefficients: TreeValues, seconds: dict[str, float], *, on_trust: bool
    ) -> tuple[torch.Tensor, TreeValues, WindowRun]:
        """The schedule with coefficients that are known before, then the loss on the true values."""
        started = time.perf_counter()
        run = self._run(job.window, "unscored", slices=job.table, routes=job.routes)
        wanted = any_of_ranks(job.wanted(), shared)
        scores = self._add_up(run.backward_unscored(coefficients, wanted, sums=job.observed), shared)
        seconds |= {"scoring": 0.0}
        if on_trust:
            with self.ranks.together():
                total, found = job.loss_and_coefficients(scores)
            for name, value in add_up_values(found, shared).rows.items():
                if not torch.allclose(value, coefficients.rows.get(name, torch.zeros_like(value)), rtol=1e-4):
                    raise ValueError(
                        f"expected a loss whose derivatives by {name} depend on no value (unscored='always'), got "
                        "others on true values: the gradients that were added are wrong; use 'never' or 'probe'"
                    )
        else:
            with self.ranks.together(), torch.no_grad():
                total = torch.stack(job.losses(job.leaves(scores))).sum()
        seconds |= {"backward": time.perf_counter() - started}
        return total, scores, run


def _checked(trajectories: list[IntArray]) -> list[IntArray]:
    """Before other ranks see them."""
    for tokens in trajectories:
        array = np.asarray(tokens)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"expected trajectories as 1-D integer arrays, got {array.dtype} of shape {array.shape}")
    return trajectories
