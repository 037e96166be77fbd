"""What a tree trainer makes of a checkpoint that it is given by name: its text model, and its tokenizer."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import get_config_model_id

from harts_hf.modeling.families import FAMILIES
from harts_hf.trainers.replacing import replaced

# What TRL's trainers load models with: the policy and the reference model alike.
_LOADER = "create_model_from_path"


def text_model_type(config: Any) -> str | None:
    """The supported model_type of the text model inside a multimodal configuration; None for any other."""
    text = getattr(getattr(config, "text_config", None), "model_type", None)
    return text if text in FAMILIES and getattr(config, "model_type", None) not in FAMILIES else None


@contextmanager
def loading_text_models(trainer_class: type) -> Iterator[None]:
    """Inside, models that TRL's constructor loads by name are the text models of multimodal checkpoints.

    TRL takes the class that a checkpoint's configuration names, which for Qwen3.5 is the whole multimodal model.
    Transformers loads the text part of its weights into the causal language model, and saves them under the names that
    they had. A configuration that names no class is loaded as a causal language model, too.

    Args:
        trainer_class: whose constructor runs inside; every module of TRL in its MRO that loads models is seen to.
    """
    modules = {cls.__module__ for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.")}
    with ExitStack() as stack:
        for module in (sys.modules[name] for name in modules):
            if hasattr(module, _LOADER):
                stack.enter_context(replaced(module, _LOADER, _text_model_loader(getattr(module, _LOADER))))
        yield


def _text_model_loader(stock: Any) -> Any:
    def load(model_id: str, architecture: Any = None, **kwargs: Any) -> Any:
        if architecture is None:
            given = {name: kwargs[name] for name in ("revision", "trust_remote_code") if kwargs.get(name) is not None}
            config = AutoConfig.from_pretrained(model_id, **given)
            if text_model_type(config) is not None or not config.architectures:
                architecture = AutoModelForCausalLM
        return stock(model_id, architecture, **kwargs)

    return load


def load_tokenizer(model: Any, args: Any) -> Any:
    """The tokenizer of a policy that came without a processing class.

    TRL would load the checkpoint's processor, which a multimodal checkpoint may have and text does not need.

    Args:
        model: the policy, or its name.
        args: the trainer's arguments; of ``model_init_kwargs`` the revision counts where the policy is a name.

    Raises:
        OSError: the checkpoint has no tokenizer.
    """
    is_name = isinstance(model, str)
    return AutoTokenizer.from_pretrained(
        model if is_name else get_config_model_id(model.config),
        revision=(args.model_init_kwargs or {}).get("revision") if is_name else None,
        truncation_side="left",
        padding_side="left",
        trust_remote_code=getattr(args, "trust_remote_code", False),
    )
