"""The chat template of a tokenizer, which may be loaded only when a conversation needs it."""

from collections.abc import Callable
from typing import Any

from harts_hf.rollouts.templates import ChatTemplate
from harts_hf.rollouts.text_template import TextTemplate


class TokenizerOnDemand:
    """A tokenizer that is loaded when the first conversation needs it, and that stands for it wherever files are read.

    Args:
        load: loads it; what it raises is raised where a row needs it.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load


def chat_template(tokenizer: Any) -> ChatTemplate:
    """The template of a tokenizer, which may be one on demand.

    Raises:
        ValueError: no tokenizer.
    """
    if isinstance(tokenizer, TokenizerOnDemand):
        tokenizer = tokenizer.load()
    if tokenizer is None:
        raise ValueError("messages need a tokenizer, and none was given: --tokenizer path/to/model (or tokenizer=)")
    is_stock = all(hasattr(tokenizer, name) for name in ("added_tokens_decoder", "get_chat_template"))
    return TextTemplate(tokenizer) if is_stock else ChatTemplate(tokenizer)
