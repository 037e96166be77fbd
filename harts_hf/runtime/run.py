"""Runs the schedule of a window: scoring, and forwards and backwards in the planned order."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from harts_hf.batch import LabelTable, TreeBatch
from harts_hf.modeling import ScoreRequest, TreeOutput
from harts_hf.modeling.handoff import Handoff
from harts_hf.planner.execution import DUMMY, Op
from harts_hf.runtime.guard import ModelGuard
from harts_hf.runtime.lives import count_readers, handoff_lives
from harts_hf.runtime.window import TreeWindow

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """Per row of the tree, as the token of the row was predicted by the row before it.

    Attributes:
        log_probs: ``[N]`` log-probability, float32 or wider; 0 at roots, which nothing predicts.
        entropy: ``[N]`` entropy of the distribution that the token was drawn from, or None; 0 at roots.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Coefficients:
    """Derivatives of a loss by each row's log-prob and entropy, summed over the trajectories that share the row.

    Attributes:
        log_probs: ``[N]``.
        entropy: ``[N]``, or None where the loss does not depend on entropies.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None

    def needed(self, rows: torch.Tensor) -> torch.Tensor:
        """``[P]`` bool, where a coefficient of these rows is not zero."""
        needed = self.log_probs[rows] != 0
        return needed if self.entropy is None else needed | (self.entropy[rows] != 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadOptions:
    """How labels are scored: see :class:`harts_hf.modeling.ScoreRequest`."""

    temperature: float = 1.0
    head_in_fp32: bool = False


class WindowRun:
    """One pass of a window through a model: :meth:`score`, a loss outside, then :meth:`backward`, once each.

    Args:
        model: a patched model, wrapped or not; called through its root.
        scoring_model: what forwards without gradients call; ``model`` if None.
        window: moved to the model's device.
        options: temperature and head.
        context: entered around each forward (autocast).
        offload: whether handed states lie on the CPU between uses.
        expand_latents: whether an MLA hands over expanded keys and values instead of latents.
        deterministic: whether attention on a GPU has to be bitwise reproducible (a slower backend).
        count: microbatches that every rank runs; dummies of one token and no weight fill up. None for the own ones.
        sync_context: entered around each forward and its backward where they stand together, with whether they are
            the last.
        mode: "train" for :meth:`score` and :meth:`backward`; "score" for :meth:`score` alone; "unscored" for
            :meth:`backward_unscored` alone.
    """

    def __init__(
        self,
        model: nn.Module,
        window: TreeWindow,
        options: HeadOptions | None = None,
        *,
        context: Context = nullcontext,
        offload: bool = False,
        expand_latents: bool = False,
        deterministic: bool = False,
        scoring_model: nn.Module | None = None,
        count: int | None = None,
        sync_context: Callable[[bool], AbstractContextManager[object]] = lambda is_last: nullcontext(),
        mode: Literal["train", "score", "unscored"] = "train",
    ) -> None:
        self.model, self.window, self.context = model, window, context
        self.scoring_model = model if scoring_model is None else scoring_model
        self.options = options or HeadOptions()
        self.handoff = Handoff(count_readers(window.batches), offload=offload, expand_latents=expand_latents)
        self.deterministic = deterministic
        self.recompute_difference = 0.0
        self._sync_context = sync_context
        self._ops, self._num_scoring = _ops_of(window, mode, count)
        self._lives = handoff_lives(self._ops, window.batches)
        self._outputs: dict[int, tuple[TreeOutput, LabelTable]] = {}
        self._scores: Scores | None = None
        self._return_entropy = False
        self._mode = mode
        self._begun: set[str] = set()
        self._guard: ModelGuard | None = None

    def score(self, *, return_entropy: bool = False) -> Scores:
        """Every log-prob (and entropy) of the window.

        In the "keep" execution this runs every forward with its graph; in the others the ``S`` pass, without.

        Raises:
            RuntimeError: a second call, or a run whose mode is "unscored".
            ModelChangedError: the model was changed since the first forward.
        """
        self._begin("score", ("train", "score"))
        self._return_entropy = return_entropy
        scores: Scores | None = None
        for place in range(self._num_scoring):
            kind, index = self._ops[place]
            labels = self._batch(index).labels
            out = self._forward(place, labels)
            if index != DUMMY:
                scores = self._with(scores, out, labels)
            if kind == "F":
                self._outputs[index] = (out, labels)
        assert scores is not None
        self._scores = scores
        return scores

    def backward(self, coefficients: Coefficients, backward: Callable[[torch.Tensor], None]) -> None:
        """The rest of the schedule: the exact gradient of the loss that the coefficients are derivatives of.

        The backward of the inner product of log-probs and coefficients is that gradient, by the chain rule. Head rows
        are computed only where a coefficient is not zero. The largest difference of a log-prob computed again from its
        score is left in ``recompute_difference``.

        Args:
            coefficients: on the model's device.
            backward: called with each microbatch's scalar.

        Raises:
            RuntimeError: no :meth:`score` before, a second call, or a run whose mode is not "train".
            ModelChangedError: the model was changed since the first forward; see :mod:`harts_hf.runtime.guard`.
        """
        self._begin("backward", ("train",))
        if coefficients.entropy is not None and not bool((coefficients.entropy != 0).any()):
            coefficients = Coefficients(log_probs=coefficients.log_probs)
        self._return_entropy = coefficients.entropy is not None
        self._train(coefficients, backward, coefficients.needed)

    def backward_unscored(
        self, coefficients: Coefficients, backward: Callable[[torch.Tensor], None], wanted: torch.Tensor
    ) -> Scores:
        """The schedule without a scoring pass, for coefficients that do not depend on log-probs.

        Args:
            coefficients: on the model's device; none of entropies.
            backward: called with each microbatch's scalar.
            wanted: ``[N]`` bool, rows whose log-probs and entropies are asked for, among them every row with a
                coefficient.

        Returns:
            Scores of the wanted rows, 0 elsewhere.

        Raises:
            RuntimeError: a second call, or a run whose mode is not "unscored".
            ModelChangedError: the model was changed since the first forward; see :mod:`harts_hf.runtime.guard`.
        """
        self._begin("backward", ("unscored",))
        self._return_entropy = True
        self._train(coefficients, backward, lambda rows: wanted[rows])
        assert self._scores is not None
        return self._scores

    def _train(
        self,
        coefficients: Coefficients,
        backward: Callable[[torch.Tensor], None],
        wanted: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        scored = self._scores is not None
        if self._guard is not None:
            self._guard.check_all()
        together = ExitStack()
        for place in range(self._num_scoring, len(self._ops)):
            kind, index = self._ops[place]
            labels = self._batch(index).labels
            if kind == "S":  # only for what it hands over
                self._forward(place, _select(labels, torch.zeros_like(labels.rows, dtype=torch.bool)))
            elif kind == "F":
                if self._ops[place + 1] == ("B", index):
                    together.enter_context(self._sync_context(place + 2 == len(self._ops)))
                labels = _select(labels, wanted(labels.tree_rows))
                self._outputs[index] = (self._forward(place, labels), labels)
                if not scored:
                    self._scores = self._with(self._scores, self._outputs[index][0], labels)
            else:
                out, labels = self._outputs.pop(index)
                self._compare(out, labels)
                self._check_model()
                self._bind(index)  # activation checkpointing reads what is handed over again
                backward(_inner_product(out, labels, coefficients))
                del out  # what is left of its graph
                together.close()
                self._drop(place)
                self.handoff.free(index)

    def _forward(self, place: int, labels: LabelTable) -> TreeOutput:
        kind, index = self._ops[place]
        self._check_model()
        self._bind(index)
        request = ScoreRequest(
            labels,
            temperature=self.options.temperature,
            return_entropy=self._return_entropy,
            head_in_fp32=self.options.head_in_fp32,
        )
        self.handoff.keeping = self._lives.keeps[place]
        batch = self._batch(index)
        # Triton launches on the current GPU, wherever its arguments are (autograd sets it for backwards itself).
        on_device = torch.cuda.device_of(batch.input_ids)
        try:
            with on_device, torch.set_grad_enabled(kind == "F"), self.context():
                model = self.model if kind == "F" else self.scoring_model
                out: TreeOutput = model(harts=batch, harts_score=request)
        finally:
            self.handoff.keeping = False
        self._drop(place)
        return out

    def _begin(self, step: str, modes: tuple[str, ...]) -> None:
        if self._mode not in modes:
            raise RuntimeError(f"expected a WindowRun of mode {' or '.join(modes)} for this, got {self._mode!r}")
        if step in self._begun:
            raise RuntimeError(f"{step} a second time: the schedule of a WindowRun runs once")
        if step == "backward" and self._mode == "train" and self._scores is None:
            raise RuntimeError("expected score() before backward()")
        self._begun.add(step)

    def _check_model(self) -> None:
        """Remembers the model at the first forward, compares afterwards."""
        if self._mode == "score":
            return
        if self._guard is None:
            self._guard = ModelGuard(self.model)
        else:
            self._guard.check()

    def _bind(self, index: int) -> None:
        """Lets a microbatch hand over through this run: another run of the window may have come between."""
        batch = self._batch(index)
        batch.handoff = self.handoff if batch.imports or batch.exports else None
        batch.deterministic = self.deterministic

    def _batch(self, index: int) -> TreeBatch:
        return self.window.dummy if index == DUMMY else self.window.batches[index]

    def _drop(self, place: int) -> None:
        for trunk in self._lives.drops[place]:
            self.handoff.drop_values(trunk)

    def _compare(self, out: TreeOutput, labels: LabelTable) -> None:
        if self._scores is not None and len(labels.rows):
            before = self._scores.log_probs[labels.tree_rows]
            difference = (out.log_probs.detach() - before).abs().max().item()
            self.recompute_difference = max(self.recompute_difference, difference)

    def _with(self, scores: Scores | None, out: TreeOutput, labels: LabelTable) -> Scores:
        """``scores`` with those of some labels filled in."""
        if scores is None:
            zeros = out.log_probs.new_zeros(self.window.tree.num_tokens)
            scores = Scores(log_probs=zeros, entropy=zeros.clone() if self._return_entropy else None)
        scores.log_probs[labels.tree_rows] = out.log_probs.detach()
        if scores.entropy is not None and out.entropy is not None:
            scores.entropy[labels.tree_rows] = out.entropy.detach()
        return scores


def _ops_of(window: TreeWindow, mode: str, count: int | None) -> tuple[list[Op], int]:
    """The ops of a run, and how many of them are the scoring pass.

    Unless a run is unscored, the first forward of each microbatch comes first and scores it.
    """
    schedule, own = window.schedule, len(window.batches)
    dummies = 0 if count is None else count - own
    scoring: list[Op] = [("S", index) for index in range(own)] + [("S", DUMMY)] * dummies
    if mode == "score":
        return scoring, len(scoring)
    planned = schedule.ops(dummies=False)
    if count is not None:
        if schedule.execution != "replay":
            raise ValueError(f"expected the replay execution with several ranks, got {schedule.execution}")
        filling: list[Op] = [("F", DUMMY), ("B", DUMMY)] * dummies
        return scoring + filling + planned[own:], len(scoring)
    if own == 1:  # one graph is alive in any case, so scoring apart would only cost a forward
        return [("F", 0), ("B", 0)], int(mode == "train")
    if mode == "unscored":
        if schedule.execution != "nested":
            raise ValueError(f"expected the nested execution without a scoring pass, got {schedule.execution}")
        return planned, 0
    return scoring + planned if schedule.execution == "nested" else planned, own


@torch.enable_grad()  # a backward of autograd runs without
def _inner_product(out: TreeOutput, labels: LabelTable, coefficients: Coefficients) -> torch.Tensor:
    scalar = (out.log_probs * coefficients.log_probs[labels.tree_rows].to(out.log_probs.dtype)).sum()
    if coefficients.entropy is not None:
        assert out.entropy is not None
        scalar = scalar + (out.entropy * coefficients.entropy[labels.tree_rows].to(out.entropy.dtype)).sum()
    return scalar


def _select(labels: LabelTable, needed: torch.Tensor) -> LabelTable:
    return LabelTable(rows=labels.rows[needed], token_ids=labels.token_ids[needed], tree_rows=labels.tree_rows[needed])
