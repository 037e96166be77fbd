"""FlexAttention's own kernels, made from PyTorch's templates, for Triton's interpreter.

PyTorch makes them on GPUs only; what lists and options do to them can be seen without one.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
import triton
from torch._inductor.kernel import flex as kernels
from torch.nn.attention.flex_attention import BlockMask

from harts_hf.batch import AttentionIntervals

_TEMPLATES = Path(kernels.__file__).parent / "templates"
_DEFAULTS = {
    "FLOAT32_PRECISION": "'ieee'", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "IS_DIVISIBLE": False, "HAS_FULL_BLOCKS": True, "USE_TMA": False, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
    "WRITE_DQ": True, "SPARSE_Q_BLOCK_SIZE": 128, "SPARSE_KV_BLOCK_SIZE": 128, "INDEX_DTYPE": "tl.int32",
    "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 16, "BLOCK_N1": 16, "BLOCK_M2": 16, "BLOCK_N2": 16,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The forward and the backward for tensors ``[1, H, N, D]``.

    Attributes:
        options: of the kernels, as they are given to ``flex_attention``.
        folder: where their sources are written.
    """

    mask: BlockMask
    intervals: AttentionIntervals
    scale: float
    options: dict[str, Any]
    folder: Path

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs ``[1, H, N, D]``, and the logarithms to base 2 of the sums ``[1, H, N]``."""
        query, key, value = inputs
        out = torch.full((*query.shape[:3], value.shape[3]), torch.nan)
        sums = torch.full(query.shape[:3], torch.nan)
        tensors = {"Q": query, "K": key, "V": value, "LSE": sums, "MAX": sums, **self._lists("kv"), "OUT": out}
        constants = self._constants(*inputs, prefix="fwd_")
        grid = (triton.cdiv(query.shape[2], constants["BLOCK_M"]), 1, query.shape[1])
        self._launch(("flex_attention", "utilities", "common"), tensors, constants, grid)
        return out, sums

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, *inputs: torch.Tensor
    ) -> list[torch.Tensor]:
        """Gradients of query, key and value, from that of the output and what :meth:`forward` gave."""
        query, key, value = inputs
        delta = (out * grad).sum(dim=-1).contiguous()
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in inputs)  # with the strides of the inputs, as PyTorch does
        tensors = {"Q": query, "K": key, "V": value, "LSE": sums, "DELTA": delta, "DO": grad, "DQ": dq, "DV": dv}
        tensors |= {**self._lists("kv"), **self._lists("q"), "DK": dk}
        constants = self._constants(*inputs, prefix="bwd_")
        by_query = triton.cdiv(query.shape[2], constants["BLOCK_M2"]) * constants["GQA_SHARED_HEADS"]
        grid = (by_query + triton.cdiv(key.shape[2], constants["BLOCK_N1"]), 1, key.shape[1])
        self._launch(("flex_backwards", "utilities"), tensors, constants, grid)
        return [dq, dk, dv]

    def _lists(self, side: str) -> dict[str, torch.Tensor]:
        return {
            f"{full}{side}_{short}".upper(): getattr(self.mask, f"{full}{side}_{name}")
            for full in ("", "full_")
            for short, name in (("num_blks", "num_blocks"), ("idx", "indices"))
        }

    def _constants(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, prefix: str
    ) -> dict[str, Any]:
        options = {name.removeprefix(prefix): option for name, option in self.options.items()}
        assert options.pop("BACKEND") == "TRITON"
        unused = ("fwd_", "bwd_", "num_")  # those of the other kernel, and stages and warps
        dim, dim_v = query.shape[3], value.shape[3]
        rounded, rounded_v = map(triton.next_power_of_2, (dim, dim_v))
        return {
            **_DEFAULTS, **{name: option for name, option in options.items() if not name.startswith(unused)},
            "SM_SCALE": self.scale, "GQA_SHARED_HEADS": query.shape[1] // key.shape[1],
            "QK_HEAD_DIM": dim, "QK_HEAD_DIM_ROUNDED": rounded, "V_HEAD_DIM": dim_v, "V_HEAD_DIM_ROUNDED": rounded_v,
            "SAFE_HEAD_DIM": (dim, dim_v) == (rounded, rounded_v),
        }  # fmt: skip

    def _launch(
        self,
        templates: tuple[str, ...],
        tensors: dict[str, torch.Tensor],
        constants: dict[str, Any],
        grid: tuple[int, int, int],
    ) -> None:
        tensors = {"LO": self.intervals.lo, "HI": self.intervals.hi, **tensors}
        path = self.folder / f"flex_{len(list(self.folder.iterdir()))}.py"
        path.write_text(_source(templates, tensors, constants))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.kernel[grid](*tensors.values())


def _source(templates: tuple[str, ...], tensors: dict[str, torch.Tensor], constants: dict[str, Any]) -> str:
    """A module with the templates' kernel, with what PyTorch would put into it for tensors of these sizes; the last of
    them is the one that PyTorch's own code stores.
    """
    arguments = ", ".join(f"arg_{name}" for name in tensors)
    defines = "\n".join(f"{name} : tl.constexpr = {value}" for name, value in constants.items())
    last, last_strides = next((name, tensor.stride()) for name, tensor in reversed(tensors.items()))

    def header(*_: str) -> str:
        lines = [*(f"{name} = arg_{name}" for name in tensors), *defines.split("\n")]
        return f"@triton.jit\ndef kernel({arguments}):\n" + "\n".join(f"    {line}" for line in lines)

    def stride(name: str, position: int | None = None) -> str:
        found = tensors[name].stride()
        return ", ".join(map(str, found)) if position is None else str(found[position])

    def modification(subgraph_number: int, output_name: str | None, **names: Any) -> str:
        if output_name == "mask_mod_output":
            row, column = names["m"], names["n"]
            return f"{output_name} = (tl.load(arg_LO + {column}) <= {row}) & ({row} < tl.load(arg_HI + {column}))"
        if output_name is None:  # gradients of what scores are modified with: nothing
            return "pass"
        return f"{output_name} = {names['grad_score_mod' if output_name == 'grad_scores' else 'score']}"

    def store_output(index: tuple[str, ...], value: str, mask: str, **_: Any) -> str:
        positions = " + ".join(f"({i}) * {s}" for i, s in zip(index, last_strides, strict=True))
        return f"tl.store({last} + {positions}, {value}, {mask})"

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = lambda text, width: text.replace("\n", "\n" + "    " * width)
    template = "".join((_TEMPLATES / f"{name}.py.jinja").read_text() for name in templates)
    body = environment.from_string(template).render(
        def_kernel=header, stride=stride, size=lambda name, position: tensors[name].shape[position],
        gen_argdefs=lambda: arguments, gen_defines=lambda: defines, modification=modification,
        store_output=store_output, **constants,
    )  # fmt: skip
    return f"import triton\nimport triton.language as tl\n{body}"
