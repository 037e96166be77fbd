"""One update on rollout trees: plan, score, loss and backward, for any loss of what a tree forward answers."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from harts_hf.modeling import LABEL_VALUES
from harts_hf.runtime.exchange import differing_settings, hash_of, settings_of
from harts_hf.runtime.job import Job, Leaves
from harts_hf.runtime.kept import KeptScores, find
from harts_hf.runtime.leaves import spread
from harts_hf.runtime.options import RunOptions
from harts_hf.runtime.passes import Passes, together_if_alone
from harts_hf.runtime.placing import PLACEMENTS, PlacementChoice, place
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.report import UpdateReport
from harts_hf.runtime.routes import KnownRoutes, TokenRoutes, merge_routes
from harts_hf.runtime.run import WindowRun
from harts_hf.runtime.slices import SliceRows, SliceTable, checked
from harts_hf.runtime.window import TreeWindow
from harts_hf.tree import IntArray

Slice = TypeVar("Slice")
# Whether a loss's derivatives can be known before what they are taken by is: see TreeUpdate.run.
Unscored = Literal["always", "never", "probe"]


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
        known_routes: experts that are known before, which forwards then take. Every process has some or none has.
        on_scored: given the rows of :meth:`score` and the experts that its forwards took, by trajectory.

    Raises:
        ValueError: another placement, or a planner for several ranks.
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
        known_routes: KnownRoutes | None = None,
        on_scored: Callable[[Any, list[TokenRoutes]], None] | None = None,
    ) -> None:
        if placement not in PLACEMENTS:
            raise ValueError(f"expected placement to be one of {', '.join(PLACEMENTS)}, got {placement!r}")
        if planner.config.world_size != 1:
            raise ValueError(
                "expected a planner for one rank (world_size=1; TreeUpdate plans for as many as there are), got "
                f"world_size={planner.config.world_size}"
            )
        self.placement: PlacementChoice = placement
        self.observed = observed
        self._replays = known_routes is not None
        self._known, self._on_scored = known_routes or KnownRoutes(lambda _: None), on_scored
        self.model, self.planner, self.options = model, planner, options or RunOptions()
        self.ranks = ranks or Ranks()
        self.planned: TreeWindow | None = None  # the latest window; for one whose memory ran out
        self.device = next(model.parameters()).device if device is None else device

    def score(self, rows: SliceRows, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Values of one slice in the shapes of its index, and sums over its trajectories, without gradients.

        On several processes, each scores its own, in as many forwards as the one that has most.
        """
        return self.scored(rows, names)[0]

    def scored(self, rows: SliceRows, names: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], KeptScores]:
        """What :meth:`score` gives, and the values per row for a :meth:`run` on the same weights."""
        with self.ranks.together():
            trajectories = rows.trajectories()
            known = self._known.of_trajectories([rows], [len(trajectories)])
            window = self.planner(self._known.merge(self._known.marked(trajectories, known) or [rows.stand_in()]))
            paths = window.tree.paths(range(len(trajectories)))
            index = rows.index(paths)
            routes = merge_routes(window.tree.num_tokens, paths, known, Ranks())
            self.planned = window
            window = window.to(self.device)
        with together_if_alone(self.ranks):
            run = WindowRun(self.model, window, self.options, ranks=self.ranks, routes=routes, mode="score")
            scores = run.score(names)
            taken = None if self._on_scored is None else run.routes.taken()
        if self._on_scored is not None and taken is not None:
            self._on_scored(rows, [TokenRoutes(((taken, torch.from_numpy(path)),)) for path in paths])
        found = {name: spread(value, index[name]) for name, value in scores.rows.items()} | scores.sums
        return found, KeptScores(window.rollout_tree, window.tree, scores)

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
        kept: Sequence[KeptScores] = (),
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
            kept: what passes without gradients on the same weights and options gave (:meth:`scored`), on the losses'
                device. If they know every slice of every process, by all of ``names``, losses are computed on these
                values, nothing is scored, and ``unscored`` does not matter.

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
            trajectories = [checked(one.trajectories()) for one in rows]
            known = self._known.of_trajectories(rows, list(map(len, trajectories)))
            own = self._known.marked([tokens for part in trajectories for tokens in part], known)
            tree = self._known.merge(own) if kept and own else None
            found = find(kept, rows, trajectories, tree, names) if kept else None
        own_reason = (reason or "loss") if unscored == "never" else ""
        needed_by, is_known = self._agreed(own_reason, found is not None, len(slices), (*names, *observed))
        placed = place(
            self.planner,
            own,
            rows[0].stand_in,
            ranks,
            choice=self.placement,
            can_skip_scoring=needed_by is None,
            names=(*names, *observed),
            merge=lambda given: tree if tree is not None and given is own else self._known.merge(given),
        )
        self.planned = placed.window
        window = placed.window.to(self.device)
        seconds = {"planning": time.perf_counter() - started}
        with ranks.together():
            indices = None if found is None else found.indices_on(window.tree, placed.first)
            paths: list[IntArray] = []
            if indices is None or self._replays:
                paths = window.tree.paths(range(placed.first, placed.first + len(own)))
            if indices is None:
                left = iter(paths)
                indices = [one.index([next(left) for _ in part]) for one, part in zip(rows, trajectories, strict=True)]
            missing = [name for name in names if name not in indices[0]]
            if missing and unscored != "never":
                raise ValueError(
                    f"expected names that the slices' index has with unscored={unscored!r}, got {', '.join(missing)} "
                    f"besides {', '.join(indices[0])} (sums are known after scoring only)"
                )
        shared = ranks if placed.placement == "global" else Ranks()
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
            routes=merge_routes(window.tree.num_tokens, paths, known, shared) if self._replays else None,
            like=self._like(),
            loss_device=self.device if loss_device is None else loss_device,
        )
        passes = Passes(self.model, job, self.options, ranks=ranks, shared=shared)
        coefficients = None
        is_cut = needed_by is None and ranks.agree(len(window.batches))[0] > 1
        if is_cut and not is_known and window.schedule.execution == "nested":
            coefficients = passes.known_coefficients(probing, compare=unscored == "probe")
            needed_by = None if coefficients is not None else "loss_of_log_probs"
        if is_known and found is not None:
            outcome = passes.kept(found.values)
        elif coefficients is None:
            outcome = passes.scored()
        else:
            outcome = passes.unscored(coefficients, on_trust=unscored == "always")
        seconds |= outcome.seconds
        if ranks.count > 1:
            seconds["exchange"] = ranks.exchange_seconds - seconds_before
        counts = outcome.run.routes.counts
        return UpdateReport(
            loss=outcome.loss.to(self.device),
            window=window,
            placement=placed.placement,
            limits_raised=window.schedule.config != placed.planner.config,
            scoring_skipped=coefficients is not None or (is_known and is_cut),
            scoring_kept=is_known,
            scoring_needed_by=needed_by,
            recompute_difference=outcome.run.recompute_difference,
            seconds=seconds,
            exchanged_bytes=ranks.exchanged_bytes - bytes_before,
            sums={name: outcome.scores.sums[name] for name in observed},
            # Of a shared forest every rank knows all routes.
            routing=counts if shared.index == 0 else counts.of_forwards(),
        )

    def _agreed(self, own: str, is_known: bool, num_slices: int, names: tuple[str, ...]) -> tuple[str | None, bool]:
        """Why scores are needed: the first reason of any rank, since all have to call their losses equally often; and
        whether all ranks know them already.

        What decides which collectives come next is compared first: with other settings, ranks would meet in different
        ones, before any plan could be compared.
        """
        if self.ranks.count == 1:
            return None if is_known else own or None, is_known
        settings = settings_of(
            self.planner, values=names, replays_routing=self._replays, splits_on_routes=self._known.splits
        )
        found = self.ranks.gather(
            int(bool(own)), num_slices, PLACEMENTS.index(self.placement), hash_of(settings), int(is_known)
        )
        if len({numbers[1:3] for numbers in found}) > 1:
            listed = ", ".join(f"{number} and {PLACEMENTS[choice]}" for _, number, choice, _, _ in found)
            raise ValueError(f"expected the same number of slices and placement on every process, got {listed}")
        if len({numbers[3] for numbers in found}) > 1:
            raise ValueError(
                "expected the same settings of plans (tree_*, the cost model) and names of values on every process, "
                f"got {differing_settings(settings, self.ranks)}"
            )
        if all(numbers[4] for numbers in found):
            return None, True
        needed_by = next(filter(None, self.ranks.gather_texts(own))) if any(one for one, *_ in found) else None
        return needed_by, False

    def _like(self) -> torch.Tensor:
        """A tensor of the dtype and device of the model's values."""
        dtype = next(self.model.parameters()).dtype
        return torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=self.device)
