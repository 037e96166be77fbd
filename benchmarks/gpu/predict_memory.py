"""Predicts a linear layer's peak memory on the CPU: the real code on the meta device, with kernels that do nothing.

    python predict_memory.py SHAPES_FOLDER OUT.json [--kinds gdn-16/32 ...]

Every tensor that a step allocates is counted while it lives, for the tree and for stock FLA on the unique tokens, as
``time_linear.py`` measures them. Needs FLA and Triton, no GPU.
"""

import argparse
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

torch.cuda.get_device_capability = lambda *_: (9, 0)  # what the GPU path asks for when it is imported
triton.runtime.JITFunction.run = lambda self, *args, **kwargs: None
triton.runtime.autotuner.Autotuner.run = lambda self, *args, **kwargs: None
triton.runtime.autotuner.Heuristics.run = lambda self, *args, **kwargs: None
triton.runtime.driver.set_active(type("NoDriver", (), {"get_current_device": lambda self: 0})())

from layers import LinearLayer, Mixer, expanded_mixer, make_layer  # noqa: E402
from trees import Forest, layouts, shape_forest  # noqa: E402

from harts_hf.kernels.conv import triton as conv_backend  # noqa: E402
from harts_hf.kernels.linear_attention import fla  # noqa: E402

SHAPES = ("miniswe_b_drop", "tot_game24", "vmcts_dafny_bst", "nemo_qwen3think_b_drop")
LAYOUTS = ("prompt-16K-3/4", "nested-16K-15/16")
KINDS = ("gdn-16/32", "kda-32", "kda-16")


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made while it is entered, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._ids: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        number = storage._cdata
        if number in self._ids:
            return
        self._ids.add(number)
        size = -(-storage.nbytes() // 512) * 512
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, number, size)

    def _free(self, number: int, size: int) -> None:
        self._ids.discard(number)
        self.now -= size


def tree_mixer(forest: Forest) -> Mixer:
    """As in ``layers.py``, past the checks that refuse tables on another device than the rows."""
    linear, table = forest.linear_tables(), forest.conv_table(4)
    none = torch.zeros(0, dtype=torch.int64)

    def rule(run: Callable[..., tuple[torch.Tensor, torch.Tensor]]):
        def call(q, k, v, g, beta):
            initial = torch.empty(0, v.shape[1], q.shape[2], v.shape[2], device=q.device)
            return run(
                q, k, v, g, beta, linear, initial_states=initial, export_nodes=none, scale=0.1, use_qk_l2norm=True
            )[0]

        return call

    return Mixer(
        conv=lambda x, weight: conv_backend.tree_causal_conv1d(x, weight, None, table, silu=True),
        gated=rule(fla.gated_delta_rule),
        kimi=rule(fla.kimi_delta_rule),
    )


def peak(layer: LinearLayer, mixer: Mixer, tokens: int) -> int:
    """Peak bytes of a step above its inputs, as ``measure.peak_bytes`` counts them."""
    hidden = layer.in_proj_qkv.in_features
    x = torch.empty(tokens, hidden, device="meta", dtype=torch.bfloat16).requires_grad_()
    dy = torch.empty(tokens, hidden, device="meta", dtype=torch.bfloat16)
    with LiveBytes() as live:
        torch.autograd.grad(layer(x, mixer), [x, *layer.parameters()], dy)
    return live.peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    arguments = parser.parse_args()
    forests = {name: shape_forest(arguments.shapes, name, 32768) for name in SHAPES}
    forests |= {name: forest for name, forest in layouts((16384,)).items() if name in LAYOUTS}
    recorded = {
        (row["kind"], row["layout"]): row
        for row in json.loads((Path(__file__).parents[1] / "results" / "kernels_h200.json").read_text())["rows"]
        if row["op"] == "linear"
    }
    rows = []
    for kind in arguments.kinds:
        with torch.device("meta"):
            layer = make_layer(kind, device="meta")
        for name, forest in forests.items():
            quarter = np.diff(np.linspace(0, forest.num_rows, 5).astype(np.int64))
            ends = torch.from_numpy(np.concatenate([[0], quarter.cumsum()]))
            tree = peak(layer, tree_mixer(forest), forest.num_rows)
            baseline = peak(layer, expanded_mixer(ends), forest.num_rows)
            before = recorded.get((kind, name), {})
            row = {
                "kind": kind,
                "layout": name,
                "peak_bytes": tree,
                "peak_bytes_baseline_on_unique": baseline,
                "ratio": tree / baseline,
                "recorded": before.get("peak_bytes"),
                "recorded_baseline": before.get("peak_bytes_baseline_on_unique"),
            }
            rows.append(row)
            print(row, flush=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
