"""Loading a checkpoint's weights into a model that is training already."""

from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import CONFIG_NAME


def load_weights(model: Any, folder: str) -> bool:
    """Loads a checkpoint as ``from_pretrained`` does, strictly, into ``model``; every tensor as it was saved.

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
    # One dtype for all of a mixed model's tensors: the widest, from which each is rounded back to what was saved.
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    widest = reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
    state = type(model).from_pretrained(folder, dtype=widest).state_dict()
    # Modules that were added to the model (a value head) are unknown to its class, and saved by their names, also in
    # files of their own.
    added = model.state_dict().keys() - state.keys()
    for path in Path(folder).glob("*.safetensors") if added else ():
        with safe_open(path, "pt") as tensors_of_file:
            state |= {name: tensors_of_file.get_tensor(name) for name in added & set(tensors_of_file.keys())}
    model.load_state_dict(state, strict=True)
    return True
