"""What a training takes of each process's memory, part by part: sizes of tensors, or estimates."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from harts_hf.cli.launching import Launch
from harts_hf.planner import Schedule

# Bytes of an optimizer's states per byte of a parameter (AdamW keeps two tensors like it), or per parameter.
_PER_BYTE = {"adamw_torch": 2.0, "adamw_torch_fused": 2.0, "adamw_apex_fused": 2.0, "adagrad": 1.0, "rmsprop": 1.0,
             "lion_32bit": 1.0, "sgd": 0.0}  # fmt: skip
_PER_PARAMETER = {"adamw_8bit": 2.0, "adamw_bnb_8bit": 2.0, "paged_adamw_8bit": 2.0, "lion_8bit": 1.0,
                  "rmsprop_bnb_8bit": 1.0, "ademamix_8bit": 3.0}  # fmt: skip
# Bytes of a row's graph per byte that goes in and out of products: norms, gates and states of the rule are the rest.
# The one factor for the 0.66 and 0.85 MB a row of four layers that were measured on an H200 (docs/windows.md), where
# products alone make 0.43 and 0.50 MB: 5 % too much and 5 % too little.
_ROW_FACTOR = 1.63
# The head's logits of a chunk in float32, their exponentials and their gradient; the chunk has at most so many.
_HEAD_TENSORS, _HEAD_ELEMENTS = 3, 2**26


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the memory.

    Attributes:
        name: of the part.
        bytes: on each process; None if nobody knows.
        exact: whether it is the size of tensors that are certain to be there, and no estimate.
        note: how it comes about.
    """

    name: str
    bytes: float | None
    exact: bool = False
    note: str = ""


