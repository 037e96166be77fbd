"""Bytes that the forwards and backwards of a model take, by what a schedule counts: the package's one memory model."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from harts_hf.modeling.families import family_of
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.planner import CHUNK_SIZE, Schedule
from harts_hf.planner.walk import FloatArray

# Bytes of a row's graph per byte that goes in and out of a layer's products (experts apart), and what a running
# backward takes besides. With modules as single operations, and with the stock ones, which keep what they round.
# From peaks on an H200 (benchmarks/results/step_h200.json, whole_h200.json; docs/planner.md says how well they are
# met), rounded up, so that predictions are too high rather than too low.
_DENSE = {True: 1.05, False: 1.75}
_EXPERTS = {True: 0.75, False: 1.45}
_RUNNING = {True: 0.35, False: 0.6}
# The same, where float32 weights run in bfloat16: the residual stream and what norms return are float32.
_WIDE_STREAM = 1.25
# Chunk nodes are filled up to whole chunks; a filled row has the convolution's channels, their gradients and states.
_FILLED = 1.2
# Copies of the keys and values of a prefix row in a full-attention layer, as attention reads them: kept with a graph,
# and made while a backward runs (gathered, expanded from latents, put together, and the gradients of each).
_PREFIX_KEPT, _PREFIX_RUNNING = 1, 3
# The head's logits of a chunk, and their gradient, where they are not in one place and dtype: bytes per logit.
_LOGIT = {True: 6, False: 16}
_HEAD_ELEMENTS = 2**26  # logits of a chunk, at most
# Tables of a window, constants and workspaces of kernels: 0.1 to 0.2 GB were measured.
WORKSPACE = 2**28


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """What forwards and backwards take, estimated; each in bytes.

    Attributes:
        kept: of a network row, as long as it has a graph.
        running: of a network row while its backward runs, besides: of the layer that is computed again under
            activation checkpointing, or of gradients.
        filled: of a row that fills up a chunk node of the linear layers, as long as it has a graph.
        filled_running: the same while its backward runs.
        prefix: of a row that is read from trunks, as long as the graph that reads it is there.
        prefix_running: the same while the backward of that graph runs, besides.
        head: gradients of the head's weight, while a backward begins.
        logits: of a row of the head then, and their gradient.
        chunk_rows: rows of the head that are computed at once, at most.
        layer: gradients of one layer (the largest one) before they are added to those that are there.
        casts: autocast's copies of weights while a forward runs.
        kept_casts: those that stay as long as the forward has a graph.
        state_elements: of the state of a chunk node in a linear layer; no bytes, and what offsets of kernels reach.
    """

    kept: float
    running: float
    filled: float
    filled_running: float
    prefix: float
    prefix_running: float
    head: float
    logits: float
    chunk_rows: int
    layer: float
    casts: float = 0.0
    kept_casts: float = 0.0
    state_elements: int = 0

    @property
    def row(self) -> float:
        """Bytes of a network row that has a graph and whose backward runs."""
        return self.kept + self.running

    def head_of(self, num_rows: int) -> float:
        """Bytes of the head while the backward of so many rows begins."""
        return self.head + self.logits * min(num_rows, self.chunk_rows)


def row_bytes(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    checkpointing: bool,
    fused: bool,
    every: int = 1,
    sharded: bool = False,
) -> RowBytes:
    """What a model of a supported family takes, by the sizes of its modules.

    Args:
        model: patched or not, inside a PEFT model or not; may be on the meta device.
        dtype: that products run in; the parameters' if None.
        checkpointing: whether activation checkpointing is on: then a row keeps the inputs of layers alone.
        every: of how many layers one is checkpointed then; the others keep their graphs.
        fused: whether modules run as single operations (:mod:`harts_hf.modeling.fused`).
        sharded: whether processes share the weights, which are gathered in the dtype of products then.

    Raises:
        UnsupportedModelError: another model.
    """
    base = causal_lm_of(model)
    config, family = base.config.get_text_config(), family_of(base)
    stored = next(base.parameters()).dtype
    width = (dtype or stored).itemsize
    stream = max(width, stored.itemsize)  # of the residual stream
    layers = decoder_layers(base)
    factor = width * (_WIDE_STREAM if stream > width else 1.0)
    graphs, backwards = [], []
    for layer in layers:
        dense, experts = _elements(layer, config)
        graphs.append(factor * (_DENSE[fused] * dense + _EXPERTS[fused] * experts))
        backwards.append(factor * _RUNNING[fused] * (dense + experts))
    # Layers that keep their graphs, and those of them whose kind has rows that fill up chunks, or reads prefixes.
    whole = [number for number in range(len(layers)) if not checkpointing or number % every]
    kinds = [config.layer_types[number] for number in whole]
    linear, full = (kinds.count(f"{kind}_attention") for kind in ("linear", "full"))
    inputs = stream * config.hidden_size * (len(layers) - len(whole))
    shape = family.linear_shape(config)
    filled = _FILLED * width * shape.conv_channels
    prefix = width * family.key_elements(config, True)
    largest = max(range(len(layers)), key=lambda number: graphs[number])
    head: Any = base.get_output_embeddings()
    # Its gradient is added up in float32 and rounded; of tied weights it waits for that of the embedding.
    tied = stored.itemsize if base.get_input_embeddings().weight is head.weight else 0
    weight = num_elements(head.weight) * (4 + stored.itemsize + tied) if head.weight.requires_grad else 0
    casts = 0 if sharded else sum(width * p.numel() for p in base.parameters() if p.element_size() > width)
    return RowBytes(
        kept=inputs + sum(graphs[number] for number in whole),
        running=graphs[largest] + backwards[largest] if checkpointing else backwards[largest],
        filled=filled * linear,
        filled_running=filled,
        prefix=float(_PREFIX_KEPT * prefix * full),
        prefix_running=float(_PREFIX_RUNNING * prefix),
        head=float(weight),
        logits=float(_LOGIT[fused] * config.vocab_size),
        chunk_rows=max(1, _HEAD_ELEMENTS // config.vocab_size),
        layer=float(max(_trained_bytes(layer) for layer in layers)),
        casts=float(casts),
        kept_casts=float(casts) * len(whole) / len(layers),
        state_elements=shape.heads * shape.keys * shape.values,
    )


class GraphBytes(NamedTuple):
    """Bytes of graphs while each op of a rank runs, ``[ops]`` each, in the order of ``Schedule.ops(dummies=False)``.

    Attributes:
        kept: of the graphs that are alive.
        running: of the op itself, besides: a layer that is computed again, or gradients.
    """

    kept: FloatArray
    running: FloatArray


def graph_bytes(schedule: Schedule, rows: RowBytes, *, rank: int = 0) -> GraphBytes:
    """What graphs take on a rank: network rows, rows that fill up chunks, and prefixes.

    Args:
        schedule: of one optimizer step.
        rows: of the model.
        rank: whose ops.
    """
    counts, ops = schedule.memory_counts(rank), schedule.ops(rank, dummies=False)
    own = np.array([schedule.microbatches[index].num_rows for _, index in ops], np.float64)
    chunks = np.array([schedule.measures[index].chunks for _, index in ops], np.float64)
    filled = np.maximum(0, CHUNK_SIZE * counts.graph_chunks - counts.graph_rows)
    return GraphBytes(
        kept=rows.kept * counts.graph_rows + rows.filled * filled + rows.prefix * counts.graph_prefix_rows,
        running=rows.running * own
        + rows.filled_running * np.maximum(0, CHUNK_SIZE * chunks - own)
        + rows.prefix_running * counts.backward_prefix_rows,
    )


def peak_of_rows(
    schedule: Schedule, rows: RowBytes, *, gradients: float, rank: int = 0, offload: bool = False
) -> float:
    """The most that a rank's ops take on a GPU beside weights and optimizer: gradients, graphs, handed states, head.

    Gradients are not there before the first backward, and all there after it; in it, graphs go as gradients come, so
    that its peak lies at one of its ends.

    Args:
        schedule: of one optimizer step.
        rows: of the model.
        gradients: bytes of all gradients.
        rank: whose ops.
        offload: whether handed states lie on the CPU between uses.
    """
    graphs = graph_bytes(schedule, rows, rank=rank)
    handed = 0.0 if offload else schedule.memory_counts(rank).handed_bytes
    peak, any_gradients, open_graphs = 0.0, False, 0
    for (kind, index), alive, running in zip(
        schedule.ops(rank, dummies=False), graphs.kept + handed, graphs.running, strict=True
    ):
        before = (gradients if any_gradients else 0.0) + rows.kept_casts * open_graphs
        if kind != "B":
            peak = max(peak, before + alive + running + rows.casts)
            open_graphs += kind == "F"
            continue
        open_graphs -= 1
        own = schedule.microbatches[index].num_rows
        again = rows.layer if any_gradients else 0.0
        begins = before + alive + max(rows.head_of(own), running + again)
        ends = gradients + alive - rows.kept * own + running
        peak, any_gradients = max(peak, begins, ends), True
    return float(peak) + WORKSPACE


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: the longest list of modules that is in no other one."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def _elements(layer: nn.Module, config: Any) -> tuple[int, int]:
    """Elements of a row that go in and out of a layer's products and convolutions, and of those of its experts."""
    dense, experts = 0, 0
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            dense += module.in_features + module.out_features
        elif isinstance(module, nn.Conv1d):
            dense += module.in_channels + module.out_channels
        elif type(module).__name__.endswith("Experts"):
            experts += 1
    # Three products in each of the experts that a token goes to.
    each = config.num_experts_per_tok * (2 * config.hidden_size + 3 * config.moe_intermediate_size) if experts else 0
    return dense, experts * each


def num_elements(parameter: nn.Parameter) -> int:
    """Of a whole parameter, also where this process holds a part of it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _trained_bytes(module: nn.Module) -> int:
    return sum(num_elements(p) * p.element_size() for p in module.parameters() if p.requires_grad)
