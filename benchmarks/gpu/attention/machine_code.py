"""Compiles FlashAttention-4 as the package calls it without a GPU, as ptx and cubin, for nvdisasm or cuobjdump."""

import argparse
import os

import torch

from benchmarks.gpu import hopper
from benchmarks.gpu.attention.variants import use
from benchmarks.gpu.registry import HEAD_DIMS
from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import flash
from harts_hf.kernels.attention.flash_blocks import BlockLists

ROWS = 1024


def lists(tile: tuple[int, int], by_key: bool) -> BlockLists:
    """Of the right shapes."""
    queries, keys = -(-ROWS // tile[0]), -(-ROWS // tile[1])
    shape = (keys, queries) if by_key else (queries, keys)
    count = torch.zeros(1, 1, shape[0], dtype=torch.int32, device="cuda")
    index = torch.zeros(1, 1, *shape, dtype=torch.int32, device="cuda")
    return BlockLists(partial_count=count, partial_index=index, full_count=count, full_index=index, block_size=tile)


def main(options: argparse.Namespace) -> None:
    """Forward and backward of one head dim."""
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        FLASH_ATTENTION_ARCH="sm_90",
        CUTE_DSL_ARCH="sm_90a",
        FLASH_ATTENTION_NUM_SMS=str(hopper.PROCESSORS),
        CUTE_DSL_KEEP="cubin,ptx",
        CUTE_DSL_DUMP_DIR=str(options.out),
    )
    hopper.pretend()
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    dims = HEAD_DIMS[options.head_dim]
    ends = torch.zeros(ROWS, dtype=torch.int32)
    intervals = AttentionIntervals(lo=ends, hi=ends)
    flash.mask_of(intervals)  # outside the fake mode, since the words' address is read
    with use(options.variant), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        shared = {"softmax_scale": 0.1, **flash.mask_of(intervals)}
        tiles = flash.tiles_of(dims.qk, dims.v)

        def rows(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(1, ROWS, heads, dim, dtype=torch.bfloat16, device="cuda")

        q, k, v = rows(dims.heads, dims.qk), rows(dims.key_heads, dims.qk), rows(dims.key_heads, dims.v)
        out = rows(dims.heads, dims.v)
        packed = {"pack_gqa": False} if options.variant == "unpacked" else {}
        forward = flash._as_flash(lists(tiles[0], by_key=False))
        backward = flash._as_flash(lists(tiles[1], by_key=True))
        interface._flash_attn_fwd(q, k, v, **shared, **packed, block_sparse_tensors=forward, return_lse=True)
        lse = torch.empty(1, dims.heads, ROWS, dtype=torch.float32, device="cuda")
        interface._flash_attn_bwd(q, k, v, out, out, lse, **shared, block_sparse_tensors=backward)
    print(options.variant or "package", options.head_dim, len(os.listdir(options.out)), "files")
