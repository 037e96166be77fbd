"""Inputs, tables and oracles for tests of the linear rules."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

from harts_hf.batch import LinearTables
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kimi_delta_rule
from harts_hf.planner.chunks import CHUNK_SIZE, build_chunk_tree
from harts_hf.tree import RolloutTree

RULES = {"gated": tree_gated_delta_rule, "kimi": tree_kimi_delta_rule}
INPUT_NAMES = ("q", "k", "v", "g", "beta")
_STOCK = {
    "gated": modeling_qwen3_5.torch_chunk_gated_delta_rule,
    "kimi": modeling_bailing_hybrid.chunk_kimi_delta_attention,
}


def tree_tables(tree: RolloutTree, chunk_size: int = CHUNK_SIZE) -> LinearTables:
    """The tables of a tree in one microbatch."""
    return LinearTables.build(build_chunk_tree(tree.parent, tree.depth, chunk_size), np.arange(tree.num_tokens))


def path_tables(length: int, chunk_size: int = CHUNK_SIZE, first_depth: int = 0) -> LinearTables:
    """The tables of one trajectory alone, from ``first_depth`` on."""
    depth = np.arange(length)
    return LinearTables.build(build_chunk_tree(depth - 1, depth + first_depth, chunk_size), depth)


def rule_inputs(
    rule: str,
    num_rows: int,
    *,
    heads: int = 2,
    value_heads: int = 2,
    dim_k: int = 16,
    dim_v: int = 16,
    decay: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[torch.Tensor]:
    """q, k, v, g, beta: normal values, g uniform in (-decay, 0], beta uniform in [0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(num_rows, *shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(num_rows, *shape, generator=generator, dtype=torch.float64)

    gate_shape = (value_heads,) if rule == "gated" else (heads, dim_k)
    values = [
        normal(heads, dim_k),
        normal(heads, dim_k),
        normal(value_heads, dim_v),
        -decay * uniform(*gate_shape),
        uniform(value_heads),
    ]
    return [value.to(dtype) for value in values]


def with_grad(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Fresh leaves with the same values."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def stock_rule(rule: str, *, wide: bool) -> Callable[..., Any]:
    """Transformers' torch fallback for one trajectory; ``wide`` lifts its fp32 casts to fp64."""
    function = _STOCK[rule]
    function = getattr(function, "__wrapped__", function)
    if not wide:
        return function
    lifted_torch = types.SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    lifted_torch.float32 = torch.float64
    names = tuple("double" if name == "float" else name for name in function.__code__.co_names)
    lifted = types.FunctionType(
        function.__code__.replace(co_names=names),
        {**function.__globals__, "torch": lifted_torch, "double": float},  # the builtin float is renamed too
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return lifted


def stock_output(rule: str, inputs: list[torch.Tensor], *, wide: bool) -> torch.Tensor:
    """``[L, HV, V]`` of one trajectory by Transformers' fallback."""
    batched = [tensor[None] for tensor in inputs]
    return stock_rule(rule, wide=wide)(*batched, use_qk_l2norm_in_kernel=True)[0][0]


def per_trajectory(
    rule: str, tree: RolloutTree, inputs: list[torch.Tensor], upstream: list[torch.Tensor], *, wide: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of each trajectory run alone by Transformers, and gradients of all inputs for ``upstream`` of each."""
    leaves = with_grad(inputs)
    outputs = []
    for index in range(tree.num_trajectories):
        path = torch.from_numpy(tree.path(index))
        output = stock_output(rule, [leaf[path] for leaf in leaves], wide=wide)
        output.backward(upstream[index].to(output.dtype))
        outputs.append(output.detach())
    return outputs, [leaf.grad for leaf in leaves]
