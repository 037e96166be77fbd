"""Chat messages to token ids by a tokenizer's chat template."""

from collections.abc import Callable
from typing import Any

from harts_hf.rollouts.templates import ChatTemplate
from harts_hf.rollouts.text_template import TextTemplate


def tokenize_messages(messages: Any, tools: Any, tokenizer: Any) -> tuple[list[int], list[int] | None]:
    """Token ids of a conversation, and the template's assistant mask where it marks generations.

    Arguments of tool calls may be objects or, as OpenAI's interface has them, JSON strings. A template that cannot
    take the strings gets the objects.

    Args:
        messages: a list of objects, as Transformers' ``apply_chat_template`` takes them.
        tools: a list of objects, or None.
        tokenizer: anything with ``apply_chat_template``; with ``decode`` too, the check costs one short rendering.

    Raises:
        ValueError: no tokenizer; other types than these; a template that fails; a message, or a part of one, that left
            no token. The text names the message by its number, counted from 1.
    """
    template = chat_template(tokenizer)
    ids, mask = template.marked(template.prepared(messages, tools), tools)
    return ids.tolist(), None if mask is None else mask.astype(int).tolist()


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
