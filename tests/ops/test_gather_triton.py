"""Gather and pack kernels under Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from harts_hf.batch import GatherIndex, LinearTables
from harts_hf.kernels.gather import reference
from harts_hf.kernels.gather.triton import gather_rows, take_rows
from harts_hf.kernels.linear_attention.fla_tables import build_packed_chains
from harts_hf.kernels.linear_attention.triton_pack import NORM_EPS, pack_rows, unpack_gradients
from harts_hf.planner.chunks import build_chunk_tree
from harts_hf.tree import RolloutTree


@pytest.mark.parametrize("size", [1, 5, 2049])
def test_gather_equals_reference(size: int):
    """Rows, zeros at -1 and gradients equal plain indexing; the sum of at most 40 fp32 terms: 1e-6 relative."""
    rng = np.random.default_rng(size)
    table = GatherIndex.build(rng.integers(-1, 7, 40), 9)
    x = torch.randn(9, size, requires_grad=True)
    x_ref = x.detach().clone().requires_grad_()
    y, y_ref = gather_rows(x, table), reference.gather_rows(x_ref, table)
    assert torch.equal(y, y_ref)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    (dx_ref,) = torch.autograd.grad(y_ref, x_ref, dy)
    torch.testing.assert_close(dx, dx_ref, rtol=1e-6, atol=1e-6)


def test_gather_reads_strided_rows_and_nothing():
    """A column slice of a wider tensor is read in place; no rows and no places are legal."""
    x = torch.randn(6, 10)[:, 2:5]
    assert torch.equal(take_rows(x, torch.tensor([5, 0])), x[[5, 0]])
    assert take_rows(x, torch.zeros(0, dtype=torch.int64)).shape == (0, 3)
    empty = gather_rows(torch.zeros(0, 4, requires_grad=True), GatherIndex.build(np.array([-1, -1]), 0))
    assert torch.equal(empty, torch.zeros(2, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_pack_and_its_gradient(norm: bool, per_channel: bool):
    """Packing is indexing and the norm; gradients are autograd's, but for first tokens' gates: 0 exactly."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 9, 21)
    paths = [np.concatenate([shared[: 5 + 4 * i], rng.integers(10 * i, 10 * i + 9, 13 + 7 * i)]) for i in range(4)]
    tree = RolloutTree.from_trajectories(paths)
    tables = LinearTables.build(build_chunk_tree(tree.parent, tree.depth, 16), np.arange(tree.num_tokens))
    chains = build_packed_chains(tables, np.array([], np.int64), 0)
    rows, heads, dim, value_heads = tree.num_tokens, 3, 12, 6
    wide = torch.randn(rows, 2 * heads * dim + value_heads * 8)
    parts = wide.split([heads * dim, heads * dim, value_heads * 8], dim=1)
    gate = torch.randn(rows, value_heads, dim) if per_channel else torch.randn(rows, value_heads)
    inputs = [
        parts[0].view(rows, heads, dim),
        parts[1].view(rows, heads, dim),
        parts[2].view(rows, value_heads, 8),
        gate,
        torch.rand(rows, value_heads),
    ]
    *packed, q_rstd, k_rstd = pack_rows(*inputs, chains, norm=norm)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    expected = [x[chains.gather.index][None] for x in leaves]
    if norm:
        expected[:2] = [x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in expected[:2]]
    for got, want in zip(packed, expected, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
    gradients = tuple(torch.randn_like(x) for x in packed)
    wanted = torch.autograd.grad(expected, leaves, gradients)
    got = unpack_gradients(gradients, packed[0], packed[1], q_rstd, k_rstd, chains, (torch.float32,) * 5, norm=norm)
    first = chains.starts_from_nothing.bool()
    assert first.sum() == 1 and first[0]
    assert (got[3][first] == 0).all()
    wanted[3][first] = 0
    for one, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-5)


def test_float64_is_refused():
    """It would be summed in float32."""
    with pytest.raises(ValueError, match="got float64"):
        gather_rows(torch.zeros(1, 2, dtype=torch.float64), GatherIndex.build(np.array([0]), 1))
