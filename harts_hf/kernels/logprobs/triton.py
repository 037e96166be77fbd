# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""What the head computes of a chunk of logits in Triton: each logit is read once a pass, in the dtype of the product.

Plain PyTorch goes over float32 copies of the logits some twenty times. Sums over the vocabulary are in float32, in a
fixed order.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


def statistics(logits: torch.Tensor, factor: float, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``z = factor * logits``: ``log sum exp z`` of each row and, if asked for, the entropy of its softmax.

    Args:
        logits: ``[n, V]`` contiguous.
        factor: of the logits.
        entropy: whether entropies are computed; they are the first result again if not.

    Returns:
        ``[n]`` float32 each.
    """
    total = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    entropies = torch.empty_like(total) if entropy else total
    if len(logits):
        _statistics[(len(logits),)](
            logits, factor, total, entropies, V=logits.shape[1], BLOCK=_BLOCK, ENTROPY=entropy, num_warps=8
        )
    return total, entropies


def gradient_(
    logits: torch.Tensor,
    factor: float,
    total: torch.Tensor,
    entropies: torch.Tensor,
    d_entropy: torch.Tensor | None,
    d_logp: torch.Tensor | None,
    d_row: torch.Tensor | None,
    labels: torch.Tensor,
    label_ptr: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the logits, in their place: ``factor * (sum_l d_l (1[l] - p) - d_entropy p (log p + H))``.

    Args:
        logits: ``[n, V]`` contiguous; overwritten.
        factor: as in :func:`statistics`.
        total, entropies: what that gave.
        d_entropy: ``[n]`` float32, summed over each row's labels, or None.
        d_logp: ``[l]`` float32 of each label, or None.
        d_row: ``[n]`` float32, ``d_logp`` summed over each row's labels, or None.
        labels: ``[l]`` int64, row after row.
        label_ptr: ``[n + 1]`` int64, where each row's labels begin.
    """
    if len(logits):
        grid = (len(logits), triton.cdiv(logits.shape[1], _BLOCK))
        _gradient[grid](
            logits, factor, total, entropies, d_entropy, d_logp, d_row, labels, label_ptr,
            V=logits.shape[1], BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return logits


@triton.jit
def _statistics(logits, factor, total, entropies, V: tl.constexpr, BLOCK: tl.constexpr, ENTROPY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    # Of each lane: the largest so far, and sums of exp(z - it) and of z exp(z - it).
    most = tl.full([BLOCK], -1e30, tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    weighted = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, V, BLOCK):
        is_column = first + cols < V
        z = tl.load(logits + row * V + first + cols, mask=is_column, other=0.0).to(tl.float32) * factor
        above = tl.where(is_column, tl.maximum(most, z), most)
        shrink = tl.exp(most - above)
        part = tl.where(is_column, tl.exp(z - above), 0.0)
        sums = sums * shrink + part
        weighted = weighted * shrink + part * z
        most = above
    top = tl.max(most, 0)
    scale = tl.exp(most - top)
    sum = tl.sum(sums * scale, 0)
    log_sum = top + tl.log(sum)
    tl.store(total + row, log_sum)
    if ENTROPY:
        tl.store(entropies + row, log_sum - tl.sum(weighted * scale, 0) / sum)


@triton.jit
def _gradient(
    logits,
    factor,
    total,
    entropies,
    d_entropy,
    d_logp,
    d_row,
    labels,
    label_ptr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * V + cols
    log_p = tl.load(at, mask=cols < V, other=0.0).to(tl.float32) * factor - tl.load(total + row)
    p = tl.exp(log_p)
    grad = tl.zeros([BLOCK], dtype=tl.float32)
    if d_entropy is not None:
        grad -= tl.load(d_entropy + row) * p * (log_p + tl.load(entropies + row))
    if d_logp is not None:
        grad -= tl.load(d_row + row) * p
        begin, end = tl.load(label_ptr + row), tl.load(label_ptr + row + 1)
        for number in range(begin, end):
            grad += tl.where(cols == tl.load(labels + number), tl.load(d_logp + number), 0.0)
    tl.store(at, (grad * factor).to(logits.dtype.element_ty), mask=cols < V)
