"""The least time of a step's forwards and backwards: products at the measured peak, all else at the bandwidth.

What is counted, for a plan's microbatches (``rows`` network rows, ``labels`` rows of the head):

- *products*: two operations per weight and row (experts: of the chosen ones) in a forward, twice that in a backward,
  once more where layers are checkpointed. The head computes its logits again in the backward.
- *bytes* of all that stands between products, attention and the rule: each such operation reads what it is given and
  writes what it returns once (a norm 2 widths, a residual sum 3, SwiGLU 3, a gate 2, a gated norm 3, the convolution
  2; experts: rows copied to ``k`` and summed back), and in a backward reads both and the gradient and writes one:
  twice as much. Weights' gradients are written by the first microbatch and read and written by each further one;
  the optimizer reads weight and gradient and writes the weight (SGD).
- attention and the rule take what the same run's kernels took.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Measured: operations of a bf16 product and bytes of a copy (read and written), per second."""

    operations: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class PerRow:
    """Of one forward of one row: operations and bytes of the layers; operations of a row of the head."""

    operations: float
    bytes: float
    head: float


def measure_machine() -> Machine:
    """By a product of 8,192 and a copy of 4 GB, medians of 10."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    product, copy = _seconds(lambda: a @ b), _seconds(lambda: target.copy_(source))
    return Machine(operations=2 * 8192**3 / product, bytes=2 * source.nbytes / copy)


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(13):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def per_row(model: nn.Module, element: int = 2) -> PerRow:
    """Of a hybrid model, from its modules.

    Args:
        model: a causal language model.
        element: bytes of a value between operations.
    """
    config = model.config
    head = model.get_output_embeddings()
    chosen = getattr(config, "num_experts_per_tok", 0)
    operations = widths = 0.0
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("Experts"):
            _, both, hidden = module.gate_up_proj.shape
            operations += chosen * 2 * (both * hidden + hidden * both // 2)
            widths += (1 + chosen) * hidden + chosen * 3 * both // 2 + (1 + chosen) * hidden
        elif "Router" in kind or (isinstance(module, nn.Linear) and module is not head):
            operations += 2 * module.weight.numel()
        elif isinstance(module, nn.Conv1d):
            widths += 2 * module.weight.shape[0]
        elif kind.endswith("RMSNormGated"):
            widths += 3 * _inner(model, name)
        elif kind.endswith("RMSNorm"):
            widths += 2 * module.weight.numel()
        elif kind.endswith("MLP"):
            widths += 3 * module.gate_proj.weight.shape[0]
        elif kind.endswith("ForgetGate"):
            widths += 2 * config.linear_num_heads * config.linear_head_dim
        elif kind.endswith("DecoderLayer"):
            widths += 2 * 3 * config.hidden_size
    return PerRow(operations=operations, bytes=element * widths, head=2 * head.weight.numel())


def _inner(model: nn.Module, name: str) -> int:
    """Width of all heads of the mixer around a gated norm."""
    config = model.config
    if hasattr(config, "linear_value_head_dim"):
        return config.linear_num_value_heads * config.linear_value_head_dim
    return config.linear_num_heads * config.linear_head_dim


def floor_seconds(
    cost: PerRow,
    machine: Machine,
    *,
    rows: int,
    labels: int,
    microbatches: int,
    parameters: int,
    checkpointing: bool,
    measured: float,
) -> dict[str, float]:
    """Seconds of a step's forwards and backwards without a scoring pass, by part, and their ``total``; ``optimizer``
    stands beside it.

    Args:
        cost: of a row.
        machine: as measured.
        rows: network rows of all microbatches.
        labels: rows of the head.
        microbatches: forwards and backwards.
        parameters: trained, in bf16.
        checkpointing: whether layers run twice.
        measured: seconds of the attention's and the rule's kernels.
    """
    passes = 4 if checkpointing else 3
    products = (passes * cost.operations * rows + 4 * cost.head * labels) / machine.operations
    accumulated = 2 * parameters * (1 + 3 * (microbatches - 1))
    between = (passes * cost.bytes * rows + accumulated) / machine.bytes
    found = {"products": products, "attention_and_rule": measured, "bytes": between}
    return {**found, "total": sum(found.values()), "optimizer": 3 * 2 * parameters / machine.bytes}
