"""The passes of one update: what runs in which order, and what ranks exchange between."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from harts_hf.modeling import LOG_PROB
from harts_hf.runtime.exchange import add_up_values, any_of_ranks
from harts_hf.runtime.job import Job, without_zeros
from harts_hf.runtime.ops import Mode
from harts_hf.runtime.options import RunOptions
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.run import WindowRun
from harts_hf.runtime.values import TreeValues


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """What the passes of an update came to.

    Attributes:
        loss: the sum of this rank's losses, detached.
        scores: what the losses were computed on, and sums.
        run: of the window.
        seconds: of ``scoring`` (0 where forwards are the backwards' own) and ``backward``.
    """

    loss: torch.Tensor
    scores: TreeValues
    run: WindowRun
    seconds: dict[str, float]


class Passes:
    """The passes of one update; each of its ways is a collective where there are several ranks.

    Args:
        model: patched, wrapped or not.
        job: of this rank.
        options: how forwards run.
        ranks: the processes of the training.
        shared: those that share the window: ``ranks``, or this one alone.
    """

    def __init__(self, model: nn.Module, job: Job, options: RunOptions, *, ranks: Ranks, shared: Ranks) -> None:
        self._model, self._job, self._options = model, job, options
        self._ranks, self._shared = ranks, shared

    def known_coefficients(
        self, probing: Callable[[], AbstractContextManager[object]], *, compare: bool
    ) -> TreeValues | None:
        """The derivatives of all losses on the window before any value is known, or None on every rank.

        Args:
            probing: entered around the calls of the losses.
            compare: see :meth:`Job.coefficients_of_placeholders`.
        """
        with self._ranks.together(), probing():
            found = self._job.coefficients_of_placeholders(compare=compare)
        (unknown,) = self._ranks.agree(int(found is None))
        if unknown or found is None:
            return None
        return without_zeros(add_up_values(found, self._shared))

    def scored(self) -> Outcome:
        """Scores, losses, then forwards and backwards with their derivatives."""
        job, started = self._job, time.perf_counter()
        run = self._run("train")
        with together_if_alone(self._ranks):
            scores = run.score((*job.names, *job.observed))
        scores = self._add_up(scores)
        # Forwards whose graphs the backwards use are no pass of their own.
        seconds = {"scoring": 0.0, "backward": 0.0}
        seconds["scoring" if run.scores_apart else "backward"] = time.perf_counter() - started
        with self._ranks.together():
            total, coefficients = job.loss_and_coefficients(scores)
        coefficients = self._add_up(coefficients)
        started = time.perf_counter()
        run.backward(coefficients)
        seconds["backward"] += time.perf_counter() - started
        return Outcome(loss=total, scores=scores, run=run, seconds=seconds)

    def unscored(self, coefficients: TreeValues, *, on_trust: bool) -> Outcome:
        """The schedule with coefficients that are known before, then the loss on the true values.

        Args:
            coefficients: of all ranks.
            on_trust: whether nothing has shown yet that the derivatives depend on no value.

        Raises:
            ValueError: they were taken on trust, and depend on values.
        """
        job, started = self._job, time.perf_counter()
        run = self._run("unscored")
        wanted = any_of_ranks(job.wanted(), self._shared)
        scores = self._add_up(run.backward_unscored(coefficients, wanted, sums=job.observed))
        if on_trust:
            with self._ranks.together():
                total, found = job.loss_and_coefficients(scores)
            for name, value in add_up_values(found, self._shared).rows.items():
                if not torch.allclose(value, coefficients.rows.get(name, torch.zeros_like(value)), rtol=1e-4):
                    raise ValueError(
                        f"expected a loss whose derivatives by {name} depend on no value (unscored='always'), got "
                        "others on true values: the gradients that were added are wrong; use 'never' or 'probe'"
                    )
        else:
            with self._ranks.together(), torch.no_grad():
                total = torch.stack(job.losses(job.leaves(scores))).sum()
        seconds = {"scoring": 0.0, "backward": time.perf_counter() - started}
        return Outcome(loss=total, scores=scores, run=run, seconds=seconds)

    def kept(self, known: Sequence[dict[str, torch.Tensor]]) -> Outcome:
        """Losses on values that an earlier pass on the same weights gave, then the schedule without a scoring pass.

        Args:
            known: for each slice what its loss is given.
        """
        job = self._job
        with self._ranks.together():
            total, coefficients = job.differentiated(known, {})
            log_probs = job.on_tree(known, LOG_PROB) if LOG_PROB in known[0] else None
        coefficients = self._add_up(coefficients)
        started = time.perf_counter()
        run = self._run("unscored")
        found = run.backward_unscored(coefficients, sums=job.observed, known=log_probs)
        scores = add_up_values(TreeValues(sums=found.sums), self._ranks)
        seconds = {"scoring": 0.0, "backward": time.perf_counter() - started}
        return Outcome(loss=total, scores=scores, run=run, seconds=seconds)

    def _run(self, mode: Mode) -> WindowRun:
        job = self._job
        return WindowRun(
            self._model,
            job.window,
            self._options,
            ranks=self._ranks,
            slices=job.table,
            routes=job.routes,
            mode=mode,
        )

    def _add_up(self, values: TreeValues) -> TreeValues:
        """Values per row over the ranks that share the window; sums over all ranks, whoever computed them."""
        rows = add_up_values(TreeValues(rows=values.rows), self._shared).rows
        return TreeValues(rows=rows, sums=add_up_values(TreeValues(sums=values.sums), self._ranks).sums)


def together_if_alone(ranks: Ranks) -> AbstractContextManager[object]:
    """Around forwards without gradients: where ranks do not wait for one another in them, they meet afterwards."""
    return nullcontext() if ranks.forwards_meet else ranks.together()
