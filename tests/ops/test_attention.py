"""Tree attention: `pytest tests/ops/test_attention.py`."""

import numpy as np
import pytest
import torch
from support.trees import branching, random_trajectories
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import api, tree_attention
from harts_hf.kernels.attention import torch as torch_backend
from harts_hf.kernels.attention.flash import pack_intervals
from harts_hf.tree import RolloutTree

NAMES = ("query", "key", "value")


def ragged_tree() -> RolloutTree:
    return RolloutTree.from_trajectories(branching(63, vocab=40) + random_trajectories(0, vocab=30))


def intervals_of(tree: RolloutTree) -> AttentionIntervals:
    return AttentionIntervals(
        lo=torch.arange(tree.num_tokens, dtype=torch.int32), hi=torch.from_numpy(tree.subtree_end.copy()).int()
    )


def tensors(num_rows: int, *, heads: int, key_heads: int, dim_k: int, dim_v: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_rows)
    shapes = ((1, heads, num_rows, dim_k), (1, key_heads, num_rows, dim_k), (1, key_heads, num_rows, dim_v))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


SHAPES = [
    pytest.param(dict(heads=4, key_heads=4, dim_k=24, dim_v=16), id="mla"),
    pytest.param(dict(heads=4, key_heads=2, dim_k=16, dim_v=16), id="grouped"),
    pytest.param(dict(heads=3, key_heads=1, dim_k=7, dim_v=10), id="one_key_head_odd_dims"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [37, 4096])
def test_equals_causal_attention_on_every_trajectory(shape, block, monkeypatch):
    """Outputs and gradients equal dense causal attention on each trajectory alone to fp64 rounding, for any block."""
    monkeypatch.setattr(torch_backend, "_QUERY_BLOCK", block)
    tree = ragged_tree()
    values = tensors(tree.num_tokens, **shape)
    ours, alone = ([value.clone().requires_grad_() for value in values] for _ in range(2))
    out = tree_attention(*ours, intervals_of(tree), scale=0.3)
    assert out.shape == (1, tree.num_tokens, shape["heads"], shape["dim_v"]) and out.is_contiguous()
    upstream = torch.zeros_like(out)
    groups = shape["heads"] // shape["key_heads"]
    for index in range(tree.num_trajectories):
        path = torch.from_numpy(tree.path(index))
        q, k, v = (leaf[:, :, path] for leaf in alone)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        hidden = torch.ones(len(path), len(path), dtype=torch.bool).triu(1)
        dense = ((q @ k.mT * 0.3).masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)
        torch.testing.assert_close(out[:, path], dense, rtol=1e-12, atol=1e-12)
        part = torch.randn_like(dense)
        upstream[:, path] += part
        dense.backward(part)
    out.backward(upstream)
    for name, mine, theirs in zip(NAMES, ours, alone, strict=True):
        torch.testing.assert_close(
            mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_backends_agree_on_handed_keys(shape):
    """Keys of a trunk stand first, each with the interval of the rows that hang under it."""
    num_handed, num_own = 5, 40
    _, key, value = tensors(num_handed + num_own, **shape)
    query = tensors(num_own, **shape)[0]
    # Rows 0..24 hang under handed keys 0..2, rows 25..39 under 0 and 3..4.
    intervals = AttentionIntervals(
        lo=torch.tensor([0, 0, 0, 25, 25, *range(num_own)], dtype=torch.int32),
        hi=torch.tensor([40, 25, 25, 40, 40, *([25] * 25), *([40] * 15)], dtype=torch.int32),
    )
    results = []
    for backend in ("torch", "reference"):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = tree_attention(*leaves, intervals, scale=0.2, backend=backend)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for name, mine, expected in zip(("out", *NAMES), *results, strict=True):
        torch.testing.assert_close(
            mine, expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_rows_of_the_mask_by_hand():
    """Two children below a prefix of two: a row averages the values of its path and of nothing else."""
    tree = RolloutTree.from_trajectories([[0, 1, 2, 3], [0, 1, 4]])
    value = torch.tensor([1.0, 10, 100, 1000, 10000]).view(1, 1, 5, 1)
    zeros = torch.zeros(1, 1, 5, 2)
    out = tree_attention(zeros, zeros, value, intervals_of(tree), scale=1.0).flatten()
    torch.testing.assert_close(out, torch.tensor([1, 11 / 2, 111 / 3, 1111 / 4, 10011 / 3]))


def test_packed_intervals_say_the_same():
    """One unsigned 32-bit comparison with a packed word sees what two signed ones see, empty intervals included."""
    tree, handed = ragged_tree(), 290
    rows = np.arange(tree.num_tokens - handed)
    lo = np.maximum(np.arange(tree.num_tokens) - handed, 0).astype(np.int32)
    hi = (tree.subtree_end - handed).astype(np.int32)
    assert (hi < 0).any()  # a handed key that no own row sees
    intervals = AttentionIntervals(lo=torch.from_numpy(lo), hi=torch.from_numpy(hi))
    packed = pack_intervals(intervals, padding=9).numpy().view(np.uint32).reshape(-1, 2)
    found = (rows[:, None].astype(np.uint32) - packed[:, 0]) < packed[:, 1]
    np.testing.assert_array_equal(found[:, :-9], (lo <= rows[:, None]) & (rows[:, None] < hi))
    assert not found[:, -9:].any()


def test_memory_grows_with_the_block_and_not_with_the_square(monkeypatch):
    """No mask is wider than the keys that its block sees nor longer than the block."""
    monkeypatch.setattr(torch_backend, "_QUERY_BLOCK", 16)
    tree = RolloutTree.from_trajectories([[0, *([child] * 50)] for child in range(1, 9)])
    largest = 0
    for _, keys, mask in torch_backend._blocks(intervals_of(tree), tree.num_tokens):
        largest = max(largest, mask.numel())
        assert mask.any(0).all() and len(keys) <= 2 * 50 + 1  # the root and at most two children
    assert largest <= 16 * 101


class LargestFloat(TorchDispatchMode):
    """Elements of the largest floating-point tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf) and leaf.is_floating_point()]
        self.largest = max(self.largest, *sizes, 0)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_weights_of_a_block_never_exist(shape, dtype):
    """In both directions nothing is larger than one head's mask: an MLA's unequal dims and grouped heads included."""
    tree = RolloutTree.from_trajectories([np.arange(300)])
    leaves = [x.requires_grad_() for x in tensors(tree.num_tokens, **shape, dtype=dtype)]
    with LargestFloat() as seen:
        tree_attention(*leaves, intervals_of(tree), scale=0.3).sum().backward()
    assert seen.largest <= 256 * 256  # the weights are one such matrix a head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_nothing(dtype):
    """Run under non-reentrant checkpointing, outputs and gradients are bitwise the same."""
    tree = ragged_tree()
    results = []
    for checkpointed in (False, True):
        leaves = [
            x.requires_grad_() for x in tensors(tree.num_tokens, heads=4, key_heads=2, dim_k=8, dim_v=8, dtype=dtype)
        ]

        def run(q, k, v):
            return tree_attention(q, k, v, intervals_of(tree), scale=0.3)

        out = checkpoint(run, *leaves, use_reentrant=False) if checkpointed else run(*leaves)
        out.float().square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for name, once, twice in zip(("out", *NAMES), *results, strict=True):
        assert once.dtype == dtype and torch.equal(once, twice), name


def test_bad_input_is_named():
    """Shapes, dtypes and heads are checked."""
    tree = RolloutTree.from_trajectories([np.arange(6)])
    query, key, value = tensors(6, heads=4, key_heads=2, dim_k=8, dim_v=8)
    intervals = intervals_of(tree)
    with pytest.raises(ValueError, match="expected key of shape"):
        tree_attention(query, key[:, :, 1:], value, intervals, scale=1.0)
    with pytest.raises(ValueError, match="expected a multiple of the 2 key heads, got 3"):
        tree_attention(query[:, :3], key, value, intervals, scale=1.0)
    with pytest.raises(ValueError, match="expected one dtype"):
        tree_attention(query.float(), key, value, intervals, scale=1.0)
    with pytest.raises(ValueError, match=r"one of .*'reference', 'torch'.*got 'sdpa'"):
        tree_attention(query, key, value, intervals, scale=1.0, backend="sdpa")


def test_deterministic_attention_on_a_gpu_is_flex(monkeypatch):
    """Where FA4 could run, asking for reproducible gradients selects FlexAttention; both at once are refused."""
    monkeypatch.setattr("harts_hf.kernels.attention.flash.unsupported_because", lambda *_: None)
    query = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16)
    assert api._gpu_backend(query, query, None, False) == "flash"
    assert api._gpu_backend(query, query, None, True) == "flex"
    assert api._gpu_backend(query, query, "flex", True) == "flex"
    with pytest.raises(ValueError, match="attention has to be deterministic, got flash"):
        api._gpu_backend(query, query, "flash", True)
    monkeypatch.setattr("harts_hf.kernels.attention.flash.unsupported_because", lambda *_: "too old")
    assert api._gpu_backend(query, query, None, False) == "flex"


def test_deterministic_attention_on_the_cpu_is_attention():
    """CPU backends are deterministic already."""
    tree = ragged_tree()
    values = tensors(tree.num_tokens, heads=2, key_heads=1, dim_k=8, dim_v=8)
    one, other = (tree_attention(*values, intervals_of(tree), scale=1.0, deterministic=flag) for flag in (False, True))
    assert torch.equal(one, other)
