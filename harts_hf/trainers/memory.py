"""What a training takes of a device's memory beside rows: gradients and optimizer, which come, and what is free."""

from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import nn

from harts_hf.modeling.checkpointing import checkpointed_every
from harts_hf.modeling.memory import decoder_layers, num_elements, row_bytes
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.runtime.budgets import MARGIN, Budget, fitting_budget

# Bytes of an optimizer's states per byte of a parameter (AdamW keeps two tensors like it), or per parameter.
_PER_BYTE = {"adamw_torch": 2.0, "adamw_torch_fused": 2.0, "adamw_apex_fused": 2.0, "adagrad": 1.0, "rmsprop": 1.0,
             "lion_32bit": 1.0, "sgd": 0.0}  # fmt: skip
_PER_PARAMETER = {"adamw_8bit": 2.0, "adamw_bnb_8bit": 2.0, "paged_adamw_8bit": 2.0, "lion_8bit": 1.0,
                  "rmsprop_bnb_8bit": 1.0, "ademamix_8bit": 3.0}  # fmt: skip


class Gathered(NamedTuple):
    """Bytes that FSDP2 and ZeRO-3 have beside their shards while a model runs."""

    weights: float
    gradients: float


def optimizer_bytes(name: str, trained: int, trained_bytes: float) -> float | None:
    """Bytes of an optimizer's states; None of one that is not known here.

    Args:
        name: as ``optim`` has it.
        trained: parameters.
        trained_bytes: of these parameters, as the optimizer sees them.
    """
    if name in _PER_BYTE:
        return _PER_BYTE[name] * trained_bytes
    return _PER_PARAMETER[name] * trained if name in _PER_PARAMETER else None


def gathered_bytes(model: nn.Module, width: int) -> Gathered:
    """The running layer and the next one, which is gathered meanwhile, and what belongs to no layer (embedding, head);
    one layer's gradients, in float32, before they are reduced.

    Args:
        model: on the meta device, whole, or sharded.
        width: bytes of an element as products run.
    """
    layers = [sum(num_elements(p) for p in layer.parameters()) for layer in decoder_layers(model)]
    total = sum(num_elements(p) for p in model.parameters())
    return Gathered(weights=float(width * (2 * max(layers) + total - sum(layers))), gradients=4.0 * max(layers))


def computing_dtype(trainer: Any) -> torch.dtype:
    """The dtype that a trainer's products run in."""
    dtype: torch.dtype = next(trainer.model.parameters()).dtype
    return torch.bfloat16 if trainer.args.bf16 else dtype


def measured_budget(trainer: Any) -> Budget:
    """The limits that fit into what is free on this process's device, gradients and optimizer taken off as they come.

    On a device whose memory PyTorch does not tell (a CPU), the defaults.

    Raises:
        DoesNotFitError: nothing is left for rows.
    """
    device = trainer.args.device
    if device.type != "cuda":
        return Budget(reason=f"the default on a {device.type}")
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    coming, margin = bytes_to_come(trainer), MARGIN * total
    args = trainer.args
    rows = row_bytes(
        trainer.accelerator.unwrap_model(trainer.model),
        dtype=computing_dtype(trainer),
        checkpointing=args.gradient_checkpointing,
        every=checkpointed_every(args.gradient_checkpointing_kwargs),
        fused=args.tree_fused_modules == "auto",
        sharded=_is_sharded(trainer),
    )
    reason = (
        f"{free / 1e9:,.1f} GB free, {coming / 1e9:,.1f} GB of gradients and optimizer to come, "
        f"{margin / 1e9:,.1f} GB left alone, {rows.row / 1e6:,.2f} MB a row"
    )
    return fitting_budget(rows, free - coming - margin, offload=args.tree_offload_handoff, reason=reason)


def bytes_to_come(trainer: Any) -> float:
    """Bytes of this process that are not there before the first optimizer step, as far as they are known.

    Of an optimizer whose states are not known here, two of each parameter are taken off, as AdamW has.
    """
    kind = trainer.accelerator.distributed_type
    dtype = computing_dtype(trainer)
    value_model = getattr(trainer, "value_model", None)
    models = [trainer.accelerator.unwrap_model(one) for one in (trainer.model, value_model) if one is not None]
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    total = sum(_local(p).numel() * p.element_size() for p in trained if p.grad is None)
    if kind == DistributedType.DEEPSPEED:  # its states are made with it; gradients of ZeRO-1 and 2 come
        total = 0 if trainer.accelerator.deepspeed_plugin.zero_stage == 3 else 4 * sum(p.numel() for p in trained)
    elif not getattr(trainer.optimizer, "state", None):
        sizes = [(_local(p).numel(), p.element_size()) for p in trained]
        name = getattr(trainer.args.optim, "value", trainer.args.optim)
        trained_bytes = float(sum(count * size for count, size in sizes))
        states = optimizer_bytes(name, sum(count for count, _ in sizes), trained_bytes)
        total += 2 * trained_bytes if states is None else states
    if _is_sharded(trainer):
        total += sum(sum(gathered_bytes(causal_lm_of(model), dtype.itemsize)) for model in models)
    return float(total)


def _is_sharded(trainer: Any) -> bool:
    return trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def _local(parameter: Any) -> torch.Tensor:
    """The part of a parameter that this process holds."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
