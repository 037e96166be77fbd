"""How FlashAttention-4 is called, against a stand-in that notes it: `pytest tests/ops/test_attention_flash.py`."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import flash, flash_config
from harts_hf.kernels.attention.flash_blocks import classify_tiles
from harts_hf.kernels.attention.flash_config import DenseTile

ROWS, HANDED = 700, 130


class Lists(NamedTuple):
    """FA4's block lists."""

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any
    full_block_idx: Any
    block_size: Any


def choose(head_dim, head_dim_v, causal, local, sparse_block_size_q=None):
    """Tiles of the backward at head dim 256 as FA4 4.0.0b36 has them."""
    return SimpleNamespace(m_block_size=64, n_block_size=64 if sparse_block_size_q is not None else 48)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ModuleType, dict]]:
    """Puts a FA4 whose choice of tiles is given in the place of the real one, which this machine has not."""

    def put(choose_tiles: Callable | None) -> tuple[ModuleType, dict]:
        seen: dict[str, Any] = {}

        def flash_attn_func(query, key, value, **options):
            seen.update(options, shapes=[tuple(x.shape) for x in (query, key, value)])
            return torch.zeros(1, query.shape[1], query.shape[2], value.shape[3]), None

        interface, sparsity, mask = (
            ModuleType(f"flash_attn.cute.{name}") for name in ("interface", "block_sparsity", "mask")
        )
        interface.flash_attn_func = flash_attn_func
        if choose_tiles is not None:
            interface._tile_size_bwd_sm90 = choose_tiles
        sparsity.BlockSparseTensorsTorch = Lists
        cute = ModuleType("flash_attn.cute")
        cute.interface, cute.block_sparsity = interface, sparsity
        mask.interval_mask, mask.address_of = object(), lambda words: SimpleNamespace(address=words.data_ptr())
        modules = {"flash_attn": ModuleType("flash_attn"), "flash_attn.cute": cute}
        modules |= {module.__name__: module for module in (interface, sparsity)}
        modules["harts_hf.kernels.attention.flash_mask"] = mask
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(flash, "unavailable_because", lambda: None)
        flash_config.backward_tile.cache_clear()
        return interface, seen

    return put


def call(dim: int, dim_v: int) -> tuple[AttentionIntervals, torch.Tensor]:
    """A trunk of 130 handed rows, two branches."""
    lo = (torch.arange(ROWS + HANDED, dtype=torch.int32) - HANDED).clamp_min(0)
    hi = torch.full((ROWS + HANDED,), ROWS, dtype=torch.int32)
    hi[HANDED : HANDED + 300] = 300
    sizes = ((4, ROWS, dim), (2, ROWS + HANDED, dim), (2, ROWS + HANDED, dim_v))
    query, key, value = (torch.zeros(1, *size, dtype=torch.bfloat16) for size in sizes)
    intervals = AttentionIntervals(lo=lo, hi=hi)
    return intervals, flash.tree_attention(query, key, value, intervals, scale=0.5)


def tiles_of(lists: Lists, by_key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Visited tiles and full ones, ``[query blocks, key blocks]`` bool."""
    found = []
    full, partial = (lists.full_block_cnt, lists.full_block_idx), (lists.mask_block_cnt, lists.mask_block_idx)
    for count, index in (full, partial):
        dense = torch.zeros(index.shape[2:], dtype=torch.bool)
        for row, stop in enumerate(count[0, 0].tolist()):
            dense[row, index[0, 0, row, :stop].long()] = True
        found.append(dense.T if by_key else dense)
    return found[0] | found[1], found[0]


@pytest.mark.parametrize(
    ("dims", "tile", "tile_backward"),
    [
        ((128, 128), (128, 128), (64, 128)),
        ((192, 128), (128, 128), (64, 96)),
        ((256, 256), (128, 80), (64, 48)),
    ],
)
def test_lists_are_made_for_each_direction(stand_in, dims, tile, tile_backward):
    """The forward's lists are by query and the backward's by key, each for the tile that FA4 takes there."""
    _, seen = stand_in(choose)
    intervals, out = call(*dims)
    assert out.shape == (1, ROWS, 4, dims[1])
    assert seen["shapes"] == [(1, ROWS, 4, dims[0]), (1, ROWS + HANDED, 2, dims[0]), (1, ROWS + HANDED, 2, dims[1])]
    assert seen["softmax_scale"] == 0.5
    for name, size, by_key in (
        ("block_sparse_tensors", tile, False),
        ("block_sparse_tensors_bwd", tile_backward, True),
    ):
        assert seen[name].block_size == size
        visible, full = classify_tiles(intervals, ROWS, size)
        got_visible, got_full = tiles_of(seen[name], by_key)
        assert torch.equal(got_visible, visible)
        assert torch.equal(got_full, full)
        assert isinstance(seen[name].block_size[0], DenseTile) == (size == (64, 48))


def test_dense_tiles_are_for_marked_lists_only(stand_in):
    """FA4 does not see the block size of our lists, given by position or name; of other lists it does."""
    interface, _ = stand_in(choose)
    call(256, 256)
    once = interface._tile_size_bwd_sm90
    call(256, 256)
    assert interface._tile_size_bwd_sm90 is once
    assert once is not choose
    for block, keys in ((DenseTile(64), 48), (64, 64), (None, 48)):
        assert once(256, 256, False, False, sparse_block_size_q=block).n_block_size == keys
        assert once(256, 256, False, False, block).n_block_size == keys


@pytest.mark.parametrize(
    "other",
    [None, lambda head_dim: None, lambda *_, **__: SimpleNamespace(m_block_size=64, n_block_size=64)],
    ids=["no such function", "other arguments", "other tiles"],
)
def test_another_fa4_runs_on_its_own_tiles(stand_in, other, caplog):
    """A release without the dense tile gets lists for the one that it keeps for them, unmarked, and a log says so."""
    interface, seen = stand_in(other)
    with caplog.at_level("INFO"):
        call(256, 256)
    assert seen["block_sparse_tensors_bwd"].block_size == (64, 64)
    assert not isinstance(seen["block_sparse_tensors_bwd"].block_size[0], DenseTile)
    assert getattr(interface, "_tile_size_bwd_sm90", None) is other
    assert "tiles" in caplog.text
