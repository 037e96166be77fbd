"""Log-probabilities a chunk of rows at a time; the backward computes each chunk's logits again.

The contract (temperature, softcap, float32 sums, an entropy gradient that is paid for only if it arrives) is that of
TRL's ``trl/kernels/chunked_logprob.py``; there each row has one label.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from harts_hf.batch.tables import moved_together
from harts_hf.kernels.checks import exact_backward, wide_dtype


@dataclass(frozen=True)
class _Head:
    """From hidden rows to ``z``, whose softmax is the distribution."""

    compute_dtype: torch.dtype
    wide: torch.dtype
    temperature: float
    logit_scale: float
    softcap: float | None
    fused: bool  # whether Triton's kernels compute what follows a product

    @property
    def factor(self) -> float:
        """Of the logits, where there is no cap."""
        return self.logit_scale / self.temperature

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``[n, D]``, ``[V, D]`` -> ``[n, V]`` in the dtype of the product."""
        logits = hidden.to(self.compute_dtype) @ weight.T
        if bias is not None:
            logits += bias.to(self.compute_dtype)
        return logits

    def product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``[n, D]``, ``[V, D]`` -> scaled logits ``[n, V]`` before the cap, in the wide dtype."""
        return self.logits(hidden, weight, bias).to(self.wide).mul_(self.logit_scale)

    def cap_(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``z`` (in place of ``y``) and the ``tanh`` that its gradient needs."""
        if self.softcap is None:
            return y.div_(self.temperature), None
        tanh = y.div_(self.softcap).tanh_()
        return tanh * (self.softcap / self.temperature), tanh

    def cap_backward_(self, grad: torch.Tensor, tanh: torch.Tensor | None) -> torch.Tensor:
        """Gradient of the logits (in place of ``grad``) from that of ``z``."""
        grad.mul_(self.logit_scale / self.temperature)
        return grad if tanh is None else grad.mul_(1 - tanh * tanh)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    return_entropy: bool,
    return_top1: bool,
    max_chunk_elements: int,
    host_rows: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See :func:`harts_hf.kernels.logprobs.api.token_logprobs`; with ``fused`` what follows each product is Triton's.

    Raises:
        ValueError: ``fused`` with a cap or float64.
    """
    device = hidden.device.type
    compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    wide = wide_dtype(hidden)
    if fused and (softcap is not None or wide == torch.float64):
        raise ValueError("expected no cap and at most float32 of Triton's kernels: use the torch backend")
    head = _Head(compute_dtype, wide, temperature, logit_scale, softcap, fused)
    chunk_rows = max(1, max_chunk_elements // weight.shape[0])
    host_rows = rows.cpu() if host_rows is None else host_rows  # from here on, nothing reads them on a GPU
    with torch.autocast(device, enabled=False):
        return _TokenLogprobs.apply(
            hidden, weight, bias, host_rows, labels, head, chunk_rows, return_entropy, return_top1
        )


@dataclass(frozen=True)
class _Chunk:
    rows: torch.Tensor  # [n] unique hidden rows
    counts: torch.Tensor  # [n] labels of each
    labels: slice  # their labels, a range of the P ones
    row_of_label: torch.Tensor  # [labels] position in `rows`


def _chunks(host_rows: torch.Tensor, chunk_rows: int, device: torch.device) -> Iterator[_Chunk]:
    """Chunks of at most so many rows; what they are is found on the CPU, so that a GPU is not waited for."""
    unique, inverse, counts = torch.unique_consecutive(host_rows, return_inverse=True, return_counts=True)
    stops = counts.cumsum(0).tolist()
    unique, inverse, counts = moved_together([unique, inverse, counts], device)
    for start in range(0, len(unique), chunk_rows):
        stop = min(start + chunk_rows, len(unique))
        labels = slice(stops[start - 1] if start else 0, stops[stop - 1])
        yield _Chunk(unique[start:stop], counts[start:stop], labels, inverse[labels] - start)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        host_rows: torch.Tensor,
        labels: torch.Tensor,
        head: _Head,
        chunk_rows: int,
        return_entropy: bool,
        return_top1: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        logp = hidden.new_empty(len(labels), dtype=head.wide)
        entropy = torch.empty_like(logp) if return_entropy else None
        is_top1 = torch.empty_like(logp) if return_top1 else None
        used_weight = weight.to(head.compute_dtype)
        for chunk in _chunks(host_rows, chunk_rows, hidden.device):
            if head.fused:
                logits = head.logits(hidden.index_select(0, chunk.rows), used_weight, bias)
                logp[chunk.labels], found = _fused_values(logits, chunk, labels, head, return_entropy)
                if entropy is not None:
                    entropy[chunk.labels] = found
                if is_top1 is not None:
                    is_top1[chunk.labels] = _is_top1(logits, chunk, labels)
                continue
            z, _ = head.cap_(head.product(hidden.index_select(0, chunk.rows), used_weight, bias))
            if is_top1 is not None:
                is_top1[chunk.labels] = _is_top1(z, chunk, labels)
            log_total = z.logsumexp(dim=1)
            position = chunk.row_of_label
            logp[chunk.labels] = z[position, labels[chunk.labels]] - log_total[position]
            if entropy is not None:
                log_p = z.sub_(log_total[:, None])
                entropy[chunk.labels] = -(log_p.exp() * log_p).sum(dim=1)[position]
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.head, ctx.chunk_rows, ctx.host_rows = head, chunk_rows, host_rows
        if is_top1 is not None:
            ctx.mark_non_differentiable(is_top1)
        return logp, entropy, is_top1

    @staticmethod
    @exact_backward
    def backward(
        ctx: Any, grad_logp: torch.Tensor | None, grad_entropy: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        head, wide = ctx.head, ctx.head.wide
        rows, labels, grad_logp, grad_entropy = _with_gradient(ctx.host_rows, labels, grad_logp, grad_entropy)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Each row is in one chunk; weight and bias are summed over chunks in the wide dtype and rounded once.
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        used_weight = weight.to(head.compute_dtype)
        asked = grad_logp is not None or grad_entropy is not None
        for chunk in _chunks(rows, ctx.chunk_rows, hidden.device) if asked else ():
            chunk_hidden = hidden.index_select(0, chunk.rows).to(head.compute_dtype)
            if head.fused:
                logits = head.logits(chunk_hidden, used_weight, bias)
                grad = _fused_gradient(logits, chunk, labels, head, grad_logp, grad_entropy)
            else:
                z, tanh = head.cap_(head.product(chunk_hidden, used_weight, bias))
                grad = _logits_gradient(z, chunk, labels, grad_logp, grad_entropy)
                # Rounded to the dtype of the product, as autograd would, but multiplied and summed in the wide one.
                grad = head.cap_backward_(grad, tanh).to(head.compute_dtype)
            if grad_hidden is not None:
                total = grad.new_zeros(len(grad), weight.shape[1], dtype=wide)
                grad_hidden[chunk.rows] = _add_product_(total, grad, used_weight).to(hidden.dtype)
            if grad_weight is not None:
                _add_product_(grad_weight, grad.T, chunk_hidden)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0, dtype=wide)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 6,
        )


def _is_top1(logits: torch.Tensor, chunk: _Chunk, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=1)[chunk.row_of_label] == labels[chunk.labels]


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``total += a @ b`` in the wide dtype of ``total``, without rounding the product first."""
    if total.is_cuda and a.dtype != total.dtype:  # tensor cores multiply bf16 and add in fp32
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _with_gradient(
    host_rows: torch.Tensor, labels: torch.Tensor, *gradients: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The labels whose gradients are not all zero: others cost nothing, and logits of theirs that overflow are not
    multiplied by zero, which would be NaN. Rows stay on the CPU.
    """
    needed = torch.zeros_like(labels, dtype=torch.bool)
    for gradient in gradients:
        if gradient is not None:
            needed |= gradient != 0
    kept = needed.cpu().nonzero().squeeze(1)  # the one wait for a GPU
    if len(kept) == len(host_rows):
        return host_rows, labels, *gradients  # type: ignore[return-value]
    (there,) = moved_together([kept], labels.device)
    kept_gradients = (None if g is None else g[there] for g in gradients)
    return host_rows[kept], labels[there], *kept_gradients  # type: ignore[return-value]


def _logits_gradient(
    z: torch.Tensor,
    chunk: _Chunk,
    labels: torch.Tensor,
    grad_logp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient ``[n, V]`` of ``z``: ``sum_l g_l (1[label_l] - p)``; for entropies ``-sum_l g_l p (log p + H)``."""
    log_p = torch.log_softmax(z, dim=1)
    p = log_p.exp()
    grad = torch.zeros_like(p)
    if grad_entropy is not None:
        total = _sum_by_row(grad_entropy[chunk.labels].to(z.dtype), chunk)
        entropy = -(p * log_p).sum(dim=1, keepdim=True)
        grad.sub_(total * p * (log_p + entropy))
    if grad_logp is not None:
        upstream = grad_logp[chunk.labels].to(z.dtype)
        grad.sub_(_sum_by_row(upstream, chunk) * p)
        grad.index_put_((chunk.row_of_label, labels[chunk.labels]), upstream, accumulate=True)
    return grad


def _fused_values(
    logits: torch.Tensor, chunk: _Chunk, labels: torch.Tensor, head: _Head, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[labels]`` log-probs, and entropies if asked for (else something of that shape)."""
    from harts_hf.kernels.logprobs import triton

    total, entropies = triton.statistics(logits, head.factor, entropy=entropy)
    position = chunk.row_of_label
    z = logits[position, labels[chunk.labels]].to(head.wide) * head.factor
    return z - total[position], entropies[position]


def _fused_gradient(
    logits: torch.Tensor,
    chunk: _Chunk,
    labels: torch.Tensor,
    head: _Head,
    grad_logp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient ``[n, V]`` of the logits, in their place and dtype."""
    from harts_hf.kernels.logprobs import triton

    total, entropies = triton.statistics(logits, head.factor, entropy=grad_entropy is not None)
    of_labels = [None if g is None else g[chunk.labels].to(head.wide) for g in (grad_entropy, grad_logp)]
    d_entropy, d_row = (None if g is None else _sum_by_row(g, chunk).squeeze(1) for g in of_labels)
    ptr = torch.nn.functional.pad(chunk.counts.cumsum(0), (1, 0))
    return triton.gradient_(
        logits, head.factor, total, entropies, d_entropy, of_labels[1], d_row, labels[chunk.labels], ptr
    )


def _sum_by_row(values: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """``[n, 1]`` sums over the labels of each row, in their order."""
    return torch.segment_reduce(values, "sum", lengths=chunk.counts, unsafe=True)[:, None]
