"""What tree training refuses, by name, before anything is computed."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harts_hf.batch.handoff import CONV_ANCESTORS
from harts_hf.errors import UnsupportedModelError
from harts_hf.kernels.conv import ACTIVATIONS
from harts_hf.modeling.families import FAMILIES, Family

TRANSFORMERS_RANGE = ("5.24", "5.25")
LAYER_TYPES = {"full_attention", "linear_attention"}
LOGIT_SCALES = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Dimensions of a device mesh that split a model's layers, its sequences or its experts, by their usual names.
SPLITTING = {"tp": "tensor", "cp": "context", "sp": "sequence", "pp": "pipeline", "ep": "expert"}
REENTRANT_MESSAGE = (
    "expected non-reentrant activation checkpointing, got use_reentrant=True: pass "
    'activation_checkpointing_kwargs={"use_reentrant": False}; for adapters under ZeRO-3 TRL sets it to True '
    "whatever is passed, and there only activation_checkpointing=False helps"
)


def check_versions() -> None:
    """Raises UnsupportedModelError outside the tested range of Transformers."""
    low, high = TRANSFORMERS_RANGE
    if not Version(low) <= Version(transformers.__version__) < Version(high):
        raise UnsupportedModelError(
            f"expected transformers >= {low}, < {high} (the range the patches were tested with), got "
            f"{transformers.__version__}"
        )


def check_model(model: nn.Module, family: Family) -> None:
    """Raises UnsupportedModelError for a model of a known family whose settings tree training would get wrong."""
    config: Any = model.config
    for name in ("linear_mixer", "full_mixer"):
        if not hasattr(family.module, getattr(family, name)):
            raise UnsupportedModelError(f"transformers has no {getattr(family, name)} in {family.module.__name__}")
    check_parallelism(model)
    _check_layers(config)
    family.check_config(config)
    _check_convolutions(model, family)
    _check_rope(config)
    _check_head(model, config)
    check_dropout(model)
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise UnsupportedModelError("expected float32 or bfloat16 parameters, got float16: states would overflow")
    if getattr(model, "is_quantized", False):
        raise UnsupportedModelError("expected unquantized weights, got a quantized model")


def check_checkpointing(model: nn.Module) -> None:
    """Raises UnsupportedModelError where activation checkpointing is on and reentrant.

    A reentrant checkpoint runs its body without gradients first, so states that leave the layer would carry none.
    """
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is None or not getattr(module, "gradient_checkpointing", False):
            continue
        if getattr(function, "keywords", {}).get("use_reentrant", False):
            raise UnsupportedModelError(REENTRANT_MESSAGE)
        return


def check_trainable(model: nn.Module) -> None:
    """Raises UnsupportedModelError for a model of which no parameter would be trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModelError(
            "expected at least one parameter that requires gradients, got none: nothing would be trained (PEFT loads "
            "adapters frozen unless PeftModel.from_pretrained is given is_trainable=True)"
        )


def check_experts(model: nn.Module, *, zero3: bool) -> None:
    """Raises UnsupportedModelError for experts that run one by one where ZeRO-3 gathers module by module.

    Each expert that a microbatch's tokens hit calls the activation, a module of its own, so the sequence of module
    calls follows the tokens. DeepSpeed compares that sequence between ranks in collectives, and ranks whose
    microbatches hit other experts wait for one another for ever. Where layers are gathered whole (the default, unless
    some of their parameters are frozen), it sees no modules within them.
    """
    config: Any = model.config
    has_experts = any(type(module).__name__.endswith("Experts") for module in model.modules())
    if zero3 and has_experts and config._experts_implementation == "eager":
        raise UnsupportedModelError(
            "expected experts that all run at once where ZeRO-3 gathers module by module, as it does with frozen "
            "parameters or a leaf_module of your own (ranks would hang), got experts_implementation='eager': load the "
            "model with 'grouped_mm' or 'batched_mm', or call set_experts_implementation"
        )


def check_parallelism(model: nn.Module) -> None:
    """Raises UnsupportedModelError for a model whose layers or sequences are split over processes.

    The data dimensions of FSDP are no such split: a forward gathers what it reads. Nor are experts that each process
    sends its tokens to (Transformers' expert parallelism, ``DistributedConfig(ep_size=..., fsdp_size=...)``): they see
    the rows of a microbatch as tokens, and microbatches of several ranks that run forward beside one another run
    backward beside one another (:func:`harts_hf.planner.execution.align`).
    """
    config: Any = model.config
    is_loaded_sharded = getattr(model, "_device_mesh", None) is not None  # by from_pretrained(distributed_config=...)
    if is_loaded_sharded:
        _check_loaded_sharded(config)
    is_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        dims = parameter.device_mesh.mesh_dim_names or ()
        splitting = [
            SPLITTING[part]
            for dim in dims
            for part in dim.split("_")
            if part in SPLITTING and not (part == "ep" and is_loaded_sharded)
        ]
        if splitting or not is_fsdp:
            raise UnsupportedModelError(
                f"expected parameters that are whole or sharded by FSDP2, got {name} on a device mesh of dimensions "
                f"{dims or 'without names'}: {splitting[0] if splitting else 'tensor'} parallelism is not supported"
            )


