"""Chat formats: how messages become a history of token ids, and a turn's token ids a message."""

import copy
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from trl.chat_template_utils import add_response_schema, parse_response

from harts_hf.rollouts.gateway.answers import AssistantMessage, ToolCall
from harts_hf.rollouts.gateway.requests import ChatRequest

logger = logging.getLogger(__name__)

# Tokens of the history in which the template's beginning of an answer is looked for.
_ANSWER_START = 32


class ChatFormat(ABC):
    """A model's chat format. Its methods are called from several threads.

    Args:
        tokenizer: the policy's; a copy is used, because fast tokenizers cannot be used by two threads at once.

    Attributes:
        boundary_ids: tokens at which text is cut before it is tokenised (special and other added tokens), so that
            what stands before and after them is tokenised independently.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.RLock()
        self.boundary_ids = frozenset(self._tokenizer.added_tokens_decoder) | set(self._tokenizer.all_special_ids)

    @abstractmethod
    def render(self, request: ChatRequest) -> list[int]:
        """The history that a request's messages and tools are: ``[L]`` token ids, up to where the answer begins.

        Raises:
            ValueError: messages that the template does not take.
        """

    @abstractmethod
    def parse(self, ids: Sequence[int], request: ChatRequest, *, history: Sequence[int]) -> AssistantMessage:
        """The message that a turn is.

        Whatever the policy samples has to become a message: a call that is none stays in the content.

        Args:
            ids: ``[T]`` the turn's token ids, its end token included if it has one.
            request: what it answers.
            history: ``[L]`` the token ids before it.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        with self._lock:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def plain_text(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        with self._lock:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that contains special tokens."""
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class TemplateFormat(ChatFormat):
    """Messages rendered by the tokenizer's own chat template. Subclasses say how turns are parsed.

    Example::

        class Shouting(TemplateFormat):
            def parse(self, ids, request, *, history):
                return AssistantMessage(content=self.plain_text(ids))

    Raises:
        ValueError: a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"expected a tokenizer with a chat template, got {type(tokenizer).__name__} without one: set "
                "tokenizer.chat_template, or give a chat format of your own"
            )
        super().__init__(tokenizer)

    def render(self, request: ChatRequest) -> list[int]:
        with self._lock:
            try:
                text = self._tokenizer.apply_chat_template(
                    request.messages,
                    tools=request.tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **request.template_kwargs,
                )
                return self.encode(text)  # tokenizers refuse characters that UTF-8 lacks
            except Exception as error:  # templates are programs: they raise what they like
                raise ValueError(f"the chat template does not take these messages: {error}") from error


class TrlFormat(TemplateFormat):
    """Messages rendered by the tokenizer's chat template, turns parsed by TRL's and Transformers' ``parse_response``.

    Raises:
        ValueError: a template for which neither the tokenizer nor TRL has a parser.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        has_parser = any(getattr(self._tokenizer, name, None) for name in ("response_template", "response_schema"))
        if not has_parser:
            try:
                add_response_schema(self._tokenizer)
            except ValueError as error:
                name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
                raise ValueError(
                    f"expected a chat template whose answers TRL can parse (those of Qwen3.5 and later, for example), "
                    f"got that of {name!r}: set tokenizer.response_template, or give a chat format of your own (a "
                    "subclass of harts_hf.rollouts.gateway.TemplateFormat)"
                ) from error

    def parse(self, ids: Sequence[int], request: ChatRequest, *, history: Sequence[int]) -> AssistantMessage:
        try:
            return self._parsed(ids, request, history)
        except Exception as error:  # parsers have no rule for much that a policy samples
            logger.debug("a turn that is no message of the chat format is text: %s", type(error).__name__)
            return AssistantMessage(content=self.plain_text(ids))

    def _parsed(self, ids: Sequence[int], request: ChatRequest, history: Sequence[int]) -> AssistantMessage:
        start = list(history[-_ANSWER_START:])
        tools: list[Any] | None = request.tools
        with self._lock:
            said = parse_response(self._tokenizer, list(ids), prefix=start, tools=tools)
        calls = []
        for call in said.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(name=function["name"], arguments=text))
        thinking = said.get("reasoning_content")
        return AssistantMessage(
            content=said.get("content") or "",
            reasoning_content=thinking if isinstance(thinking, str) else None,
            tool_calls=tuple(calls),
        )
