"""DeepSpeed ZeRO-3: models built in parts, parameters gathered layer by layer, not module by module."""

import os
from typing import Any

import torch
from torch import distributed, nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer


def name_accelerator() -> None:
    """Without a GPU, tells DeepSpeed to take the CPU, which it would take with a warning.

    Accelerate (1.15) imports it wherever it is installed, also where nothing runs under it.
    """
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def show_processes() -> None:
    """Lets DeepSpeed see the processes that run, before a model is built in parts.

    On CPUs Transformers (5.24) connects them without DeepSpeed, which then takes itself for alone and refuses the
    batch sizes of several processes ("Check batch related parameters"). Without ZeRO-3 this does nothing.
    """
    if not is_deepspeed_zero3_enabled() or not distributed.is_initialized():
        return
    from deepspeed import comm

    if not comm.is_initialized():
        comm.init_distributed(dist_backend=distributed.get_backend(), auto_mpi_discovery=False)


def gather_whole_layers(model: nn.Module, accelerator: Any) -> bool:
    """Lets ZeRO-3 gather and release each layer's parameters at once, before its engine is made.

    By itself DeepSpeed does both for every module of a layer, in Python: 3,754 gathers in a step of a model of 24
    layers, for which two H200s were idle for 2.5 of 3.5 s. A layer's whole parameters are held meanwhile, as under
    FSDP2.

    Left as it is where the configuration names modules (``leaf_module``, ``transformer_moe_cls_names``), and where
    parameters of a layer are frozen, since DeepSpeed reduces a gradient for each parameter of such a module.

    Args:
        model: not wrapped yet.
        accelerator: of the trainer.

    Returns:
        Whether layers are gathered at once.
    """
    if not gathers_whole_layers(model, accelerator):
        return False
    from deepspeed.utils import set_z3_leaf_module

    for layer in _layers(model):
        set_z3_leaf_module(layer, True)
    return True


def gathers_whole_layers(model: nn.Module, accelerator: Any) -> bool:
    """Whether :func:`gather_whole_layers` would."""
    if not is_deepspeed_zero3_enabled():
        return False
    plugin = accelerator.state.deepspeed_plugin
    named = plugin.deepspeed_config["zero_optimization"].get("leaf_module") or plugin.transformer_moe_cls_names
    named = named or any(getattr(module, "_z3_leaf", False) for module in model.modules())
    return not named and not has_frozen_layers(model)


def has_frozen_layers(model: nn.Module) -> bool:
    """Whether a parameter of a layer is not trained, as with adapters."""
    return any(not parameter.requires_grad for layer in _layers(model) for parameter in layer.parameters())


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
