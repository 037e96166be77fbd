"""FlexAttention on trees, without a GPU: `pytest tests/ops/test_attention_flex.py`."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import BlockMask

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import flex, reference
from harts_hf.tree import RolloutTree

# Lengths of a trunk and its branches, and how many of the first rows are handed over.
TREES = [
    ([300, 200, 51], 0),
    ([300, 200, 51], 300),  # more keys than queries
    ([700, 20, 33, 1, 9], 700),
    ([100, 20, 5], 0),  # a single block
    ([30, 20, 8], 30),
    ([128, 128, 128], 0),  # ends where blocks do
    ([1000, 1, 1], 1000),  # two queries
]
# Sums of at most 753 products in another order, float32: 1.7e-6 at most were seen.
TOLERANCE = 1e-5


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts what PyTorch would compile for the package's calls, and runs it as it is."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(pytorch, "_validate_device", lambda *_: None)  # no backward on the CPU, compiled
    for ending in (False, True):
        if ending:
            yield counter
        torch.compiler.reset()
        flex._compiled.cache_clear()


def case(
    lengths: list[int], handed: int, dtype: torch.dtype = torch.float32, kv_heads: int = 2
) -> tuple[list, AttentionIntervals]:
    """Query ``[1, 2 H, N, 16]``, key and value ``[1, H, E + N, 16]`` as models make them, and intervals."""
    tree = RolloutTree.from_shape([-1] + [0] * (len(lengths) - 1), lengths, list(range(1, len(lengths))))
    end = torch.from_numpy(tree.subtree_end.astype(np.int32)) - handed
    begin = (torch.arange(tree.num_tokens, dtype=torch.int32) - handed).clamp_min(0)
    sizes = ((tree.num_tokens - handed, 2 * kv_heads), (tree.num_tokens, kv_heads), (tree.num_tokens, kv_heads))
    tensors = [torch.randn(1, rows, heads, 16, dtype=dtype).transpose(1, 2) for rows, heads in sizes]
    return tensors, AttentionIntervals(lo=begin, hi=end)


@pytest.mark.exhaustive
def test_no_tree_compiles_anew(compilations: CompileCounter):
    """One compilation with gradients and one without, whatever the tree and whether keys are handed; values hold."""
    for number, (lengths, handed) in enumerate(TREES):
        tensors, intervals = case(lengths, handed)
        expected = reference.tree_attention(*tensors, intervals, scale=0.3)
        with torch.no_grad():
            assert (flex.tree_attention(*tensors, intervals, scale=0.3) - expected).abs().max() < TOLERANCE
        trained = flex.tree_attention(*[x.requires_grad_() for x in tensors], intervals, scale=0.3)
        trained.sum().backward()
        assert (trained - expected).abs().max() < TOLERANCE
        assert compilations.frame_count == 2, f"after tree {number}"


@pytest.mark.exhaustive
def test_too_many_compilations_are_an_error(compilations: CompileCounter, monkeypatch: pytest.MonkeyPatch):
    """Past the limit PyTorch would run the whole square of scores, uncompiled; that must not happen unseen."""
    monkeypatch.setattr(flex, "_MOST_COMPILATIONS", 1)
    tensors, intervals = case(*TREES[0])
    flex.tree_attention(*tensors, intervals, scale=0.3)
    tensors, intervals = case(*TREES[0], dtype=torch.bfloat16)
    with pytest.raises(FailOnRecompileLimitHit):
        flex.tree_attention(*tensors, intervals, scale=0.3)
    assert compilations.frame_count == 1


# Of `cases`, those that say nothing new of other sizes of blocks: sibling trees again, and less than a block.
BLOCKS_KNOW_NOTHING_OF = (1, 3)


def cases() -> Iterator[tuple[list, AttentionIntervals, BlockMask]]:
    """Several trees in a microbatch, rows that see no key of the first tile they visit, handed keys; one block.

    Large ones have a single key head: Triton's interpreter takes seconds a head.
    """
    for lengths, handed, kv_heads in [([60, 9], 0, 2), ([130, 7, 140], 0, 1), ([140, 60, 75, 1], 140, 1)]:
        tensors, intervals = case(lengths, handed, kv_heads=kv_heads)
        other = case([60, 31, 5], 0)[1]  # a second tree after it, of which nothing is handed
        rows = tensors[0].shape[2]
        intervals = AttentionIntervals(
            lo=torch.cat([intervals.lo, other.lo + rows]), hi=torch.cat([intervals.hi, other.hi + rows])
        )
        tensors = [torch.randn(1, x.shape[2] + 96, x.shape[1], 16).transpose(1, 2) for x in tensors]
        yield tensors, intervals, flex.block_mask(intervals, rows + 96)
    tensors, intervals = case([30, 20, 8], 30)
    yield tensors, intervals, flex.block_mask(intervals, 28)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(flex._OPTIONS, id="own"),
        pytest.param(flex._OPTIONS | flex._FLOAT32_OPTIONS, id="float32", marks=pytest.mark.slow),
    ],
)
def test_pytorchs_forward_on_our_lists(options: dict[str, Any], tmp_path: Path):
    """No row is NaN."""
    pytest.importorskip("triton")
    from support import flex_template

    for number, (tensors, intervals, mask) in enumerate(cases()):
        if options is not flex._OPTIONS and number in BLOCKS_KNOW_NOTHING_OF:
            continue
        kernels = flex_template.Kernels(mask=mask, intervals=intervals, scale=0.3, options=options, folder=tmp_path)
        found = kernels.forward(*tensors)[0].transpose(1, 2)
        expected = reference.tree_attention(*tensors, intervals, scale=0.3)
        assert (found - expected).abs().max() < TOLERANCE, f"case {number}"


@pytest.mark.slow
def test_pytorchs_backward_on_our_lists(tmp_path: Path):
    """With the blocks that PyTorch takes on Hopper for bfloat16, up to a head dim of 128 and above."""
    pytest.importorskip("triton")
    from support import flex_template

    names = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
    options = [flex._OPTIONS | dict(zip(names, blocks, strict=True)) for blocks in [(64, 128, 128, 64), (64,) * 4]]
    for number, (tensors, intervals, mask) in enumerate(cases()):
        common = {"mask": mask, "intervals": intervals, "scale": 0.3, "folder": tmp_path}
        both = [flex_template.Kernels(options=x, **common) for x in options]
        both = both[:1] if number in BLOCKS_KNOW_NOTHING_OF else both
        out, sums = both[0].forward(*tensors)  # for both: the blocks of the forward are the same
        grad = torch.randn_like(out)
        exact = [x.double().requires_grad_() for x in tensors]
        reference.tree_attention(*exact, intervals, scale=0.3).backward(grad.double().transpose(1, 2))
        for kernels in both:
            found = kernels.backward(grad, out, sums, *tensors)
            for name, ours, theirs in zip("qkv", found, exact, strict=True):
                assert (ours - theirs.grad).abs().max() < TOLERANCE, f"case {number}, gradient of {name}"
