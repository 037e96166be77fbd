"""Activation checkpointing in trainers of TRL: of some layers (``every_n_layers``), and off for a while.

TRL (1.16) switches checkpointing off around each generation, and on again with all of
``gradient_checkpointing_kwargs`` as PyTorch's. Two of them are Transformers' own: they would reach the layers'
forwards, and every layer would be computed twice. It does so by names that Transformers (5.24) has given up, each of
which warns the user; here they have their present names.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from transformers import PreTrainedModel

# Of PyTorch's checkpoint(), and two of Transformers.
_OF_PYTORCH = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")
KEYS = frozenset((*_OF_PYTORCH, "every_n_layers", "offload"))
_ENABLE = "gradient_checkpointing_enable"
# The old name of ``is_activation_checkpointing``, which warns whoever reads it.
_ASK = "is_gradient_checkpointing"


@contextmanager
def old_names() -> Iterator[None]:
    """Inside, models of Transformers answer to ``is_gradient_checkpointing`` as to its present name.

    TRL (1.16) reads it around its own generation, PEFT (0.21) when it adapts a model.
    """
    before = vars(PreTrainedModel)[_ASK]
    setattr(PreTrainedModel, _ASK, PreTrainedModel.is_activation_checkpointing)
    try:
        yield
    finally:
        setattr(PreTrainedModel, _ASK, before)


@contextmanager
def without_checkpointing(model: Any, activation_checkpointing_kwargs: dict[str, Any] | None = None) -> Iterator[None]:
    """Inside, the model's layers are not checkpointed; afterwards they are if they were.

    Args:
        model: a model of Transformers, or one of PEFT around it.
        activation_checkpointing_kwargs: with which checkpointing is switched on again.
    """
    was_on = model.is_activation_checkpointing
    if was_on:
        model.activation_checkpointing_disable()
    try:
        yield
    finally:
        if was_on:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=activation_checkpointing_kwargs)


def check_keys(kwargs: Mapping[str, Any] | None) -> None:
    """Refuses keys of ``activation_checkpointing_kwargs`` that nobody reads: PyTorch would hand them on to the layers,
    which take any.

    Raises:
        ValueError: another key than PyTorch's and Transformers'.
    """
    unknown = sorted(set(kwargs or {}) - KEYS)
    if unknown:
        selective = " ('selective' is for TRL's stock SFTTrainer; every_n_layers=2 recomputes less, too)"
        raise ValueError(
            f"expected activation_checkpointing_kwargs to have no other keys than {', '.join(sorted(KEYS))}, got "
            f"{', '.join(map(repr, unknown))}{selective if 'selective' in unknown else ''}"
        )


def checkpointed_every(kwargs: Mapping[str, Any] | None) -> int:
    """Of how many layers one is checkpointed, by ``activation_checkpointing_kwargs``: the first, and every n-th.

    Raises:
        ValueError: no integer of at least 1.
    """
    every = (kwargs or {}).get("every_n_layers", 1)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"expected every_n_layers of activation_checkpointing_kwargs to be an integer of at least 1, got {every!r}"
        )
    return every


def allow_some_layers(model: PreTrainedModel) -> None:
    """Lets checkpointing be switched on with ``every_n_layers`` and ``offload`` among PyTorch's arguments.

    Args:
        model: a causal language model of Transformers, without a wrapper.
    """
    if _ENABLE not in vars(model):
        setattr(model, _ENABLE, MethodType(_enable, model))


def _enable(
    self: Any,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    every_n_layers: int = 1,
    offload: bool = False,
) -> None:
    options = dict(gradient_checkpointing_kwargs or {})
    own = {"every_n_layers": every_n_layers, "offload": offload}
    own |= {name: options.pop(name) for name in own if name in options}
    # What the method of the old name does where it is overridden, as here, after it has warned.
    self._activation_checkpointing_enable(options or None, **own)
