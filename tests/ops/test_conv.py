"""Tree convolution: `pytest tests/ops/test_conv.py`."""

import numpy as np
import pytest
import torch
from support.trees import branching, random_trajectories
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

from harts_hf.batch import ConvTable, GatherIndex
from harts_hf.kernels.conv import tree_causal_conv1d
from harts_hf.tree import RolloutTree

CHANNELS = 5


def conv_table(tree: RolloutTree, width: int) -> ConvTable:
    columns = [np.arange(tree.num_tokens)]
    for _ in range(width - 1):
        columns.insert(0, np.append(tree.parent, -1)[columns[0]])
    return ConvTable(gather=GatherIndex.build(np.stack(columns, 1).ravel(), tree.num_tokens), width=width)


def tensors(tree: RolloutTree, width: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    shapes = ((tree.num_tokens, CHANNELS), (CHANNELS, width), (CHANNELS,))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def stock_conv(module, x, weight, bias, activation) -> torch.Tensor:
    """One trajectory ``[L, D]`` by Transformers' torch fallback."""
    function = module.causal_conv1d_fn
    function = getattr(function, "__wrapped__", function)
    return function(x.T[None], weight, bias, activation=activation)[0].T


@pytest.mark.parametrize("module", [modeling_qwen3_5, modeling_bailing_hybrid])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_equals_transformers_on_every_trajectory(module, width, activation, backend):
    """Outputs and all gradients equal the fallback's on each trajectory alone to fp64 rounding."""
    tree = RolloutTree.from_trajectories(branching(3, vocab=20) + random_trajectories(0, vocab=9, max_piece=6))
    values = tensors(tree, width)
    bias_used = width != 3
    ours, stock = ([value.clone().requires_grad_() for value in values] for _ in range(2))
    y = tree_causal_conv1d(
        ours[0],
        ours[1],
        ours[2] if bias_used else None,
        conv_table(tree, width),
        activation=activation,
        backend=backend,
    )
    upstream = torch.zeros_like(y)
    for index in range(tree.num_trajectories):
        path = torch.from_numpy(tree.path(index))
        alone = stock_conv(module, stock[0][path], stock[1], stock[2] if bias_used else None, activation)
        torch.testing.assert_close(y[path], alone, rtol=1e-12, atol=1e-12)
        part = torch.randn_like(alone)
        upstream[path] += part
        alone.backward(part)
    y.backward(upstream)
    for name, mine, theirs in zip(("x", "weight", "bias"), ours, stock, strict=True):
        if name != "bias" or bias_used:
            torch.testing.assert_close(
                mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_handed_rows_stand_before_own_ones():
    """Rows of a trunk, put before the own rows, give the tail the outputs and gradients that it has in the whole."""
    tree = RolloutTree.from_trajectories([np.arange(12)])
    x, weight, bias = tensors(tree, 4)
    cut = 7
    whole = conv_table(tree, 4)
    own = whole.gather.index.view(-1, 4)[cut:]
    first = int(own[own >= 0].min())
    tail_index = torch.where(own >= 0, own - first, -1).numpy().ravel()
    tail = ConvTable(gather=GatherIndex.build(tail_index, tree.num_tokens - first), width=4)
    x_whole, x_tail = x.clone().requires_grad_(), x[first:].clone().requires_grad_()
    y_whole = tree_causal_conv1d(x_whole, weight, bias, whole, activation="silu")[cut:]
    y_tail = tree_causal_conv1d(x_tail, weight, bias, tail, activation="silu")
    assert torch.equal(y_whole, y_tail)
    y_whole.sum().backward()
    y_tail.sum().backward()
    assert torch.equal(x_whole.grad[first:], x_tail.grad)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_is_rounded_once(weight_dtype):
    """bf16 outputs are the fp64 result rounded, but for fp32 sums that fall beside a rounding boundary."""
    tree = RolloutTree.from_trajectories(random_trajectories(0, vocab=9))
    x, weight, bias = tensors(tree, 4, torch.bfloat16)
    table = conv_table(tree, 4)
    y = tree_causal_conv1d(x, weight.to(weight_dtype), bias.to(weight_dtype), table, activation="silu")
    exact = tree_causal_conv1d(x.double(), weight.double(), bias.double(), table, activation="silu")
    assert y.dtype == torch.bfloat16
    different = (y != exact.bfloat16()).double().mean().item()
    # Measured 0 of 1,000; an fp32 sum of four lands beyond a bf16 boundary about once in 2^16 / 4.
    assert different < 1e-3


def test_bad_input_is_named():
    """Shapes and activations are checked."""
    tree = RolloutTree.from_trajectories([np.arange(5)])
    x, weight, bias = tensors(tree, 4)
    table = conv_table(tree, 4)
    with pytest.raises(ValueError, match="expected activation to be one of"):
        tree_causal_conv1d(x, weight, bias, table, activation="gelu")
    with pytest.raises(ValueError, match=r"expected weight of shape \[5, 4\], got \[5, 3\]"):
        tree_causal_conv1d(x, weight[:, 1:], bias, table, activation=None)
    with pytest.raises(ValueError, match=r"expected x of shape \[5, D\]"):
        tree_causal_conv1d(x[:3], weight, bias, table, activation=None)
    with pytest.raises(ValueError, match="expected bias"):
        tree_causal_conv1d(x, weight, bias[:2], table, activation=None)
