"""Completions as texts, which TRL makes of every rollout: from arrays, and only where somebody reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harts_hf.rollouts.arrays import ReadArrays
from harts_hf.trainers.replacing import replaced

# Attribute of a reward function; where all of a trainer's have it as False, completions are not decoded.
READS_TEXTS = "reads_texts"


def reads_texts(trainer: Any, calculate_rewards: Any) -> bool:
    """Whether anybody may read a trainer's completions: TRL's log of them, a tool loop, a reward function.

    Args:
        trainer: a GRPO trainer.
        calculate_rewards: its method, which a subclass may have overridden.
    """
    overridden = not calculate_rewards.__module__.startswith(("trl.", "harts_hf."))
    functions = any(getattr(one, READS_TEXTS, True) for one in trainer.reward_funcs)
    return bool(trainer.log_completions or trainer.tools or overridden or functions)


@contextmanager
def decoding(tokenizer: Any, arrays: ReadArrays, *, reads: bool) -> Iterator[None]:
    """Inside, ``batch_decode`` reads lists of token ids as arrays: Transformers (5.24) asks each id for its type.

    Args:
        tokenizer: TRL's ``processing_class``.
        arrays: of lists that have been read before.
        reads: whether somebody reads the texts; they are empty if not.
    """
    stock = tokenizer.batch_decode

    def batch_decode(sequences: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(arrays.of_rows(sequences), *args, **kwargs) if reads else [""] * len(sequences)

    with replaced(tokenizer, "batch_decode", batch_decode):
        yield