def _check_loaded_sharded(config: Any) -> None:
    loaded = config.distributed_config
    check_parallel_sizes({SPLITTING[name]: getattr(loaded, f"{name}_size", 1) for name in ("tp", "pp")})
    family = FAMILIES.get(config.model_type)
    if family is not None and family.joins_convolutions:
        raise UnsupportedModelError(
            f"expected a model of family {config.model_type} that was loaded whole, got one that Transformers sharded "
            "while loading (distributed_config): its convolutions got the weights of other channels. Load it without, "
            "and shard it by FSDP2 (fsdp and fsdp_config) or ZeRO-3; expert parallelism cannot be had for it"
        )
    if loaded.ep_size > 1 and loaded.ep_implementation not in ("auto", "all_to_all"):
        raise UnsupportedModelError(
            f"expected ep_implementation='all_to_all' (or 'auto'), got {loaded.ep_implementation!r}, which computes "
            "the same batch on every process"
        )


def check_parallel_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raises UnsupportedModelError for more than one process in a kind of parallelism ("tensor", "context", ...)."""
    for kind, size in sizes.items():
        if size is not None and size > 1:
            raise UnsupportedModelError(
                f"expected data parallelism only (DDP, FSDP2 or DeepSpeed), got {kind} parallelism over {size} "
                "processes"
            )


def _check_layers(config: Any) -> None:
    unknown = sorted(set(config.layer_types) - LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(
            f"expected layers of types {sorted(LAYER_TYPES)}, got {unknown} (sliding windows, indexers, lightning "
            "attention and Mamba layers are not supported)"
        )
    if "linear_attention" not in config.layer_types:
        raise UnsupportedModelError("expected at least one linear_attention layer, got none")


def _check_convolutions(model: nn.Module, family: Family) -> None:
    widths = {name: m.kernel_size[0] for name, m in model.named_modules() if isinstance(m, nn.Conv1d)}
    for name, width in widths.items():
        if width > CONV_ANCESTORS + 1:
            raise UnsupportedModelError(
                f"expected convolutions of at most {CONV_ANCESTORS + 1} taps, got {width} in {name}"
            )
    for name, module in model.named_modules():
        activation = getattr(module, "activation", None)
        if type(module).__name__ == family.linear_mixer and activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"expected convolutions followed by one of {', '.join(map(str, ACTIVATIONS))}, got {activation} in "
                f"{name} (hidden_act)"
            )


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in BATCH_DEPENDENT_ROPE:
        raise UnsupportedModelError(
            f"expected rotary frequencies that do not depend on the batch, got rope_type {kind!r}: its frequencies "
            "follow the longest position of each forward, so shared tokens would differ from tokens alone"
        )


def _check_head(model: Any, config: Any) -> None:
    head = model.get_output_embeddings()
    # FSDP2 puts its own class before a module's.
    if type(head) is not nn.Linear and type(head).__bases__ != (FSDPModule, nn.Linear):
        hint = "leave lm_head out of target_modules and modules_to_save"
        if type(head).__name__ == "TrainableTokensWrapper":
            hint = (
                "with tied embeddings trainable_token_indices trains rows of the head too; untie them or leave it out"
            )
        raise UnsupportedModelError(
            f"expected a plain nn.Linear as the language-model head, got {type(head).__name__} (adapters on the head "
            f"are not supported: {hint})"
        )
    for name in LOGIT_SCALES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UnsupportedModelError(f"expected plain logits, got {name}={getattr(config, name)}")


def check_dropout(model: nn.Module) -> None:
    """Raises UnsupportedModelError for dropout anywhere.

    Scoring and training run a token twice and must agree; a shared token would also share its mask.
    """
    config: Any = model.config
    rates = {f"config.{name}": getattr(config, name) for name in ("attention_dropout", "hidden_dropout", "dropout")
             if hasattr(config, name)}  # fmt: skip
    rates |= {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    for name, rate in rates.items():
        if rate:
            raise UnsupportedModelError(f"expected dropout 0 everywhere, got {name} = {rate}")
