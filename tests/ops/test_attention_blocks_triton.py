"""Block lists against the mask written out."""

import numpy as np
import pytest
import torch
from support.hopper import compile_for_hopper

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention.flash_blocks import block_lists, classify_tiles, lists_by_torch
from harts_hf.kernels.attention.flex import block_mask
from harts_hf.tree import RolloutTree


def intervals_of(seed: int, handed: int) -> tuple[AttentionIntervals, int]:
    """A random tree's own keys behind ``handed`` keys that all rows, or the first half, see."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, 5, rng.integers(1, 200))
    paths = [
        np.concatenate([stem[: rng.integers(0, len(stem) + 1)], rng.integers(0, 5, rng.integers(1, 120))])
        for _ in range(8)
    ]
    tree = RolloutTree.from_trajectories(paths)
    rows = tree.num_tokens
    reach = np.where(np.arange(handed) < handed // 2, rows, rows // 2)
    lo = np.concatenate([np.zeros(handed, np.int32), np.arange(rows, dtype=np.int32)])
    hi = np.concatenate([reach, tree.subtree_end]).astype(np.int32)
    return AttentionIntervals(lo=torch.from_numpy(lo), hi=torch.from_numpy(hi)), rows


@pytest.mark.parametrize("block_size", [(16, 16), (16, 10), (8, 12), (128, 128)])
@pytest.mark.parametrize("handed", [0, 37])
def test_tiles_match_the_dense_mask(block_size: tuple[int, int], handed: int):
    """Tiles with a visible pair are named, full ones have no invisible pair and lie inside; own keys exactly so."""
    for seed in range(10):
        intervals, rows = intervals_of(seed, handed)
        query = torch.arange(rows)[:, None]
        dense = (intervals.lo <= query) & (query < intervals.hi)
        block_q, block_k = block_size
        padded = torch.nn.functional.pad(dense, (0, -dense.shape[1] % block_k, 0, -rows % block_q))
        tiles = padded.view(padded.shape[0] // block_q, block_q, padded.shape[1] // block_k, block_k)
        visible, full = classify_tiles(intervals, rows, block_size)
        assert torch.equal(full, tiles.all(3).all(1))
        want = tiles.any(3).any(1)
        assert not (want & ~visible).any()
        own_only = torch.arange(visible.shape[1]) * block_k >= handed
        assert torch.equal(visible[:, own_only], want[:, own_only])


def test_lists_hold_the_tiles_in_ascending_order():
    """Lists by query and by key name the same tiles, each row ascending; the same object comes back."""
    intervals, rows = intervals_of(3, 20)
    visible, full = classify_tiles(intervals, rows, (16, 16))
    for by_key in (False, True):
        lists = block_lists(intervals, rows, (16, 16), by_key=by_key)
        assert block_lists(intervals, rows, (16, 16), by_key=by_key) is lists
        for tiles, count, index in (
            (visible & ~full, lists.partial_count, lists.partial_index),
            (full, lists.full_count, lists.full_index),
        ):
            matrix = tiles.T if by_key else tiles
            for row in range(len(matrix)):
                got = index[0, 0, row, : count[0, 0, row]].tolist()
                assert got == matrix[row].nonzero().squeeze(1).tolist()
        assert int(lists.num_tiles) == int(visible.sum())


def test_flex_block_mask_has_the_same_tiles():
    """FlexAttention's mask, transposed lists included, covers exactly the visible tiles, without create_block_mask."""
    intervals, rows = intervals_of(5, 200)
    visible, _ = classify_tiles(intervals, rows, (128, 128))
    mask = block_mask(intervals, rows)
    assert torch.equal(mask.to_dense()[0, 0].bool(), visible)
    by_key = torch.zeros_like(visible.T)
    for count, index in ((mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices)):
        for row in range(len(by_key)):
            by_key[row, index[0, 0, row, : count[0, 0, row]].long()] = True
    assert torch.equal(by_key.T, visible)


@pytest.mark.essential("37-tile2-True", "128-tile3-False")
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("handed", "tile"), [(0, (16, 10)), (1, (64, 96)), (37, (16, 16)), (128, (128, 80))])
def test_triton_builds_the_same_lists(by_key: bool, handed: int, tile: tuple[int, int]):
    """The kernels give the readable form's lists entry for entry, zeros past the counts included."""
    pytest.importorskip("triton")
    from harts_hf.kernels.attention import triton_blocks

    intervals, rows = intervals_of(handed, handed)
    got = triton_blocks.build_lists(intervals, rows, tile, by_key=by_key)
    for one, other in zip(got, lists_by_torch(intervals, rows, tile, by_key=by_key), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("by_key", [False, True])
def test_triton_walks_long_lists_in_parts(by_key: bool, monkeypatch: pytest.MonkeyPatch):
    """Counts go on from part to part of a list; one key; a block past the last key; trees that end where tiles do."""
    pytest.importorskip("triton")
    from harts_hf.kernels.attention import triton_blocks

    monkeypatch.setattr(triton_blocks, "_BLOCK", 4)
    one = AttentionIntervals(lo=torch.zeros(1, dtype=torch.int32), hi=torch.ones(1, dtype=torch.int32))
    seen_by_all = AttentionIntervals(
        lo=torch.zeros(100, dtype=torch.int32), hi=torch.full((100,), 200, dtype=torch.int32)
    )
    two_trees = AttentionIntervals(
        lo=torch.arange(128, dtype=torch.int32),
        hi=torch.tensor([64, 128], dtype=torch.int32).repeat_interleave(64),
    )
    for intervals, rows in (intervals_of(4, 33), (one, 1), (seen_by_all, 200), (two_trees, 128)):
        got = triton_blocks.build_lists(intervals, rows, (64, 48), by_key=by_key)
        for found, wanted in zip(got, lists_by_torch(intervals, rows, (64, 48), by_key=by_key), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.exhaustive
def test_list_kernels_compile_for_hopper():
    """All three kernels, at a tile with a block of keys that is no power of two."""
    pytest.importorskip("triton")
    printed = compile_for_hopper(
        """
from harts_hf.kernels.attention import triton_blocks as kernels
pointers = {name: "*i32" for name in ("lo", "hi", "out", "extremes", "counts", "indices")}
sizes = {name: "i32" for name in ("num_queries", "num_keys", "blocks_k", "rows", "columns")}
tile = {"BLOCK_Q": 64, "BLOCK_K": 96, "PADDED_K": 128, "BLOCK": 512}
for kernel in (kernels._extremes, kernels._fill_by_query, kernels._fill_by_key):
    constants = {name: value for name, value in tile.items() if name in kernel.arg_names}
    print(len(compiled(kernel, {**pointers, **sizes}, constants).asm["cubin"]) > 0)
"""
    )
    assert printed.split() == ["True"] * 3


@pytest.mark.exhaustive
def test_any_size_compiles_once():
    """Lists of one block, of many, and of sizes that 16 divides are launched, for Hopper, with one kernel each."""
    printed = compile_for_hopper(
        """
import torch
from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention.triton_blocks import build_lists

launched = compile_launches()
for rows in (1, 128, 129, 16 * 128, 1000):
    ends = torch.zeros(rows, dtype=torch.int32)
    for by_key in (False, True):
        build_lists(AttentionIntervals(lo=ends, hi=ends), rows, (128, 128), by_key=by_key)
print(len(launched), len(set(launched)))
"""
    )
    assert printed.split() == ["15", "3"]
