"""Models and tokenizers that commands are given by name."""

import json
from pathlib import Path
from typing import Any


def load_tokenizer(name: str) -> Any:
    """A tokenizer from this machine: nothing is looked for on the network.

    Args:
        name: a folder, or a name in the local Hugging Face cache.

    Raises:
        ValueError: neither holds a tokenizer.
    """
    from transformers import AutoTokenizer

    expected = "expected --tokenizer to be a folder with a tokenizer, or a name in the local Hugging Face cache"
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # a damaged tokenizer fails in ways of its own
        reason = f"{error}".split("\n")[0] if Path(name).is_dir() else "no such folder, and nothing of that name there"
        raise ValueError(f"{expected}, got {name!r}: {reason}") from error


def is_random(name: str) -> bool:
    """Whether the name is a configuration alone, whose model gets random weights."""
    path = Path(name)
    return path.exists() and not any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))


def load_model(name: str, dtype: Any, *, seed: int, random_weights: bool = False) -> Any:
    """A pretrained model, or one with random weights where only a configuration is given.

    Args:
        name: a folder, a ``.json`` file with a configuration, or the name of a model on the Hugging Face hub.
        dtype: of its parameters.
        seed: of random weights.
        random_weights: read the configuration only.

    Raises:
        ValueError: nothing that can be loaded is there.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # how fast the expanded computation is does not matter here
    path = Path(name)
    try:
        if not random_weights and not is_random(name):
            return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        config = _config_of_file(path) if path.is_file() else AutoConfig.from_pretrained(name)
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # Transformers has many: of the hub, of damaged files, of fields of the configuration
        raise ValueError(
            f"expected --model to be a model's folder, configuration or name, got {name!r}: {error}"
        ) from error


def _config_of_file(path: Path) -> Any:
    from transformers import AutoConfig

    content = json.loads(path.read_text())
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError("expected a configuration with model_type, got none")
    return AutoConfig.for_model(**content)
