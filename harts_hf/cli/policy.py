"""The policy of a recipe: a checkpoint by name, or an architecture with random weights; and its tokenizer."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from harts_hf.cli.loading import load_tokenizer
from harts_hf.cli.recipe import unknown_message
from harts_hf.cli.train_arguments import TrainArguments
from harts_hf.names import check_model_name
from harts_hf.trainers.zero3 import show_processes


def named_tokenizer(arguments: TrainArguments, training: Any, model: Any) -> Any:
    """The tokenizer that the recipe names, or that of the named model; None for an architecture with random weights.

    Raises:
        ValueError: both or neither of a model's name and an architecture; no tokenizer where one is named.
    """
    names = [name for name in (model.model_name_or_path, arguments.model_type) if name]
    if len(names) != 1:
        got = " and ".join(names) + " (--model_type '' unsets it)" if names else "neither"
        raise ValueError(f"expected either model_name_or_path or model_type, got {got}")
    if model.model_name_or_path:
        check_model_name("model_name_or_path", model.model_name_or_path, revision=model.model_revision)
    if arguments.tokenizer:
        tokenizer = load_tokenizer(arguments.tokenizer, option="tokenizer")
    elif model.model_name_or_path:
        tokenizer = load_tokenizer(
            model.model_name_or_path,
            option="model_name_or_path",
            revision=model.model_revision,
            local_files_only=False,
            trust_remote_code=training.trust_remote_code,
        )
    else:
        return None
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    return tokenizer


def find_policy(arguments: TrainArguments, training: Any, model: Any, tokenizer: Any) -> str | PreTrainedModel:
    """The policy as the trainer takes it: a name, or a model with random weights.

    Args:
        arguments: the recipe's.
        training: the trainer's arguments; of a name, ``model_init_kwargs`` are set.
        model: the recipe's ``PolicyArguments``.
        tokenizer: of the policy.

    Raises:
        ValueError: fields that the architecture does not have; a reference model, which TRL would load by name; a
            model that DeepSpeed does not build.
    """
    if model.model_name_or_path:
        given = {"revision": model.model_revision, "attn_implementation": model.attn_implementation}
        training.model_init_kwargs = {**given, "dtype": model.dtype, **(training.model_init_kwargs or {})}
        return model.model_name_or_path
    if getattr(training, "beta", 0) != 0 and not model.use_peft:  # supervised training has none
        raise ValueError(
            "expected beta 0 for random weights (model_type), because TRL loads the reference model by the policy's "
            f"name; got {training.beta}"
        )
    assert arguments.model_type is not None and isinstance(arguments.model_config, dict)
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        **arguments.model_config,
    }
    try:
        config = AutoConfig.for_model(arguments.model_type, **fields)
        unknown = [name for name in arguments.model_config if name not in _fields_of(config)]
        if unknown:
            raise ValueError(unknown_message([f"model_config.{name}" for name in unknown], set()))
    except Exception as error:  # every configuration class has its own
        raise _bad_fields(arguments, error) from error
    dtype = getattr(torch, str(model.dtype), torch.float32)  # "auto" says nothing without a checkpoint
    show_processes()
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation=model.attn_implementation, dtype=dtype)
    except Exception as error:  # of fields that only the layers look at
        if not is_deepspeed_zero3_enabled():
            raise _bad_fields(arguments, error) from error
        # DeepSpeed reads its own file here, and splits each parameter as it is made.
        raise ValueError(
            f"expected DeepSpeed to build a {arguments.model_type} in parts (deepspeed={training.deepspeed!r}), "
            f"got {type(error).__name__}: {error}; `--dry-run` says whether model_config is at fault"
        ) from error


def _bad_fields(arguments: TrainArguments, error: Exception) -> ValueError:
    return ValueError(f"expected model_config to be fields of a {arguments.model_type} configuration: {error}")


def _fields_of(config: Any) -> set[str]:
    # A configuration takes any keyword silently, so a misspelt one would leave the default in place.
    return set(type(config)().to_dict()) | set(type(config).attribute_map)
