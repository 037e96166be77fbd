"""The convolution kernels under Triton's interpreter, against the reference."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from harts_hf.batch import ConvTable, GatherIndex
from harts_hf.kernels.conv import reference
from harts_hf.kernels.conv.triton import readers, tree_causal_conv1d
from harts_hf.tree import RolloutTree


def conv_table(tree: RolloutTree, width: int, handed: int = 0) -> ConvTable:
    """Ancestors over ``handed`` rows that no own row descends from, then the tree's."""
    columns = [np.arange(tree.num_tokens)]
    for _ in range(width - 1):
        columns.append(np.append(tree.parent, -1)[columns[-1]])
    index = np.stack(columns[::-1], axis=1).ravel()
    index = np.where(index >= 0, index + handed, -1)
    return ConvTable(gather=GatherIndex.build(index, tree.num_tokens + handed), width=width)


def branchy_tree() -> RolloutTree:
    """A stem of 5 tokens with 30 branches of 1 to 4 tokens: the rows before the fork are read by many."""
    stem = np.arange(5)
    return RolloutTree.from_trajectories(
        [np.concatenate([stem, np.full(1 + i % 4, 100 + i)]) for i in range(30)] + [np.array([7, 8])]
    )


@pytest.mark.essential("4-True-True")
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("width", "bias"), [(4, False), (4, True), (2, False), (3, True)])
def test_conv_equals_reference(silu: bool, width: int, bias: bool):
    """Outputs and all gradients equal the reference's; fp32 sums of at most 120 terms in another order: 1e-5."""
    tree, channels = branchy_tree(), 40
    table = conv_table(tree, width, handed=2)
    assert len(readers(table).heavy)
    x = torch.randn(tree.num_tokens + 2, 3 * channels)[:, channels : 2 * channels]
    leaves = [x.detach().clone().requires_grad_() for x in (x, torch.randn(channels, width), torch.randn(channels))]
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    used = 3 if bias else 2
    y = tree_causal_conv1d(leaves[0], leaves[1], leaves[2] if bias else None, table, silu=silu)
    y_ref = reference.tree_causal_conv1d(copies[0], copies[1], copies[2] if bias else None, table, silu=silu)
    torch.testing.assert_close(y, y_ref, rtol=1e-5, atol=1e-5)
    strided = tree_causal_conv1d(x, leaves[1], leaves[2] if bias else None, table, silu=silu)
    assert torch.equal(strided, y)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves[:used], dy)
    want = torch.autograd.grad(y_ref, copies[:used], dy)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
