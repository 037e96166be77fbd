"""Loading a checkpoint's weights into a model that is training already."""

from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME


def load_weights(model: Any, folder: str) -> bool:
    """Loads a checkpoint as ``from_pretrained`` does, strictly, into ``model``.

    Transformers saves several families under the names of their hub checkpoints (experts one by one, other
    prefixes). ``from_pretrained`` translates them; ``Trainer`` (5.24) loads them by name, not strictly, and leaves
    what it does not find at its initial value.

    Args:
        model: a Transformers model, not wrapped.
        folder: the checkpoint.

    Returns:
        False where the folder holds no whole model of its own (an adapter, shards of a backend): nothing was loaded.
    """
    if not (Path(folder) / CONFIG_NAME).is_file() or not list(Path(folder).glob("model*.safetensors")):
        return False
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict(), strict=True)
    return True
