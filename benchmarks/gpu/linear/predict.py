"""Predicts a linear layer's peak memory on the CPU: the real code on the meta device, with kernels that do nothing.

Every tensor that a step allocates is counted while it lives, for the tree and for stock FLA on the unique tokens, as
:mod:`benchmarks.gpu.linear.timing` measures them. Needs FLA and Triton, no GPU.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu import hopper, record
from benchmarks.gpu.linear.layers import LinearLayer, Mixer, expanded_mixer, make_layer
from benchmarks.gpu.registry import PREDICTED_LAYOUTS
from benchmarks.gpu.trees import Forest, named_forest
from benchmarks.live_bytes import LiveBytes


class AllocatedBytes(LiveBytes):
    """Of tensors that a GPU would hold: those on the meta device."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            super()._add(storage)


def tree_mixer(forest: Forest) -> Mixer:
    """As in ``layers.py``, past the checks that refuse tables on another device than the rows."""
    from harts_hf.kernels.conv import triton as conv
    from harts_hf.kernels.linear_attention import fla

    linear, table = forest.linear_tables(), forest.conv_table(4)
    none = torch.zeros(0, dtype=torch.int64)

    def rule(run: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
        def call(q, k, v, g, beta):
            initial = torch.empty(0, v.shape[1], q.shape[2], v.shape[2], device=q.device)
            return run(
                q, k, v, g, beta, linear, initial_states=initial, export_nodes=none, scale=0.1, use_qk_l2norm=True
            )[0]

        return call

    return Mixer(
        conv=lambda x, weight: conv.tree_causal_conv1d(x, weight, None, table, silu=True),
        gated=rule(fla.gated_delta_rule),
        kimi=rule(fla.kimi_delta_rule),
    )


def peak(layer: LinearLayer, mixer: Mixer, tokens: int) -> int:
    """Peak bytes of a step above its inputs, as ``measure.peak_bytes`` counts them."""
    hidden = layer.in_proj_qkv.in_features
    x = torch.empty(tokens, hidden, device="meta", dtype=torch.bfloat16).requires_grad_()
    dy = torch.empty(tokens, hidden, device="meta", dtype=torch.bfloat16)
    with AllocatedBytes() as live:
        torch.autograd.grad(layer(x, mixer), [x, *layer.parameters()], dy)
    return live.peak


def main(options: argparse.Namespace) -> None:
    """Predictions beside what the record holds."""
    hopper.pretend()
    hopper.no_launches()
    forests = {name: named_forest(options.shapes, name) for name in PREDICTED_LAYOUTS}
    recorded = record.read(record.RESULTS / "kernels_h200.json")["rows"]
    measured = {record.cell(row): row for row in recorded if row["op"] == "linear"}
    rows = []
    for kind in options.kinds:
        with torch.device("meta"):
            layer = make_layer(kind, device="meta")
        for name, forest in forests.items():
            ends = torch.from_numpy(np.linspace(0, forest.num_rows, 5).astype(np.int64))
            tree = peak(layer, tree_mixer(forest), forest.num_rows)
            baseline = peak(layer, expanded_mixer(ends), forest.num_rows)
            before = measured.get(f"{kind} {name}", {})
            rows.append(
                {
                    "kind": kind,
                    "layout": name,
                    "peak_bytes": tree,
                    "peak_bytes_baseline_on_unique": baseline,
                    "ratio": tree / baseline,
                    "recorded": before.get("peak_bytes"),
                    "recorded_baseline": before.get("peak_bytes_baseline_on_unique"),
                }
            )
            print(rows[-1], flush=True)
    record.write(options.out, rows)
