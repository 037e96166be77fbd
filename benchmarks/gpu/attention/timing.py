"""Times tree attention against FA4 varlen on the expanded trajectories, at the head dims whose parity check passes.

Beside the package, other ways to call FA4 are timed, and the forward by itself. Efficiency is the speedup over the
ratio of visible pairs where branches are tile-aligned, and over the ratio of tiles at the kernel's own block sizes for
real shapes; both ratios are reported.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu import record
from benchmarks.gpu.attention.parity import make, varlen
from benchmarks.gpu.attention.variants import use
from benchmarks.gpu.gates import attention_passes
from benchmarks.gpu.measure import steady_ms
from benchmarks.gpu.registry import FLASH_VARIANTS, HEAD_DIMS, SHAPE_ROWS, SHAPES
from benchmarks.gpu.trees import Forest, batches, fork_layout, shape_forest
from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import flash, tree_attention
from harts_hf.kernels.attention.flash_blocks import block_lists

VARIANT_LIMIT = 1e-2  # gradients in bf16, summed in another order
FORWARD_WORK, BACKWARD_WORK = 2, 5  # products of a tile


def causal_tiles(lengths: np.ndarray, tile: tuple[int, int]) -> int:
    """Tiles that causal attention visits on each trajectory alone."""
    total = 0
    for length, times in zip(*np.unique(lengths, return_counts=True), strict=True):
        ends = np.minimum(np.arange(tile[0], length + tile[0], tile[0]), length)
        total += int(times) * int((-(-ends // tile[1])).sum())
    return total


def tile_ratio(forest: Forest, intervals: AttentionIntervals, name: str) -> float:
    work_tree = work_expanded = 0.0
    tiles = flash.tiles_of(*HEAD_DIMS[name][:2])
    for tile, weight, by_key in zip(tiles, (FORWARD_WORK, BACKWARD_WORK), (False, True), strict=True):
        area = tile[0] * tile[1] * weight
        work_tree += area * int(block_lists(intervals, forest.num_rows, tile, by_key=by_key).num_tiles)
        work_expanded += area * causal_tiles(forest.lengths, tile)
    return work_expanded / work_tree


def tree_run(forest: Forest, intervals: AttentionIntervals, name: str) -> tuple[Callable, Callable]:
    """Forward and backward, and the forward alone."""
    dims = HEAD_DIMS[name]
    q, k, v, dy = make(forest.num_rows, dims, 0)
    leaves = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]

    def forward() -> torch.Tensor:
        return tree_attention(*leaves, intervals, scale=dims.qk**-0.5)

    return lambda: torch.autograd.grad(forward(), leaves, dy[None]), torch.no_grad()(forward)


def expanded_run(forest: Forest, name: str) -> tuple[Callable, Callable]:
    """Forward and backward of all batches of trajectories, one after the other, and the forwards alone."""
    dims = HEAD_DIMS[name]
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
            torch.autograd.grad(varlen(*leaves, lengths, dims.qk**-0.5), leaves, dy)

    @torch.no_grad()
    def forward() -> None:
        for leaves, _, lengths in parts:
            varlen(*leaves, lengths, dims.qk**-0.5)

    return both, forward


def time_lists(intervals: AttentionIntervals, forest: Forest, name: str) -> float:
    """Milliseconds to build both lists, once per microbatch."""
    times = []
    for _ in range(5):
        fresh = AttentionIntervals(lo=intervals.lo, hi=intervals.hi)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tile, by_key in zip(flash.tiles_of(*HEAD_DIMS[name][:2]), (False, True), strict=True):
            block_lists(fresh, forest.num_rows, tile, by_key=by_key)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def difference(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """The largest relative error of the gradients, by norms; NaN if there is any."""
    pairs = [(x.float(), y.float()) for x, y in zip(found, wanted, strict=True)]
    return torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).max().item()


def measure(layout: str, forest: Forest, name: str) -> dict:
    """The row of a layout, with the variants that its head dims have."""
    intervals, by_pairs = forest.intervals().to("cuda"), layout.startswith("prefix")
    both, forward = tree_run(forest, intervals, name)
    expanded, expanded_forward = expanded_run(forest, name)
    tree_ms, baseline_ms = steady_ms(both, 0.6), steady_ms(expanded, 0.6)
    pairs, tiles = forest.pairs[0] / forest.pairs[1], tile_ratio(forest, intervals, name)
    variants: dict[str, dict] = {}
    wanted = both()
    for variant in (variant for variant, dims in FLASH_VARIANTS.items() if name in dims):
        try:
            with use(variant):
                if (error := difference(both(), wanted)) < VARIANT_LIMIT:
                    ms, ratio = steady_ms(both, 0.4), pairs if by_pairs else tile_ratio(forest, intervals, name)
                    variants[variant] = {"tree_ms": ms, "efficiency": baseline_ms / ms / ratio, "difference": error}
                else:
                    variants[variant] = {"failure": f"gradients differ from the package's by {error}"}
        except Exception:
            variants[variant] = {"failure": record.failure()}
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


def parity_of(paths: list[Path]) -> dict[str, dict]:
    """What the checks wrote, by how attention was called, and which failed or left nothing."""
    found: dict[str, dict] = {"parity": {}, "variants_parity": {}, "failures": {}}
    for path in paths:
        if not path.exists():
            found["failures"][path.stem] = "the parity check has left no result"
            continue
        part = record.read(path)
        for label, entry in part["parity"].items():
            ours = label in HEAD_DIMS or label.startswith("flex")
            found["parity" if ours else "variants_parity"][label] = entry
        found["failures"] |= part["failures"]
    return found


def main(options: argparse.Namespace) -> None:
    """Every layout at every head dim."""
    parity = parity_of(options.parity)
    forests = {"prefix-8192+16x1536": fork_layout(8192, 16, 1536)}
    forests |= {name: shape_forest(options.shapes, name) for name in SHAPES}
    forests |= {f"{name}-16K": shape_forest(options.shapes, name, SHAPE_ROWS // 2) for name in SHAPES}
    rows = record.Rows(options.out, parity)
    for name in HEAD_DIMS:
        fine = attention_passes(parity["parity"].get(name, {}))
        for layout, forest in forests.items() if fine else ():
            rows.add(f"{name} {layout}", lambda layout=layout, forest=forest: [measure(layout, forest, name)])  # noqa: B023
