"""Tree attention on the GPU: parity with fp64, then times against FA4 varlen on the expanded trajectories.

    python attention.py parity 128 OUT.json [VARIANT]           128, 192/128, 256
    python attention.py parity flex-128 OUT.json bfloat16           the same head dims, on FlexAttention; or float32
    python attention.py time SHAPES_FOLDER OUT.json PART.json ...   with what the parity checks wrote
    python attention.py compile 128 VARIANT                     into FA4's cache on disk, where that is switched on

Beside the package, other ways to call FA4 (``flash_variants.py``) are timed, and the forward by itself.

Efficiency is the speedup over the ratio of visible pairs where branches are tile-aligned, and over the ratio of tiles
at the kernel's own block sizes for real shapes; both ratios are reported. No time is reported where parity fails.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from measure import errors_of, failure, machine, steady_ms, within_limits
from parity_linear import Errors, first_occurrence, poison, report
from time_linear import SHAPES, batches, cu_seqlens
from trees import Forest, fork_layout, join, shape_forest

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import flash, tree_attention
from harts_hf.kernels.attention.flash_blocks import block_lists
from harts_hf.tree import RolloutTree

# head dims of q/k and v, query heads, key heads: as the supported models have them
DIMS = {"256": (256, 256, 16, 2), "128": (128, 128, 32, 4), "192/128": (192, 128, 32, 32)}
SEEDS = 5
ROWS = 32768  # of real shapes, at least; 16,384 is the package's default of a microbatch
# In float32 errors are judged by themselves, relative to the tensor: the baseline's branches are summed in float64,
# which only shows in this dtype. Measured: 0.5e-6 to 2.0e-6 (the baseline 0.4e-6 to 0.8e-6).
FLOAT32_LIMIT = 5e-6
VARIANT_LIMIT = 1e-2  # gradients in bf16, summed in another order
FORWARD_WORK, BACKWARD_WORK = 2, 5  # products of a tile


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
    rows: int, dims: tuple[int, int, int, int], seed: int, fewer: int = 1, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """q, k, v ``[rows, H, D]`` and the gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    dim_k, dim_v, heads, key_heads = dims
    heads, key_heads = max(heads // fewer, heads // key_heads), max(key_heads // fewer, 1)
    shapes = [(heads, dim_k), (key_heads, dim_k), (key_heads, dim_v), (heads, dim_v)]
    return [torch.randn(rows, *shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def run_tree(inputs: list[torch.Tensor], handed: int, intervals: AttentionIntervals, scale: float, backend: str):
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
    summed = [
        torch.zeros(x.shape, dtype=torch.float64, device="cuda").index_add_(0, rows, d.double()).to(x.dtype)
        for x, d in zip((q, k, v), found, strict=True)
    ]
    return [out.detach()[first[handed:]], summed[0][handed:], *summed[1:]]


def run_oracle(inputs: list[torch.Tensor], handed: int, forest: Forest, scale: float) -> list[torch.Tensor]:
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


def parity(name: str, backend: str, dtype: torch.dtype = torch.bfloat16) -> dict:
    dims, forest = DIMS[name], parity_forest()
    scale, result = dims[0] ** -0.5, {}
    for handed in (0, 300):
        errors, intervals = Errors(), handed_intervals(forest, handed)
        same: dict[str, bool] = {}
        for seed in range(SEEDS):
            inputs = make(forest.num_rows, dims, seed, fewer=8, dtype=dtype)
            ours = run_tree(inputs, handed, intervals, scale, backend)
            baseline = run_expanded(inputs, handed, forest, scale)
            oracle = run_oracle(inputs, handed, forest, scale)
            for tensor, *values in zip(("output", "q", "k", "v"), ours, baseline, oracle, strict=True):
                errors.add(tensor, *values)
            if seed == 0:
                again = run_tree(inputs, handed, intervals, scale, backend)
                equal = [torch.equal(a, b) for a, b in zip(ours, again, strict=True)]
                same = dict(zip(("output", "q", "k", "v"), equal, strict=True))
        result[str(handed)] = {"errors": errors.table(), "two_runs_bitwise_equal": same}
        report(f"attention {name} {backend} {dtype} handed {handed}", result[str(handed)])
    return result


def passes(found: dict, dtype: str = "bfloat16") -> bool:
    errors = errors_of(found)
    if dtype == "float32":
        return bool(errors) and all(error["ours"] <= FLOAT32_LIMIT for error in errors)
    return within_limits(errors)


def causal_tiles(lengths: np.ndarray, tile: tuple[int, int]) -> int:
    """Tiles that causal attention visits on each trajectory alone."""
    total = 0
    for length, times in zip(*np.unique(lengths, return_counts=True), strict=True):
        ends = np.minimum(np.arange(tile[0], length + tile[0], tile[0]), length)
        total += int(times) * int((-(-ends // tile[1])).sum())
    return total


def tile_ratio(forest: Forest, intervals: AttentionIntervals, name: str) -> float:
    work_tree = work_expanded = 0.0
    tiles = flash.tiles_of(*DIMS[name][:2])
    for tile, weight, by_key in zip(tiles, (FORWARD_WORK, BACKWARD_WORK), (False, True), strict=True):
        area = tile[0] * tile[1] * weight
        work_tree += area * int(block_lists(intervals, forest.num_rows, tile, by_key=by_key).num_tiles)
        work_expanded += area * causal_tiles(forest.lengths, tile)
    return work_expanded / work_tree


def tree_run(forest: Forest, intervals: AttentionIntervals, name: str) -> tuple[Callable, Callable]:
    """Forward and backward, and the forward alone."""
    dims = DIMS[name]
    q, k, v, dy = make(forest.num_rows, dims, 0)
    leaves = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]

    def forward() -> torch.Tensor:
        return tree_attention(*leaves, intervals, scale=dims[0] ** -0.5)

    return lambda: torch.autograd.grad(forward(), leaves, dy[None]), torch.no_grad()(forward)


def expanded_run(forest: Forest, name: str) -> tuple[Callable, Callable]:
    """Forward and backward of all batches of trajectories, one after the other, and the forwards alone."""
    dims = DIMS[name]
    made: dict[tuple, list[torch.Tensor]] = {}

    def one(lengths: np.ndarray) -> tuple[list[torch.Tensor], torch.Tensor, np.ndarray]:
        key = tuple(lengths.tolist())
        if key not in made:
            made[key] = make(int(lengths.sum()), dims, 0)
        q, k, v, dy = made[key]
        return [x.requires_grad_() for x in (q, k, v)], dy, lengths

    parts = [one(lengths) for lengths in batches(forest.lengths)]

    def both() -> None:
        for leaves, dy, lengths in parts:
            torch.autograd.grad(varlen(*leaves, lengths, dims[0] ** -0.5), leaves, dy)

    @torch.no_grad()
    def forward() -> None:
        for leaves, _, lengths in parts:
            varlen(*leaves, lengths, dims[0] ** -0.5)

    return both, forward


def time_lists(intervals: AttentionIntervals, forest: Forest, name: str) -> float:
    """Milliseconds to build both lists, once per microbatch."""
    times = []
    for _ in range(5):
        fresh = AttentionIntervals(lo=intervals.lo, hi=intervals.hi)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tile, by_key in zip(flash.tiles_of(*DIMS[name][:2]), (False, True), strict=True):
            block_lists(fresh, forest.num_rows, tile, by_key=by_key)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def check_parity(name: str, out: Path, variant: str | None) -> None:
    """Of the package, or of a variant, which then stands beside it under a name of its own.

    Args:
        name: head dims; after "flex-" on FlexAttention.
        variant: of FA4's; a dtype of FlexAttention's.
    """
    label = f"{name} {variant}" if variant else name
    result: dict = {"parity": {}, "failures": {}}
    try:
        with ExitStack() as changes:
            if name.startswith("flex-"):
                found = parity(name.removeprefix("flex-"), "flex", getattr(torch, variant))
            else:
                if variant:
                    from flash_variants import use

                    changes.enter_context(use(variant))
                found = parity(name, "flash")
        result["parity"][label] = found
        fine = passes(found, variant) if name.startswith("flex-") else passes(found)
        print(f"parity of attention {label} passes: {fine}", flush=True)
    except Exception:
        result["failures"][label] = failure()
    out.write_text(json.dumps(result, indent=1))


def time_all(shapes: Path, out: Path, parts: list[Path]) -> None:
    result: dict = {**machine(), "seed": 0, "parity": {}, "variants_parity": {}, "rows": [], "failures": {}}
    for path in (path for path in parts if not path.exists()):
        result["failures"][path.stem] = "the parity check has left no result"
    for part in (json.loads(path.read_text()) for path in parts if path.exists()):
        for label, found in part["parity"].items():
            result["parity" if label in DIMS or label.startswith("flex") else "variants_parity"][label] = found
        result["failures"] |= part["failures"]
    forests = {"prefix-8192+16x1536": fork_layout(8192, 16, 1536)}
    forests |= {name: shape_forest(shapes, name, ROWS) for name in SHAPES}
    forests |= {f"{name}-16K": shape_forest(shapes, name, ROWS // 2) for name in SHAPES}
    out.write_text(json.dumps(result, indent=1))
    for name in DIMS:
        fine = name in result["parity"] and passes(result["parity"][name])
        for layout, forest in forests.items() if fine else ():
            try:
                result["rows"].append(measure(layout, forest, name))
            except Exception:
                result["failures"][f"{name} {layout}"] = failure()
            torch.cuda.empty_cache()
            out.write_text(json.dumps(result, indent=1))


def difference(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """The largest relative error of the gradients, by norms; NaN if there is any."""
    pairs = [(x.float(), y.float()) for x, y in zip(found, wanted, strict=True)]
    return torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).max().item()


def measure(layout: str, forest: Forest, name: str) -> dict:
    from flash_variants import VARIANTS, use

    intervals, by_pairs = forest.intervals().to("cuda"), layout.startswith("prefix")
    both, forward = tree_run(forest, intervals, name)
    expanded, expanded_forward = expanded_run(forest, name)
    tree_ms, baseline_ms = steady_ms(both, 0.6), steady_ms(expanded, 0.6)
    pairs, tiles = forest.pairs[0] / forest.pairs[1], tile_ratio(forest, intervals, name)
    variants: dict[str, dict] = {}
    wanted = both()
    for variant in (variant for variant, dims in VARIANTS.items() if name in dims):
        try:
            with use(variant):
                if (error := difference(both(), wanted)) < VARIANT_LIMIT:
                    ms, ratio = steady_ms(both, 0.4), pairs if by_pairs else tile_ratio(forest, intervals, name)
                    variants[variant] = {"tree_ms": ms, "efficiency": baseline_ms / ms / ratio, "difference": error}
                else:
                    variants[variant] = {"failure": f"gradients differ from the package's by {error}"}
        except Exception:
            variants[variant] = {"failure": failure()}
    row = {
        "op": "attention",
        "layout": layout,
        "head_dim": name,
        "rows": forest.num_rows,
        "ratio": pairs,
        "tile_ratio": tiles,
        "tree_ms": tree_ms,
        "baseline_ms": baseline_ms,
        "speedup": baseline_ms / tree_ms,
        "efficiency": baseline_ms / tree_ms / (pairs if by_pairs else tiles),
        "tree_forward_ms": steady_ms(forward, 0.3),
        "baseline_forward_ms": steady_ms(expanded_forward, 0.3),
        "variants": variants,
        "lists_ms": time_lists(intervals, forest, name),
    }
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "parity":
        check_parity(arguments[0], Path(arguments[1]), *(arguments[2:] or [None]))
    elif command == "compile":
        from flash_variants import use

        small, dims = parity_forest(), DIMS[arguments[0]]
        with use(arguments[1]):
            run_tree(make(small.num_rows, dims, 0), 0, small.intervals().to("cuda"), dims[0] ** -0.5, "flash")
    else:
        shapes, out, *parts = map(Path, arguments)
        time_all(shapes, out, parts)


if __name__ == "__main__":
    main()
