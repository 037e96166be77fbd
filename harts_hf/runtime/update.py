"""One update on rollout trees: plan, score, loss and backward, for any loss of what a tree forward answers."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from harts_hf.modeling import LABEL_VALUES
from harts_hf.runtime.exchange import hash_of
from harts_hf.runtime.job import Job, Leaves
from harts_hf.runtime.leaves import spread
from harts_hf.runtime.options import RunOptions
from harts_hf.runtime.passes import Passes, together_if_alone
from harts_hf.runtime.placing import PLACEMENTS, PlacementChoice, place
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.report import UpdateReport
from harts_hf.runtime.run import WindowRun
from harts_hf.runtime.slices import SliceRows, SliceTable, checked

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
        self.model, self.planner, self.options = model, planner, options or RunOptions()
        self.ranks = ranks or Ranks()
        self.device = next(model.parameters()).device if device is None else device

    def score(self, rows: SliceRows, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Values of one slice in the shapes of its index, and sums over its trajectories, without gradients.

        On several processes, each scores its own, in as many forwards as the one that has most.
        """
        with self.ranks.together():
            trajectories = rows.trajectories()
            window = self.planner(trajectories or [rows.stand_in()])
            index = rows.index([window.tree.path(number) for number in range(len(trajectories))])
        with together_if_alone(self.ranks):
            run = WindowRun(self.model, window.to(self.device), self.options, ranks=self.ranks, mode="score")
            scores = run.score(names)
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
            trajectories = [checked(one.trajectories()) for one in rows]
        needed_by = self._agreed_reason(
            (reason or "loss") if unscored == "never" else "", len(slices), (*names, *observed)
        )
        placed = place(
            self.planner,
            [tokens for part in trajectories for tokens in part],
            rows[0].stand_in,
            ranks,
            choice=self.placement,
            can_skip_scoring=needed_by is None,
            names=(*names, *observed),
        )
        window = placed.window.to(self.device)
        seconds = {"planning": time.perf_counter() - started}
        with ranks.together():
            paths = iter([window.tree.path(placed.first + number) for number in range(sum(map(len, trajectories)))])
            indices = [one.index([next(paths) for _ in part]) for one, part in zip(rows, trajectories, strict=True)]
            missing = [name for name in names if name not in indices[0]]
            if missing and unscored != "never":
                raise ValueError(
                    f"expected names that the slices' index has with unscored={unscored!r}, got {', '.join(missing)} "
                    f"besides {', '.join(indices[0])} (sums are known after scoring only)"
                )
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
            like=self._like(),
            loss_device=self.device if loss_device is None else loss_device,
        )
        shared = ranks if placed.placement == "global" else Ranks()
        passes = Passes(self.model, job, self.options, ranks=ranks, shared=shared)
        coefficients = None
        if needed_by is None and window.schedule.execution == "nested" and ranks.agree(len(window.batches))[0] > 1:
            coefficients = passes.known_coefficients(probing, compare=unscored == "probe")
            needed_by = None if coefficients is not None else "loss_of_log_probs"
        if coefficients is None:
            outcome = passes.scored()
        else:
            outcome = passes.unscored(coefficients, on_trust=unscored == "always")
        seconds |= outcome.seconds
        if ranks.count > 1:
            seconds["exchange"] = ranks.exchange_seconds - seconds_before
        return UpdateReport(
            loss=outcome.loss.to(self.device),
            window=window,
            placement=placed.placement,
            limits_raised=window.schedule.config != placed.planner.config,
            scoring_skipped=coefficients is not None,
            scoring_needed_by=needed_by,
            recompute_difference=outcome.run.recompute_difference,
            seconds=seconds,
            exchanged_bytes=ranks.exchanged_bytes - bytes_before,
            sums={name: outcome.scores.sums[name] for name in observed},
            routing_flips=outcome.run.routing_flips,
        )

    def _agreed_reason(self, own: str, num_slices: int, names: tuple[str, ...]) -> str | None:
        """Why scores are needed: the first reason of any rank, since all have to call their losses equally often.

        What decides which collectives come next is compared first: with other settings, ranks would meet in different
        ones, before any plan could be compared.
        """
        if self.ranks.count == 1:
            return own or None
        settings = hash_of(self.planner, names)
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

    def _like(self) -> torch.Tensor:
        """A tensor of the dtype and device of the model's values."""
        dtype = next(self.model.parameters()).dtype
        return torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=self.device)
