"""Log-probabilities and entropies of labels without all logits at once."""

from typing import Any, NamedTuple

import torch

from harts_hf.kernels.checks import check_floating, check_same_device, check_shape, choose_backend
from harts_hf.kernels.logprobs import reference
from harts_hf.kernels.logprobs import torch as torch_backend

# On a GPU Triton's kernels follow PyTorch's products, except where there is a cap.
_BY_DEVICE = {"cpu": "torch", "cuda": "triton"}


class TokenValues(NamedTuple):
    """Of labels, ``[P]`` each; what was not asked for is None.

    Attributes:
        log_prob: float32 or wider.
        entropy: of the distribution that the label is drawn from, as typed.
        is_top1: 1 where the label is the likeliest token (the first of equals), else 0, as typed; has no gradient.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    is_top1: torch.Tensor | None


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    return_top1: bool = False,
    max_chunk_elements: int = 2**26,
    host_rows: torch.Tensor | None = None,
    backend: str | None = None,
) -> TokenValues:
    """``log softmax(z)[labels[p]]`` with ``z = cap(logit_scale * (hidden[rows[p]] @ weight.T + bias)) / temperature``
    and ``cap(y) = softcap * tanh(y / softcap)``, that distribution's entropy, and whether the label is its likeliest.

    A row may have several labels (a branching row predicts the first token of each branch); its logits are computed
    once. The matrix product runs in the dtype of ``hidden`` (the autocast dtype under autocast) and everything after
    it, gradient sums included, in float32 or wider. The backward computes the logits again, a chunk of rows at a time,
    and pays for the entropy's gradient only if one arrives. It is deterministic.

    Args:
        hidden: ``[R, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        rows: ``[P]`` int64, ascending.
        labels: ``[P]`` int64 in ``[0, V)``.
        temperature: more than 0.
        logit_scale: factor of the logits.
        softcap: bound of the logits, None for no bound.
        return_entropy: whether to compute entropies.
        return_top1: whether to say which labels are the likeliest.
        max_chunk_elements: most logits that are alive at once (at least one row of them is).
        host_rows: ``rows`` on the CPU, so that a GPU need not be waited for to know them; copied from it if None.
        backend: "torch", "triton" (no cap, at most float32) or "reference"; None chooses by device.

    Returns:
        The values. With ``P = 0`` log-probs and entropies stay connected to ``hidden`` and ``weight``: the backward
        gives them zero gradients.

    Raises:
        ValueError: shapes, dtypes, devices, values or backend other than stated.
    """
    check_floating(hidden=hidden, weight=weight)
    check_shape("hidden", hidden, ("R", "D"))
    check_shape("weight", weight, ("V", hidden.shape[1]))
    check_shape("rows", rows, ("P",))
    check_shape("labels", labels, (len(rows),))
    if host_rows is not None:
        check_shape("host_rows", host_rows, (len(rows),))
    if bias is not None:
        check_floating(bias=bias)
        check_shape("bias", bias, (weight.shape[0],))
    for name, value in (("rows", rows), ("labels", labels)):
        if value.dtype != torch.int64:
            raise ValueError(f"expected {name} to be int64, got {value.dtype}")
    for name, number in (
        ("temperature", temperature),
        ("softcap", softcap),
        ("max_chunk_elements", max_chunk_elements),
    ):
        if number is not None and not number > 0:
            raise ValueError(f"expected {name} to be more than 0, got {number}")
    check_same_device(hidden=hidden, weight=weight, bias=bias, rows=rows, labels=labels)
    if hidden.device.type == "cpu":  # on a GPU reading values back would stall it; indexing fails there by itself
        _check_values(rows, labels, num_rows=hidden.shape[0], vocabulary=weight.shape[0])
    if backend is None and softcap is not None:
        backend = "torch"
    chosen = choose_backend("token_logprobs", backend, hidden.device, by_device=_BY_DEVICE, dtype=hidden.dtype)
    run = reference.token_logprobs if chosen == "reference" else torch_backend.token_logprobs
    more: dict[str, Any] = {} if chosen == "reference" else {"host_rows": host_rows, "fused": chosen == "triton"}
    found = run(
        hidden,
        weight,
        bias,
        rows,
        labels,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        return_entropy=return_entropy,
        return_top1=return_top1,
        max_chunk_elements=max_chunk_elements,
        **more,
    )
    return TokenValues(*found)


def _check_values(rows: torch.Tensor, labels: torch.Tensor, *, num_rows: int, vocabulary: int) -> None:
    if not len(rows):
        return
    if (rows.diff() < 0).any() or rows[0] < 0 or rows[-1] >= num_rows:
        raise ValueError(f"expected rows ascending in [0, {num_rows}), got {rows.tolist()[:10]}...")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"expected labels in [0, {vocabulary}), got {low} to {high}")
