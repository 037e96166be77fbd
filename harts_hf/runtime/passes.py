"""The passes of a window: scoring without gradients, and forwards and backwards with given coefficients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from harts_hf.batch import LabelTable, TreeBatch
from harts_hf.modeling import ScoreRequest, TreeOutput
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
class HeadOptions:
    """How labels are scored: see :class:`harts_hf.modeling.ScoreRequest`."""

    temperature: float = 1.0
    head_in_fp32: bool = False

    def request(self, labels: LabelTable, *, return_entropy: bool) -> ScoreRequest:
        """A request for these labels."""
        return ScoreRequest(
            labels, temperature=self.temperature, return_entropy=return_entropy, head_in_fp32=self.head_in_fp32
        )


def forward_microbatch(
    model: nn.Module, batch: TreeBatch, labels: LabelTable, options: HeadOptions, *, return_entropy: bool
) -> TreeOutput:
    """One forward of a patched model, wrapped or not, through its root."""
    return model(harts=batch, harts_score=options.request(labels, return_entropy=return_entropy))


@torch.no_grad()
def score(
    model: nn.Module,
    window: TreeWindow,
    options: HeadOptions | None = None,
    *,
    return_entropy: bool = False,
    context: Context = nullcontext,
) -> Scores:
    """The ``S`` pass: every log-prob (and entropy) of the window, without gradients.

    Args:
        model: a patched model.
        window: moved to the model's device.
        options: temperature and head.
        return_entropy: whether to compute entropies.
        context: entered around each forward (autocast).
    """
    options = options or HeadOptions()
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    for batch in window.batches:
        with context():
            out = forward_microbatch(model, batch, batch.labels, options, return_entropy=return_entropy)
        log_probs = _scatter(log_probs, out.log_probs, batch, window)
        if return_entropy:
            entropy = _scatter(entropy, out.entropy, batch, window)
    assert log_probs is not None
    return Scores(log_probs=log_probs, entropy=entropy)


def run_backward(
    model: nn.Module,
    window: TreeWindow,
    log_prob_gradients: torch.Tensor,
    entropy_gradients: torch.Tensor | None,
    backward: Callable[[torch.Tensor], None],
    options: HeadOptions | None = None,
    *,
    context: Context = nullcontext,
    compare_with: Scores | None = None,
) -> float:
    """The ``F B`` passes: each microbatch forward with a graph, then at once its backward.

    The coefficients are the derivatives of a loss by each row's log-prob and entropy, summed over the trajectories
    that share the row; backward of the inner product with them is the exact gradient of that loss (the chain rule).
    Head rows are computed only where a coefficient is not zero.

    Args:
        model: a patched model.
        window: moved to the model's device.
        log_prob_gradients: ``[N]`` coefficients of the log-probs.
        entropy_gradients: ``[N]`` coefficients of the entropies, or None for none.
        backward: called with each microbatch's scalar.
        options: temperature and head, as in the scoring pass.
        context: entered around each forward (autocast).
        compare_with: scores of the same weights.

    Returns:
        The largest difference of a recomputed log-prob from ``compare_with``, or 0 without it.
    """
    options = options or HeadOptions()
    difference = 0.0
    with_entropy = entropy_gradients is not None and bool((entropy_gradients != 0).any())
    for batch in window.batches:
        weights = log_prob_gradients[batch.labels.tree_rows]
        entropy_weights = entropy_gradients[batch.labels.tree_rows] if with_entropy else None  # type: ignore[index]
        needed = weights != 0 if entropy_weights is None else (weights != 0) | (entropy_weights != 0)
        labels = _select(batch.labels, needed)
        with torch.enable_grad():
            with context():
                out = forward_microbatch(model, batch, labels, options, return_entropy=with_entropy)
            scalar = (out.log_probs * weights[needed].to(out.log_probs.dtype)).sum()
            if entropy_weights is not None and out.entropy is not None:
                scalar = scalar + (out.entropy * entropy_weights[needed].to(out.entropy.dtype)).sum()
        backward(scalar)
        if compare_with is not None and len(labels.rows):
            before = compare_with.log_probs[labels.tree_rows]
            difference = max(difference, (out.log_probs.detach() - before).abs().max().item())
    return difference


def _select(labels: LabelTable, needed: torch.Tensor) -> LabelTable:
    return LabelTable(rows=labels.rows[needed], token_ids=labels.token_ids[needed], tree_rows=labels.tree_rows[needed])


def _scatter(
    into: torch.Tensor | None, values: torch.Tensor | None, batch: TreeBatch, window: TreeWindow
) -> torch.Tensor:
    assert values is not None
    if into is None:
        into = values.new_zeros(window.tree.num_tokens)
    into[batch.labels.tree_rows] = values
    return into
