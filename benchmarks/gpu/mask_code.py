"""Compiles FlashAttention-4 as the package calls it without a GPU, into DUMP_DIR, as ptx and cubin.

python mask_code.py VARIANT HEAD_DIM DUMP_DIR        "package" or one of flash_variants.py; 128, 192/128 or 256;
                                                     then nvdisasm / cuobjdump -res-usage
"""

import os
import sys

variant, name, folder = sys.argv[1:4]
os.makedirs(folder, exist_ok=True)
os.environ.update(
    FLASH_ATTENTION_ARCH="sm_90",
    CUTE_DSL_ARCH="sm_90a",
    FLASH_ATTENTION_NUM_SMS="132",
    CUTE_DSL_KEEP="cubin,ptx",
    CUTE_DSL_DUMP_DIR=folder,
)

import torch  # noqa: E402

torch.cuda.get_device_capability = lambda *_: (9, 0)

from attention import DIMS  # noqa: E402
from flash_attn.cute import interface  # noqa: E402
from flash_variants import use  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from harts_hf.batch import AttentionIntervals  # noqa: E402
from harts_hf.kernels.attention import flash  # noqa: E402
from harts_hf.kernels.attention.flash_blocks import BlockLists  # noqa: E402

ROWS = 1024


def lists(tile: tuple[int, int], by_key: bool) -> BlockLists:
    queries, keys = -(-ROWS // tile[0]), -(-ROWS // tile[1])
    shape = (keys, queries) if by_key else (queries, keys)
    count = torch.zeros(1, 1, shape[0], dtype=torch.int32, device="cuda")
    index = torch.zeros(1, 1, *shape, dtype=torch.int32, device="cuda")
    return BlockLists(partial_count=count, partial_index=index, full_count=count, full_index=index, block_size=tile)


dim_k, dim_v, heads, key_heads = DIMS[name]
ends = torch.zeros(ROWS, dtype=torch.int32)
intervals = AttentionIntervals(lo=ends, hi=ends)
flash.mask_of(intervals)  # outside the fake mode, since the words' address is read
with use(variant), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
    shared = {"softmax_scale": 0.1, **flash.mask_of(intervals)}
    tiles = flash.tiles_of(dim_k, dim_v)

    def rows(heads: int, dim: int) -> torch.Tensor:
        return torch.empty(1, ROWS, heads, dim, dtype=torch.bfloat16, device="cuda")

    q, k, v, out = rows(heads, dim_k), rows(key_heads, dim_k), rows(key_heads, dim_v), rows(heads, dim_v)
    packed = {"pack_gqa": False} if variant == "unpacked" else {}
    forward = flash._as_flash(lists(tiles[0], by_key=False))
    backward = flash._as_flash(lists(tiles[1], by_key=True))
    interface._flash_attn_fwd(q, k, v, **shared, **packed, block_sparse_tensors=forward, return_lse=True)
    lse = torch.empty(1, heads, ROWS, dtype=torch.float32, device="cuda")
    interface._flash_attn_bwd(q, k, v, out, out, lse, **shared, block_sparse_tensors=backward)
print(variant, name, len(os.listdir(folder)), "files")
