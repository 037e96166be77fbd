"""FlexAttention's own forward kernel, made from PyTorch's template, for Triton's interpreter.

PyTorch makes it on GPUs only; what lists and options do to it can be seen without one.
"""

import importlib.util
from pathlib import Path
from typing import Any

import jinja2
import torch
import triton
from torch._inductor.kernel import flex as kernels
from torch.nn.attention.flex_attention import BlockMask

from harts_hf.batch import AttentionIntervals

_TEMPLATES = Path(kernels.__file__).parent / "templates"
_LISTS = ("KV_NUM_BLKS", "KV_IDX", "FULL_KV_NUM_BLKS", "FULL_KV_IDX")
_NAMES = ("Q", "K", "V", "LSE", "MAX", *_LISTS, "LO", "HI", "OUT")
_DEFAULTS = {
    "FLOAT32_PRECISION": "'ieee'", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "IS_DIVISIBLE": False, "HAS_FULL_BLOCKS": True, "USE_TMA": False, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
    "SPARSE_Q_BLOCK_SIZE": 128, "SPARSE_KV_BLOCK_SIZE": 128, "BLOCK_M": 64, "BLOCK_N": 64, "SAFE_HEAD_DIM": True,
}  # fmt: skip


def run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    intervals: AttentionIntervals,
    *,
    scale: float,
    options: dict[str, Any],
    folder: Path,
) -> torch.Tensor:
    """What the kernel gives for ``[1, H, N, D]`` tensors, D a power of two: ``[1, N, H, D]``.

    Args:
        options: of the kernel, as they are given to ``flex_attention``.
        folder: where its source is written.
    """
    forward = {name.removeprefix("fwd_"): option for name, option in options.items() if not name.startswith("bwd_")}
    sizes = {name: forward.pop(name, None) for name in ("num_stages", "num_warps", "BACKEND")}
    assert sizes["BACKEND"] == "TRITON"
    heads, dim, dim_v = query.shape[1], query.shape[3], value.shape[3]
    out = torch.full((1, heads, query.shape[2], dim_v), torch.nan)
    sums = torch.empty(1, heads, query.shape[2])
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    tensors = dict(zip(_NAMES, (query, key, value, sums, sums, *lists, intervals.lo, intervals.hi, out), strict=True))
    constants = {
        **_DEFAULTS, **forward, "SM_SCALE": scale, "GQA_SHARED_HEADS": heads // key.shape[1],
        "QK_HEAD_DIM": dim, "QK_HEAD_DIM_ROUNDED": dim, "V_HEAD_DIM": dim_v, "V_HEAD_DIM_ROUNDED": dim_v,
    }  # fmt: skip
    path = folder / f"flex_{len(list(folder.iterdir()))}.py"
    path.write_text(_source(tensors, constants))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.kernel[(triton.cdiv(query.shape[2], constants["BLOCK_M"]), 1, heads)](*tensors.values())
    return out.transpose(1, 2)


def _source(tensors: dict[str, torch.Tensor], constants: dict[str, Any]) -> str:
    """A module with the template's kernel, with what PyTorch would put into it for tensors of these sizes."""
    arguments = ", ".join(f"arg_{name}" for name in _NAMES)
    defines = "\n".join(
        f"{name} : tl.constexpr = {value}" for name, value in [*constants.items(), ("INDEX_DTYPE", "tl.int32")]
    )

    def header(*_: str) -> str:
        lines = [*(f"{name} = arg_{name}" for name in _NAMES), *defines.split("\n")]
        return f"@triton.jit\ndef kernel({arguments}):\n" + "\n".join(f"    {line}" for line in lines)

    def stride(name: str, place: int | None = None) -> str:
        found = tensors[name].stride()
        return ", ".join(map(str, found)) if place is None else str(found[place])

    def modification(subgraph_number: int, output_name: str, **names: str) -> str:
        if subgraph_number == 0:  # of scores: none
            return f"{output_name} = {names['score']}"
        row, column = names["m"], names["n"]
        return f"{output_name} = (tl.load(arg_LO + {column}) <= {row}) & ({row} < tl.load(arg_HI + {column}))"

    def store_output(index: tuple[str, ...], value: str, mask: str, **_: Any) -> str:
        places = " + ".join(f"({i}) * {s}" for i, s in zip(index, tensors["OUT"].stride(), strict=True))
        return f"tl.store(OUT + {places}, {value}, {mask})"

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = lambda text, width: text.replace("\n", "\n" + "    " * width)
    template = "".join((_TEMPLATES / f"{n}.py.jinja").read_text() for n in ("flex_attention", "utilities", "common"))
    body = environment.from_string(template).render(
        def_kernel=header, stride=stride, size=lambda name, place: tensors[name].shape[place],
        gen_argdefs=lambda: arguments, gen_defines=lambda: defines, modification=modification,
        store_output=store_output, **constants,
    )  # fmt: skip
    return f"import triton\nimport triton.language as tl\n{body}"
