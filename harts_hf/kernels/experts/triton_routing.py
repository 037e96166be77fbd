# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""The choice of experts in Triton, one launch forward and one backward; a program holds whole rows of scores."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_ROWS = 4


def route(
    scores: torch.Tensor,
    bias: torch.Tensor,
    *,
    groups: int,
    kept_groups: int,
    count: int,
    normalizes: bool,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`harts_hf.kernels.experts.api.route`.

    Raises:
        ValueError: float64, or numbers of experts and groups that are no powers of two.
    """
    sizes = (scores.shape[1], groups)
    if scores.dtype == torch.float64 or any(size != triton.next_power_of_2(size) for size in sizes):
        raise ValueError(
            f"expected at most float32, and powers of two of experts and groups, got {scores.dtype}, {sizes[0]} and "
            f"{sizes[1]}: use the reference backend"
        )
    weights, chosen = _Route.apply(scores, bias, groups, kept_groups, count, normalizes, factor)
    return weights, chosen


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: torch.Tensor,
        bias: torch.Tensor,
        groups: int,
        kept_groups: int,
        count: int,
        normalizes: bool,
        factor: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores.contiguous()
        rows, experts = scores.shape
        chosen = torch.empty(rows, count, dtype=torch.int64, device=scores.device)
        weights = torch.empty(rows, count, dtype=scores.dtype, device=scores.device)
        if rows:
            _route[(triton.cdiv(rows, _ROWS),)](
                scores, bias, chosen, weights, rows, factor, E=experts, GROUPS=groups, KEPT=kept_groups, K=count,
                NORMALIZES=normalizes, ROWS=_ROWS,
            )  # fmt: skip
        ctx.save_for_backward(scores, chosen)
        ctx.normalizes, ctx.factor = normalizes, factor
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
        scores, chosen = ctx.saved_tensors
        rows, experts = scores.shape
        d_scores = torch.empty_like(scores)
        if rows:
            _route_backward[(triton.cdiv(rows, _ROWS),)](
                scores, chosen, grad.contiguous(), d_scores, rows, ctx.factor, E=experts, K=chosen.shape[1],
                NORMALIZES=ctx.normalizes, ROWS=_ROWS,
            )  # fmt: skip
        return d_scores, *(None,) * 6


@triton.jit
def _without_first_largest(value, columns):
    """The largest of each row, the first column that holds it, and the rows without that column."""
    most = tl.max(value, 1)
    at = tl.min(tl.where(value == most[:, None], columns[None, :], 2147483647), 1)
    return most, at, tl.where(columns[None, :] == at[:, None], float("-inf"), value)


@triton.jit
def _route(
    scores,
    bias,
    chosen,
    weights,
    num_rows,
    factor,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
    NORMALIZES: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, E)
    m_r = rows < num_rows
    score = tl.load(scores + rows[:, None] * E + experts[None, :], mask=m_r[:, None], other=0.0).to(tl.float32)
    value = score + tl.load(bias + experts).to(tl.float32)[None, :]
    if KEPT < GROUPS:
        members = tl.reshape(value, [ROWS * GROUPS, E // GROUPS])
        largest, _, others = _without_first_largest(members, tl.arange(0, E // GROUPS))
        of_group = tl.reshape(largest + tl.max(others, 1), [ROWS, GROUPS])
        group = tl.arange(0, GROUPS)
        is_kept = tl.zeros([ROWS, GROUPS], dtype=tl.int32)
        for _ in tl.static_range(KEPT):
            _, at, of_group = _without_first_largest(of_group, group)
            is_kept += (group[None, :] == at[:, None]).to(tl.int32)
        wide = tl.broadcast_to(tl.reshape(is_kept, [ROWS, GROUPS, 1]), [ROWS, GROUPS, E // GROUPS])
        value = tl.where(tl.reshape(wide, [ROWS, E]) > 0, value, float("-inf"))
    rest = value
    total = tl.zeros([ROWS], dtype=tl.float32)
    for number in tl.static_range(K):
        _, at, rest = _without_first_largest(rest, experts)
        tl.store(chosen + rows * K + number, at.to(tl.int64), mask=m_r)
        total += tl.sum(tl.where(experts[None, :] == at[:, None], score, 0.0), 1)
    rest = value
    for number in tl.static_range(K):
        _, at, rest = _without_first_largest(rest, experts)
        weight = tl.sum(tl.where(experts[None, :] == at[:, None], score, 0.0), 1)
        if NORMALIZES:
            weight = (weight / (total + 1e-20)).to(weights.dtype.element_ty).to(tl.float32)
        tl.store(weights + rows * K + number, (weight * factor).to(weights.dtype.element_ty), mask=m_r)


@triton.jit
def _route_backward(
    scores,
    chosen,
    grad,
    d_scores,
    num_rows,
    factor,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALIZES: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, E)
    m_r = rows < num_rows
    at = rows[:, None] * E + experts[None, :]
    score = tl.load(scores + at, mask=m_r[:, None], other=0.0).to(tl.float32)
    of_expert = tl.zeros([ROWS, E], dtype=tl.float32)
    is_chosen = tl.zeros([ROWS, E], dtype=tl.int32)
    for number in tl.static_range(K):
        expert = tl.load(chosen + rows * K + number, mask=m_r, other=0)
        g = tl.load(grad + rows * K + number, mask=m_r, other=0.0).to(tl.float32) * factor
        here = experts[None, :] == expert[:, None]
        of_expert += tl.where(here, g[:, None], 0.0)
        is_chosen += here.to(tl.int32)
    if NORMALIZES:
        total = tl.sum(tl.where(is_chosen > 0, score, 0.0), 1) + 1e-20
        along = tl.sum(of_expert * score, 1) / total
        of_expert = tl.where(is_chosen > 0, (of_expert - along[:, None]) / total[:, None], 0.0)
    tl.store(d_scores + at, of_expert.to(d_scores.dtype.element_ty), mask=m_r[:, None])
