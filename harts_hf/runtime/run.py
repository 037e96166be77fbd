"""Runs the schedule of a window: scoring, and forwards and backwards in the planned order."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from harts_hf.batch import LabelTable, RowTable, TreeBatch
from harts_hf.modeling import ENTROPY, LOG_PROB, TreeAnswer, TreePass, Wanted
from harts_hf.modeling.handoff import Handoff
from harts_hf.planner.execution import DUMMY
from harts_hf.runtime.answers import Answered, inner_product
from harts_hf.runtime.guard import ModelGuard
from harts_hf.runtime.lives import count_readers, handoff_lives
from harts_hf.runtime.ops import Mode, ops_of
from harts_hf.runtime.options import RunOptions
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.replayed import ReplayedRoutes
from harts_hf.runtime.routes import TreeRoutes
from harts_hf.runtime.slices import SliceTable
from harts_hf.runtime.values import TreeValues, asked, on_cpu
from harts_hf.runtime.window import TreeWindow

Backward = Callable[[torch.Tensor], None]
Masks = Mapping[str, torch.Tensor]


class WindowRun:
    """One pass of a window through a model: :meth:`score`, a loss outside, then :meth:`backward`, once each.

    Args:
        model: a patched model, wrapped or not; called through its root.
        window: on the model's device.
        options: how forwards run.
        ranks: the processes; a collective is run at once if there are several that plan their own.
        slices: which slices the window's trajectories belong to, for sums by slice; they are one slice if None.
        routes: experts that are known before; each microbatch's first forward takes them.
        mode: "train" for :meth:`score` and :meth:`backward`; "score" for :meth:`score` alone; "unscored" for
            :meth:`backward_unscored` alone.

    Attributes:
        routes: what routers took.

    Of a plan for several ranks, values are those of the rows that this rank owns, 0 elsewhere, and sums theirs alone:
    whoever runs it adds them up. Coefficients are those of all ranks' losses.

    Raises:
        ValueError: another mode, or a plan for other processes than these.
    """

    def __init__(
        self,
        model: nn.Module,
        window: TreeWindow,
        options: RunOptions | None = None,
        *,
        ranks: Ranks | None = None,
        slices: SliceTable | None = None,
        routes: TreeRoutes | None = None,
        mode: Mode = "train",
    ) -> None:
        self.model, self.window, self._slices = model, window, slices
        self.options, self.ranks = options or RunOptions(), ranks or Ranks()
        self.handoff = Handoff(
            count_readers(window.batches), offload=self.options.offload, expand_latents=self.options.expand_latents
        )
        self._differences: list[torch.Tensor] = []
        self._ops, self._num_scoring = ops_of(window, mode, self.ranks)
        self._lives = handoff_lives(self._ops, window.batches)
        self._answers: dict[int, list[Answered]] = {}  # of dummies, several at a time
        self.routes = ReplayedRoutes(window, keeps=self.options.replay_routing, known=routes)
        self._slice_counts: dict[int, torch.Tensor] = {}
        self._scores: TreeValues | None = None
        self._known: torch.Tensor | None = None  # log-probs to compare later ones with
        self._mode = mode
        self._begun: set[str] = set()
        self._guard: ModelGuard | None = None

    def score(self, names: tuple[str, ...] = (LOG_PROB,)) -> TreeValues:
        """Every value and sum of these names.

        In the "keep" execution this runs every forward with its graph; in the others the ``S`` pass, without.

        Raises:
            RuntimeError: a second call, or a run whose mode is "unscored".
            ModelChangedError: the model was changed since the first forward.
        """
        self._begin("score", ("train", "score"))
        scores: TreeValues | None = None
        scored: set[int] = set()
        for position in range(self._num_scoring):
            kind, index = self._ops[position]
            batch = self._batch(index)
            if index in scored:  # a second S, for what it hands over, while other ranks are scoring yet
                self._forward(position, names, batch.labels.none(), batch.owned.none())
                continue
            answered = self._forward(position, names, batch.labels, batch.owned)
            scores = self._filled(scores, answered, names)
            if kind == "F":
                self._answers.setdefault(index, []).append(answered)
            if index != DUMMY:
                scored.add(index)
        self._scores = scores
        self._known = self.scores.rows.get(LOG_PROB)
        return self.scores

    @property
    def scores_apart(self) -> bool:
        """Whether :meth:`score` runs forwards that no backward uses: not in "keep", nor with one microbatch."""
        return any(kind == "S" for kind, _ in self._ops[: self._num_scoring])

    @property
    def recompute_difference(self) -> float:
        """The largest difference of a log-prob computed again from its score, so far."""
        return float(torch.stack(self._differences).max()) if self._differences else 0.0

    @property
    def scores(self) -> TreeValues:
        """What :meth:`score` answered.

        Raises:
            RuntimeError: it has not run.
        """
        if self._scores is None:
            raise RuntimeError("expected score() before its values")
        return self._scores

    def backward(self, coefficients: TreeValues, backward: Backward | None = None) -> None:
        """The rest of the schedule: the exact gradient of the loss that the coefficients are derivatives of.

        Head rows, and rows of values, are computed only where a coefficient is not zero. The largest difference of a
        log-prob computed again from its score is left in ``recompute_difference``.

        Args:
            coefficients: derivatives of the loss, on the model's device.
            backward: called with each microbatch's scalar; the ranks' if None.

        Raises:
            RuntimeError: no :meth:`score` before, a second call, or a run whose mode is not "train".
            ModelChangedError: the model was changed since the first forward; see :mod:`harts_hf.runtime.guard`.
        """
        self._begin("backward", ("train",))
        coefficients, wanted = self._asked_by(coefficients)
        self._train(coefficients, backward, coefficients.names, wanted)

    def backward_unscored(
        self,
        coefficients: TreeValues,
        wanted: Masks | None = None,
        backward: Backward | None = None,
        *,
        sums: tuple[str, ...] = (),
        known: torch.Tensor | None = None,
    ) -> TreeValues:
        """The schedule without a scoring pass, for coefficients that are known before it.

        Args:
            coefficients: derivatives of the loss, on the model's device.
            wanted: by name, ``[N]`` bool, rows whose values are asked for, among them every row with a coefficient;
                those alone if None.
            backward: called with each microbatch's scalar; the ranks' if None.
            sums: names of sums without coefficients that are asked for.
            known: ``[N]`` log-probs of an earlier pass, NaN where they are not known; what differs from them is left
                in ``recompute_difference``.

        Returns:
            Values of the wanted rows, 0 elsewhere, and the sums that have coefficients or are asked for.

        Raises:
            RuntimeError: a second call, or a run whose mode is not "unscored".
            ModelChangedError: the model was changed since the first forward; see :mod:`harts_hf.runtime.guard`.
        """
        self._begin("backward", ("unscored",))
        self._known = known
        if wanted is None:
            coefficients, masks = self._asked_by(coefficients)
        else:
            masks = on_cpu(wanted)
        self._train(coefficients, backward, (*masks, *coefficients.sums, *sums), masks)
        return self.scores

    def _asked_by(self, coefficients: TreeValues) -> tuple[TreeValues, Masks]:
        """Derivatives, and where they are not 0, on the CPU. Entropy costs more than its products: without it where no
        rank has a derivative by it."""
        wanted = on_cpu(coefficients.is_nonzero())
        if ENTROPY in wanted:
            (needed,) = self.ranks.agree(int(wanted[ENTROPY].any()))
            if not needed:
                coefficients = coefficients.without([ENTROPY])
                del wanted[ENTROPY]
        return coefficients, wanted

    def _train(
        self, coefficients: TreeValues, backward: Backward | None, names: tuple[str, ...], wanted: Masks
    ) -> None:
        scored = self._scores is not None
        self.ranks.run_apart()  # memory may run out in the guard, too
        if self._guard is not None:
            self._guard.check_all()
        for position in range(self._num_scoring, len(self._ops)):
            kind, index = self._ops[position]
            batch = self._batch(index)
            if kind == "S":  # only for what it hands over
                self._forward(position, names, batch.labels.none(), batch.owned.none())
            elif kind == "F":
                labels = batch.labels.select(asked(wanted, batch.labels.host.tree_rows, of_labels=True))
                rows = batch.owned.select(asked(wanted, batch.owned.host.tree_rows, of_labels=False))
                answered = self._forward(position, names, labels, rows)
                self._answers.setdefault(index, []).append(answered)
                if not scored:
                    self._scores = self._filled(self._scores, answered, names)
            else:
                answered = self._answers[index].pop()
                self._compare(answered)
                self._check_model()
                self._backward(position, answered, coefficients, backward)
                del answered  # what is left of its graph
                self._drop(position)
                self.handoff.free(index)

    def _backward(
        self, position: int, answered: Answered, coefficients: TreeValues, backward: Backward | None
    ) -> None:
        _, index = self._ops[position]
        is_last, follows = position + 1 == len(self._ops), self._ops[position - 1] == ("F", index)
        outputs = [*answered.answer["rows"].values(), *answered.answer["sums"].values()]
        with self.ranks.around_backward(self.model, outputs, is_last=is_last, follows=follows):
            (backward or self.ranks.backward)(inner_product(answered, coefficients))

    def _around(self, position: int) -> AbstractContextManager[object]:
        return self.ranks.around_forward(self.model) if self._ops[position][0] == "F" else nullcontext()

    def _forward(self, position: int, names: tuple[str, ...], labels: LabelTable, rows: RowTable) -> Answered:
        kind, index = self._ops[position]
        self._check_model()
        batch, options = self._batch(index), self.options
        wanted = Wanted(names, labels, rows, temperature=options.temperature, head_in_fp32=options.head_in_fp32)
        tree_pass = TreePass(
            batch,
            wanted,
            handoff=self.handoff if batch.imports or batch.exports else None,
            deterministic=options.deterministic,
            fused_modules=options.fused_modules,
            slice_counts=None if self._slices is None else partial(self._counts_by_slice, self._slices, index),
            routes=self.routes.before(index, batch),
        )
        self.handoff.keeping = self._lives.keeps[position]
        # Triton launches on the current GPU, wherever its arguments are (autograd sets it for backwards itself).
        on_device = torch.cuda.device_of(batch.input_ids)
        try:
            with self._around(position), on_device, torch.set_grad_enabled(kind == "F"), options.context():
                model = self.model if kind == "F" else self.ranks.scoring_model(self.model)
                answer: TreeAnswer = model(harts=tree_pass)
        finally:
            self.handoff.keeping = False
        self.routes.after(index, batch, tree_pass.routes)
        self._drop(position)
        return Answered(answer=answer, wanted=wanted)

    def _begin(self, step: str, modes: tuple[str, ...]) -> None:
        if self._mode not in modes:
            raise RuntimeError(f"expected a WindowRun of mode {' or '.join(modes)} for this, got {self._mode!r}")
        if step in self._begun:
            raise RuntimeError(f"{step} a second time: the schedule of a WindowRun runs once")
        if step == "backward" and self._mode == "train" and self._scores is None:
            raise RuntimeError("expected score() before backward()")
        self._begun.add(step)
        if self._mode != "score":
            self.ranks.before_ops(self.model)

    def _check_model(self) -> None:
        """Remembers the model at the first forward, compares afterwards."""
        if self._mode == "score":
            return
        if self._guard is None:
            self._guard = ModelGuard(self.model)
        else:
            self._guard.check()

    def _batch(self, index: int) -> TreeBatch:
        return self.window.dummy if index == DUMMY else self.window.batches[index]

    def _counts_by_slice(self, slices: SliceTable, index: int) -> torch.Tensor:
        if index not in self._slice_counts:
            counts = (
                torch.zeros(slices.count, self.window.dummy.num_rows, dtype=torch.float64)
                if index == DUMMY
                else slices.counts(self.window.tree, self.window.part.microbatches[index])
            )
            self._slice_counts[index] = counts.to(self._batch(index).device)
        return self._slice_counts[index]

    def _drop(self, position: int) -> None:
        for trunk in self._lives.drops[position]:
            self.handoff.drop_values(trunk)

    def _compare(self, answered: Answered) -> None:
        tree_rows = answered.tree_rows(LOG_PROB)
        if self._known is not None and len(tree_rows):
            before = self._known[tree_rows]
            differences = (answered.answer["rows"][LOG_PROB].detach() - before).abs()
            self._differences.append(differences.where(~before.isnan(), 0.0).max())

    def _filled(self, scores: TreeValues | None, answered: Answered, names: tuple[str, ...]) -> TreeValues:
        return answered.filled_into(scores, names, self.window.tree.num_tokens)
