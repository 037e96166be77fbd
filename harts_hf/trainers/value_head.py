"""The value head: a linear layer on a causal language model's last hidden states, and its life in a trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from harts_hf.modeling import RowValue, add_output
from harts_hf.modeling.patching import causal_lm_of

VALUE = "value"
# Name of the module within the causal language model.
HEAD = "critic"
FILE = "value_head.safetensors"


class ValueHead(nn.Linear):
    """From hidden states ``[P, D]`` to values ``[P, 1]``; all parameters are 0 at the start, so values are.

    Attributes:
        is_detached: whether its gradients end here, so that the backbone is not trained towards values.
    """

    is_detached = False

    def reset_parameters(self) -> None:
        """Zeros, as OpenAI's fine-tuning from preferences has it (Huang et al., "The N Implementation Details of RLHF
        with PPO", 2023): the first advantages are returns, whatever the backbone says."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return super().forward(hidden.detach() if self.is_detached else hidden)


def add_value_head(model: nn.Module, *, in_fp32: bool) -> ValueHead:
    """Makes a value head a part of a patched model, before it is wrapped, and the name ``value`` one of its outputs.

    Args:
        model: a causal language model, or a PEFT model around one; the head is trainable there, too.
        in_fp32: whether the head is in float32 (float64 in a float64 model), instead of the model's dtype.

    Raises:
        ValueError: a model that has a module of that name, or an unpatched one.
    """
    base = causal_lm_of(model)
    if hasattr(base, HEAD):
        raise ValueError(f"expected a model without a module {HEAD!r}, where the value head goes, got one that has it")
    like = base.get_output_embeddings().weight
    dtype = like.dtype if like.dtype.is_floating_point else torch.float32
    if in_fp32:
        dtype = torch.promote_types(dtype, torch.float32)
    head = ValueHead(base.config.get_text_config().hidden_size, 1, device=like.device, dtype=dtype)
    base.add_module(HEAD, head)
    add_output(model, RowValue(name=VALUE, module=HEAD))
    return head


def head_of(model: nn.Module) -> Any:
    """The value head of an unwrapped model."""
    return getattr(causal_lm_of(model), HEAD)


@contextmanager
def head_taken_out(model: nn.Module) -> Iterator[None]:
    """Inside, an unwrapped model is without its value head, if it has one."""
    modules = causal_lm_of(model)._modules
    head = modules.pop(HEAD, None)
    try:
        yield
    finally:
        if head is not None:
            modules[HEAD] = head


def is_of_value_head(name: str) -> bool:
    """Whether a parameter's full name, under any wrappers, is one of the value head's."""
    return f".{name}".endswith((f".{HEAD}.weight", f".{HEAD}.bias"))


def hide_from_engines(trainer: Any) -> None:
    """Takes the value head out of the weights that TRL sends to vLLM, whose model has none.

    TRL (1.16) walks all parameters in ``VLLMGeneration._iter_named_params``, on every process.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        return
    every = generation._iter_named_params

    def without_head() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in every():
            if not is_of_value_head(name):
                yield name, parameter

    generation._iter_named_params = without_head


def save_head(head: nn.Module, folder: Path, *, writes: bool) -> None:
    """Writes :data:`FILE`, whatever the head's parameters are sharded by; a collective where they are.

    Args:
        head: the value head.
        folder: made if it does not exist.
        writes: whether this process writes.
    """
    tensors = {f"{HEAD}.{name}": _whole(parameter) for name, parameter in head.named_parameters()}
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / FILE)


def load_head(head: nn.Module, folder: Path) -> None:
    """Reads what :func:`save_head` wrote, into parameters that may be sharded (FSDP2).

    Raises:
        ValueError: no such file, or other names.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"expected a checkpoint with a value head ({FILE}), got {str(folder)!r} without one")
    tensors = load_file(path)
    names = {f"{HEAD}.{name}" for name, _ in head.named_parameters()}
    if tensors.keys() != names:
        raise ValueError(f"expected {', '.join(sorted(names))} in {path}, got {', '.join(sorted(tensors))}")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            value = tensors[f"{HEAD}.{name}"].to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().cpu()
    if hasattr(parameter, "ds_id"):  # ZeRO-3's
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()
    return parameter.detach().cpu().contiguous()
