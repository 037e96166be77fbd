"""DeepSpeed ZeRO-3: parameters gathered layer by layer, not module by module."""

from typing import Any

from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer


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
    if not is_deepspeed_zero3_enabled():
        return False
    plugin = accelerator.state.deepspeed_plugin
    named = plugin.deepspeed_config["zero_optimization"].get("leaf_module") or plugin.transformer_moe_cls_names
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    trained = all(parameter.requires_grad for layer in layers for parameter in layer.parameters())
    if named or not trained or any(getattr(module, "_z3_leaf", False) for module in model.modules()):
        return False
    from deepspeed.utils import set_z3_leaf_module

    for layer in layers:
        set_z3_leaf_module(layer, True)
    return True