def memory_parts(model: Any, training: Any, launch: Launch, schedule: Schedule, *, with_reference: bool) -> list[Part]:
    """The parts, on the process with the most work.

    Args:
        model: the policy, adapters included; may be on the meta device.
        training: the trainer's arguments.
        launch: processes and backend.
        schedule: of one optimizer step, on one process or on all.
        with_reference: whether a reference model is kept beside it.
    """
    return [
        *_states(model, training, launch, with_reference),
        *_working(model, training, launch),
        *_of_rows(model, training, schedule),
    ]


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """All parameters, and those that are trained."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def _states(model: Any, training: Any, launch: Launch, with_reference: bool) -> list[Part]:
    total, trained = parameter_counts(model)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    own_trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    half = launch.is_deepspeed and (training.bf16 or training.fp16)
    weights, gradients = (2 * total, 2 * trained) if half else (own, own_trained)
    if launch.gradient_bytes is not None:
        gradients = launch.gradient_bytes * trained
    split = {name: launch.shards(name) for name in ("weights", "gradients", "optimizer")}
    note = f"{weights / total:.3g} bytes a parameter"
    parts = [Part(name="weights", bytes=weights / split["weights"], exact=True, note=_over(note, split["weights"]))]
    if with_reference:
        parts.append(Part(name="reference model", bytes=weights / split["weights"], exact=True, note=parts[0].note))
    note = f"{gradients / max(trained, 1):.3g} bytes a trained parameter"
    parts.append(
        Part(name="gradients", bytes=gradients / split["gradients"], exact=True, note=_over(note, split["gradients"]))
    )
    name = getattr(training.optim, "value", training.optim)
    states = _optimizer_bytes(name, trained, 4 * trained if half else own_trained)
    master = 4 * trained if half else 0
    where = " (on the CPU)" if launch.offloads_optimizer else ""
    note = f"{name}{' and float32 master weights' if master else ''}{where}"
    if states is None:
        parts.append(Part(name="optimizer", bytes=None, note=f"{note}: its states are not known here"))
    else:
        size = 0.0 if launch.offloads_optimizer else (states + master) / split["optimizer"]
        parts.append(Part(name="optimizer", bytes=size, exact=True, note=_over(note, split["optimizer"])))
    return parts


def _optimizer_bytes(name: str, trained: int, trained_bytes: float) -> float | None:
    if name in _PER_BYTE:
        return _PER_BYTE[name] * trained_bytes
    return _PER_PARAMETER[name] * trained if name in _PER_PARAMETER else None


def _working(model: Any, training: Any, launch: Launch) -> list[Part]:
    """What a backend keeps beside its shards while the model runs."""
    width = 2 if training.bf16 or training.fp16 else 4
    if launch.backend == "DDP":
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        return [Part(name="buckets", bytes=size, note="DDP's copies of gradients")]
    if launch.shards("weights") == 1:
        return []
    layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(model)]
    total = parameter_counts(model)[0]
    # The running layer and the next one, which is gathered meanwhile; and what belongs to no layer: embedding, head.
    gathered = width * (2 * max(layers) + total - sum(layers))
    return [
        Part(name="gathered weights", bytes=gathered, note=f"{launch.backend}: two layers, embedding and head whole"),
        Part(name="gathered gradients", bytes=4.0 * max(layers), note="of one layer before they are reduced"),
    ]


def _of_rows(model: Any, training: Any, schedule: Schedule) -> list[Part]:
    width = 2 if training.bf16 or training.fp16 else 4
    config = model.config.get_text_config()
    counts = [schedule.memory_counts(rank) for rank in range(schedule.config.world_size)]
    if training.gradient_checkpointing:
        kept, running = row_bytes_of(model, width=width)
        note = "inputs of layers, and one layer computed again (gradient checkpointing)"
    else:
        kept, running = sum(width * _row_elements(layer, config) for layer in _layers(model)), 0
        note = "everything that the backward reads"
    graphs = max(one.peak_bytes({"graph_rows": kept, "backward_rows": running}) for one in counts)
    most = max(int(one.graph_rows.max(initial=0)) for one in counts)
    handed = max(float(one.handed_bytes.max(initial=0)) for one in counts)
    vocabulary = config.vocab_size
    rows = min(max(1, _HEAD_ELEMENTS // vocabulary), max(most, 1))
    largest = max(p.numel() * p.element_size() for p in model.parameters() if p.dim() > 1)
    return [
        Part(
            name="graphs",
            bytes=graphs,
            note=f"{most:,} rows at most: {note}",
        ),
        Part(
            name="handed states",
            bytes=0.0 if training.tree_offload_handoff else handed,
            note="between microbatches" + (" (on the CPU)" if training.tree_offload_handoff else ""),
        ),
        Part(
            name="head",
            bytes=float(_HEAD_TENSORS * 4 * rows * vocabulary + largest),
            note=f"logits of {rows:,} rows in float32, gradients of the largest weight",
        ),
    ]


def row_bytes_of(model: Any, *, width: int) -> tuple[float, float]:
    """Bytes of a row's graph under activation checkpointing: inputs of all layers, and one layer computed again.

    Args:
        model: may be on the meta device.
        width: bytes of an element of activations.
    """
    config, layers = model.config.get_text_config(), _layers(model)
    return width * config.hidden_size * len(layers), max(width * _row_elements(layer, config) for layer in layers)


def _layers(model: Any) -> list[nn.Module]:
    """The decoder layers: the longest list of modules that is in no other one."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def _row_elements(layer: nn.Module, config: Any) -> float:
    """Elements that a layer's graph holds per row, by what goes in and out of its products and convolutions."""
    elements, experts = 0.0, 0
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            elements += module.in_features + module.out_features
        elif isinstance(module, nn.Conv1d):
            elements += module.in_channels + module.out_channels
        elif type(module).__name__.endswith("Experts"):
            experts += 1
    if experts:  # three products in each of the experts that a token goes to
        inner = config.moe_intermediate_size
        elements += experts * config.num_experts_per_tok * (2 * config.hidden_size + 3 * inner)
    return _ROW_FACTOR * elements


def _over(note: str, shards: int) -> str:
    return note if shards == 1 else f"{note}, over {shards} processes"
