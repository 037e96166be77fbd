"""The trainer that a recipe describes, on the meta device: no weights are read, nothing is moved anywhere."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments, training_args

from harts_hf.trainers.replacing import replaced

_BUILDERS = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "trl.trainer.sft_trainer")


@contextmanager
def as_if_launched(num_processes: int) -> Iterator[None]:
    """Inside, arguments of trainers are those of one of so many processes, each on a GPU that computes in bfloat16."""
    with (
        replaced(TrainingArguments, "world_size", property(lambda arguments: num_processes)),
        replaced(training_args, "is_torch_bf16_gpu_available", lambda: True),
    ):
        yield


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside, TRL's trainers build the models that they would load, on the meta device, and leave them there."""
    with ExitStack() as stack:
        for name in _BUILDERS:
            if name in sys.modules:
                stack.enter_context(replaced(sys.modules[name], "create_model_from_path", _model_of_configuration))
        stack.enter_context(replaced(Accelerator, "prepare_model", lambda accelerator, model, **options: model))
        stack.enter_context(replaced(TrainingArguments, "place_model_on_device", property(lambda arguments: False)))
        yield


def _model_of_configuration(model_id: str, architecture: Any = None, **kwargs: Any) -> Any:
    """The causal language model of a checkpoint's configuration; of the class that would be loaded, if that is known.

    Args:
        model_id: folder or name.
        architecture: what loads it; None for the class that the configuration names.
        kwargs: of ``from_pretrained``.
    """
    import transformers

    known = {name: kwargs[name] for name in ("revision", "trust_remote_code") if kwargs.get(name) is not None}
    config = AutoConfig.from_pretrained(model_id, **known)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    dtype = kwargs.get("dtype") or "float32"
    if dtype == "auto":
        dtype = config.dtype or "float32"
    options = {"dtype": getattr(torch, dtype) if isinstance(dtype, str) else dtype}
    if kwargs.get("attn_implementation"):
        options["attn_implementation"] = kwargs["attn_implementation"]
    with torch.device("meta"):
        if architecture is None and named is not None:
            model = named._from_config(config, **options)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
    model.config._name_or_path = model_id
    return model
