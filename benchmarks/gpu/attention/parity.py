"""Tree attention on the GPU against fp64, beside the errors of FA4 varlen on the expanded trajectories."""

import argparse

import numpy as np
import torch

from benchmarks.gpu import record
from benchmarks.gpu.compare import Errors, cu_seqlens, equal, first_occurrence, poison, report, sum_by_row
from benchmarks.gpu.gates import attention_passes
from benchmarks.gpu.registry import HEAD_DIMS, HeadDims
from benchmarks.gpu.trees import Forest, join
from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import tree_attention
from harts_hf.tree import RolloutTree

SEEDS = 5
NAMES = ("output", "q", "k", "v")
HANDED = (0, 300)  # rows that a trunk hands over


def parity_forest() -> Forest:
    """A prefix of 300, forks of ragged lengths, a path that ends inside, one-token branches; a second tree, whose rows
    share tiles with the first, and a third with branches that begin where tiles of 128 do (if nothing is handed over).
    """
    parent = [-1, 0, 0, 0, 1, 1, *[3] * 20]
    length = [300, 200, 513, 129, 77, 300, *[1] * 20]
    ragged = RolloutTree.from_shape(parent, length, [2, 4, 5, 1, *range(6, 26)])
    second = RolloutTree.from_shape([-1, 0, 0], [100, 60, 93], [1, 2])
    aligned = RolloutTree.from_shape([-1, 0, 0], [256, 128, 300], [1, 2])
    return join([ragged, second, aligned])


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: np.ndarray, scale: float) -> torch.Tensor:
    """FA4 on packed trajectories ``[T, H, D]``."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    ends, longest = cu_seqlens(lengths).int(), int(lengths.max())
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, softmax_scale=scale,
        causal=True,
    )[0]  # fmt: skip


def make(
    rows: int, dims: HeadDims, seed: int, fewer: int = 1, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """q, k, v ``[rows, H, D]`` and the gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    heads = max(dims.heads // fewer, dims.heads // dims.key_heads)
    key_heads = max(dims.key_heads // fewer, 1)
    shapes = [(heads, dims.qk), (key_heads, dims.qk), (key_heads, dims.v), (heads, dims.v)]
    return [torch.randn(rows, *shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def run_tree(
    inputs: list[torch.Tensor], handed: int, intervals: AttentionIntervals, scale: float, backend: str
) -> list[torch.Tensor]:
    """Output of own rows and gradients of q (own rows), k, v; the first ``handed`` rows are keys only."""
    q, k, v, dy = inputs
    leaves = [x.detach().requires_grad_() for x in (q[handed:], k, v)]
    poison()
    own = AttentionIntervals(lo=intervals.lo.clone(), hi=intervals.hi.clone())
    out = tree_attention(*[x.transpose(0, 1)[None] for x in leaves], own, scale=scale, backend=backend)[0]
    del own
    poison()  # whatever the backward still reads of the intervals has to be kept alive by the graph
    return [out.detach(), *torch.autograd.grad(out, leaves, dy[handed:])]


def run_expanded(inputs: list[torch.Tensor], handed: int, forest: Forest, scale: float) -> list[torch.Tensor]:
    """By FA4; in float32, which it does not take, by PyTorch's attention on each trajectory alone."""
    q, k, v, dy = inputs
    rows, first = torch.from_numpy(forest.expanded_rows).cuda(), first_occurrence(forest)
    leaves = [x.detach()[rows].requires_grad_() for x in (q, k, v)]
    if q.dtype == torch.float32:
        parts = zip(*(x.transpose(0, 1).split(forest.lengths.tolist(), 1) for x in leaves), strict=True)
        options = {"is_causal": True, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        found = [torch.nn.functional.scaled_dot_product_attention(*part, **options) for part in parts]
        out = torch.cat(found, 1).transpose(0, 1)
    else:
        out = varlen(*leaves, forest.lengths, scale)
    d_out = torch.zeros_like(out)
    d_out[first[handed:]] = dy[handed:]
    found = torch.autograd.grad(out, leaves, d_out)
    summed = [sum_by_row(d, rows, x) for x, d in zip((q, k, v), found, strict=True)]
    return [out.detach()[first[handed:]], summed[0][handed:], *summed[1:]]


def run_oracle(inputs: list[torch.Tensor], handed: int, forest: Forest, scale: float) -> list[torch.Tensor]:
    """All scores at once, in fp64."""
    q, k, v, dy = (x.double() for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q[handed:], k, v)]
    group = q.shape[1] // k.shape[1]
    query = torch.arange(handed, forest.num_rows)[:, None]
    key = torch.arange(forest.num_rows)
    mask = ((key <= query) & (query < torch.from_numpy(forest.subtree_end))).cuda()
    scores = torch.einsum("qhd,khd->hqk", leaves[0], leaves[1].repeat_interleave(group, 1)) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, leaves[2].repeat_interleave(group, 1))
    return [out.detach(), *torch.autograd.grad(out, leaves, dy[handed:])]


def handed_intervals(forest: Forest, handed: int) -> AttentionIntervals:
    """Intervals over own rows when the first ``handed`` rows are handed over by a trunk."""
    lo = np.maximum(np.arange(forest.num_rows) - handed, 0).astype(np.int32)
    hi = (forest.subtree_end - handed).astype(np.int32)
    return AttentionIntervals(lo=torch.from_numpy(lo).cuda(), hi=torch.from_numpy(hi).cuda())


def parity(name: str, backend: str, dtype: torch.dtype) -> dict[str, dict]:
    """By the number of handed rows."""
    dims, forest = HEAD_DIMS[name], parity_forest()
    scale, result = dims.qk**-0.5, {}
    for handed in HANDED:
        errors, intervals = Errors(), handed_intervals(forest, handed)
        same: dict[str, bool] = {}
        for seed in range(SEEDS):
            inputs = make(forest.num_rows, dims, seed, fewer=8, dtype=dtype)
            ours = run_tree(inputs, handed, intervals, scale, backend)
            baseline = run_expanded(inputs, handed, forest, scale)
            oracle = run_oracle(inputs, handed, forest, scale)
            for tensor, *values in zip(NAMES, ours, baseline, oracle, strict=True):
                errors.add(tensor, *values)
            if seed == 0:
                again = run_tree(inputs, handed, intervals, scale, backend)
                same = dict(zip(NAMES, equal(ours, again), strict=True))
        result[str(handed)] = {"errors": errors.table(), "two_runs_bitwise_equal": same}
        report(f"attention {name} {backend} {dtype} handed {handed}", result[str(handed)])
    return result


def main(options: argparse.Namespace) -> None:
    """One check: of the package's call of FA4, or under names of their own of a variant or FlexAttention."""
    name, variant, flex = options.head_dim, options.variant, options.flex
    label = f"flex-{name} {flex}" if flex else f"{name} {variant}" if variant else name
    result: dict = {**record.about(), "parity": {}, "failures": {}}
    try:
        if flex:
            found = parity(name, "flex", getattr(torch, flex))
        else:
            from benchmarks.gpu.attention.variants import use

            with use(variant):
                found = parity(name, "flash", torch.bfloat16)
        result["parity"][label] = found
        print(f"parity of attention {label} passes: {attention_passes(found, flex or 'bfloat16')}", flush=True)
    except Exception:
        result["failures"][label] = record.failure()
    record.write(options.out, result)
