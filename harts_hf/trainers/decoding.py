"""Completions as texts, which TRL makes of every rollout: from arrays, and only where somebody reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harts_hf.rollouts.arrays import ReadArrays
from harts_hf.trainers.origins import is_from
from harts_hf.trainers.replacing import replaced

# Attribute of a reward function; where all of a trainer's have it as False, completions are not decoded.
READS_TEXTS = "reads_texts"


def reads_texts(trainer: Any, calculate_rewards: Any) -> bool:
    """Whether anybody may read a trainer's completions: TRL's log of them, a reward function.

    Args:
        trainer: a GRPO or RLOO trainer, without tools.
        calculate_rewards: its method, which a subclass may have overridden.
    """
    overridden = not is_from(calculate_rewards, "trl", "harts_hf")
    # functools.wraps gives a wrapper the attributes of what it wraps; it may read what that does not.
    functions = any(getattr(one, READS_TEXTS, True) or hasattr(one, "__wrapped__") for one in trainer.reward_funcs)
    return bool(trainer.log_completions or overridden or functions)


@contextmanager
def decoding(trainer: Any, arrays: ReadArrays, *, reads: bool) -> Iterator[None]:
    """Inside, ``batch_decode`` reads lists of token ids as arrays: Transformers (5.24) asks each id for its type.

    That is TRL's call, of what has been generated. What generates may decode texts that it reads itself, and of lists
    that grow from one call to the next: see :func:`stock_decoding`.

    Args:
        trainer: a GRPO or RLOO trainer, without tools.
        arrays: of lists that have been read before.
        reads: whether somebody reads the texts; they are empty if not.
    """
    tokenizer, generate = trainer.processing_class, trainer._generate_single_turn
    stock = tokenizer.batch_decode

    def batch_decode(sequences: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(arrays.of_rows(sequences), *args, **kwargs) if reads else [""] * len(sequences)

    def generate_single_turn(*args: Any, **kwargs: Any) -> Any:
        with stock_decoding(tokenizer):
            return generate(*args, **kwargs)

    batch_decode._harts_stock = stock  # type: ignore[attr-defined]
    with (
        replaced(tokenizer, "batch_decode", batch_decode),
        replaced(trainer, "_generate_single_turn", generate_single_turn),
    ):
        yield


@contextmanager
def stock_decoding(tokenizer: Any) -> Iterator[None]:
    """Inside, and within :func:`decoding`, ``batch_decode`` is the tokenizer's own: for code that generates."""
    with replaced(tokenizer, "batch_decode", getattr(tokenizer.batch_decode, "_harts_stock", tokenizer.batch_decode)):
        yield
