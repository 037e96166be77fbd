"""Chat templates: whole conversations, and turns as an agent asked for them, as token ids.

An agent sends the messages before a turn; the server renders them with the prompt for an answer, and the model goes on
from there. So the sample of a turn is what the template renders for the messages before it (which may leave earlier
thoughts out) and, after that, the turn; only the turn's own tokens were sampled, up to its end token.
"""

import copy
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.lost import Message, at_path, check_nothing_is_lost, function_path
from harts_hf.tree import IntArray

Tools = list[dict[str, Any]] | None
# Token ids, and which of them were sampled (None: the template does not say).
Sample = tuple[IntArray, NDArray[np.bool_] | None]


class ChatTemplate:
    """Anything with ``apply_chat_template``: every rendering is tokenised anew.

    Args:
        tokenizer: the object.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        text = getattr(tokenizer, "chat_template", None)
        self.marks_generations = "{% generation" in (text if isinstance(text, str) else "").replace("{%-", "{%")
        self._knows: dict[str, bool] = {}
        # The messages that were last found to be whole, and their rendering.
        self._prepared: tuple[Any, Any] = (None, None)

    def prepared(self, messages: Any, tools: Any) -> list[Message]:
        """The messages in a form that the template takes, if nothing of them is lost in it.

        Raises:
            ValueError: other types than lists of objects; a template that fails; a message, or a part of one, that
                is not in the rendering. The text names the message by its number, counted from 1.
        """
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ValueError("expected messages to be a non-empty list of objects")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError("expected tools to be a list of objects")
        for number, message in enumerate(messages, 1):
            _check_tool_calls(message, number)
        messages = [self._with_text(message) for message in messages]
        try:
            rendered = self.render(messages, tools)
        except Exception as error:  # templates are programs: they raise what they like, jinja2's errors among them
            with_objects = _arguments_as_objects(messages)
            if with_objects == messages:
                raise ValueError(
                    f"the chat template failed{self._where_it_failed(messages, tools, error)}: {error}"
                ) from error
            return self.prepared(with_objects, tools)
        decode = getattr(self._tokenizer, "decode", None)
        decode = (lambda text: text) if isinstance(rendered, str) else decode
        check_nothing_is_lost(messages, rendered, lambda others: self.render(others, tools), decode)
        self._prepared = (messages, rendered)
        return messages

    def render(self, messages: list[Message], tools: Tools, *, for_answer: bool = False) -> Any:
        """The conversation as the template writes it, ``for_answer`` with the prompt of the next turn.

        Here token ids; text in ``text_template.py``. Raises what the template raises.
        """
        # An object that is no tokenizer of Transformers need not take what it does not need.
        options = {"add_generation_prompt": True} if for_answer else {}
        return list(self._encoded(messages, tools, options)["input_ids"])

    def marked(self, messages: list[Message], tools: Tools) -> Sample:
        """The whole conversation; the mask is the template's own."""
        encoded = self._encoded(messages, tools, {})
        mask = np.array(encoded["assistant_masks"], bool) if self.marks_generations else None
        return np.array(encoded["input_ids"], np.int64), mask

    def conversation(self, messages: list[Message], tools: Tools, turns: list[int]) -> Sample:
        """The whole conversation; the mask is the template's own of these turns, or None where it has none."""
        return self.marked_turns(messages, tools, turns)

    def marked_turns(self, messages: list[Message], tools: Tools, turns: list[int]) -> Sample:
        """The whole conversation; the mask is the template's own, which is of all answers, for some of them.

        It is None where the template has none, or where the answers cannot be told apart in it.

        Args:
            messages: prepared ones.
            tools: their descriptions.
            turns: indices of the answers that were sampled: others are examples, or the history of a request.
        """
        ids, mask = self.marked(messages, tools)
        answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if mask is None or answers == turns:
            return ids, mask
        kept = np.zeros_like(mask)
        if not turns:
            return ids, kept
        marks = _marks(mask)
        if len(marks) != len(answers):
            return ids, None
        for number, (answer, (start, end)) in enumerate(zip(answers, marks, strict=True)):
            kept[start:end] = answer in turns
            # As many marks as answers may be chance: one answer may have none, and another two.
            is_edge = number > 0 and (answer in turns) != (answers[number - 1] in turns)
            if is_edge and self._num_marks(messages[:answer], tools) != number:
                return ids, None
        return ids, kept

    def _num_marks(self, messages: list[Message], tools: Tools) -> int | None:
        try:
            _, mask = self.marked(messages, tools)
        except Exception:  # templates are programs: they raise what they like
            return None
        return None if mask is None else len(_marks(mask))

    def turn(self, messages: list[Message], tools: Tools, index: int) -> Sample:
        """The sample of turn ``index``: the messages before it, and what was sampled.

        Raises:
            ValueError: the template fails, or renders the messages before in another way once the turn is there and
                does not show where the turn begins.
        """
        before = self._before(messages, tools, index)
        try:
            ids, mask = self.marked(messages[: index + 1], tools)
        except Exception as error:  # as above
            raise ValueError(f"the chat template failed at message {index + 1}: {error}") from error
        same = min(len(before), len(ids))
        differ = np.flatnonzero(np.array(before[:same]) != ids[:same])
        start = int(differ[0]) if len(differ) else same
        return ids, np.arange(len(ids)) >= start if mask is None else mask & (np.arange(len(ids)) >= start)

    def plain(self, prompt: str, completion: str) -> Sample:
        """A prompt and its completion without a template."""
        raise ValueError("expected a tokenizer of Transformers for plain texts, got one with a chat template only")

    def is_exact(self) -> bool:
        """Whether the samples so far are, token for token, those of whole texts; if not, the next ones are."""
        return True

    def knows_thoughts(self, tools: Tools) -> bool:
        """Whether the template writes the last turn's ``reasoning_content``."""
        answer = {"role": "assistant", "content": "so", "reasoning_content": "q0q"}
        return self._shows("thoughts", [{"role": "user", "content": "go"}, answer], tools)

    def _with_text(self, message: Message) -> Message:
        """The message; blocks that are texts as one text where the template knows texts only."""
        content = message.get("content")
        if not isinstance(content, list) or not content or not all(map(_is_text_block, content)):
            return message
        if self._shows("blocks", [{"role": "user", "content": [{"type": "text", "text": "q0q"}]}], None):
            return message
        return {**message, "content": "\n".join(block["text"] for block in content)}

    def _shows(self, what: str, messages: list[Message], tools: Tools) -> bool:
        if what not in self._knows:
            try:
                rendered = self.render(messages, tools)
                if isinstance(rendered, str):
                    self._knows[what] = "q0q" in rendered
                else:
                    self._knows[what] = rendered != self.render(_without_mark(messages), tools)
            except Exception:  # as above
                self._knows[what] = False
        return self._knows[what]

    def _before(self, messages: list[Message], tools: Tools, index: int) -> Any:
        """What the agent sent for the turn ``index``, as the model was given it."""
        try:
            return self.render(messages[:index], tools, for_answer=True)
        except Exception as error:  # as above
            if isinstance(error, TypeError) and "add_generation_prompt" in str(error):  # no such option
                return self.render(messages[:index], tools)
            raise ValueError(
                f"the chat template failed with what stands before message {index + 1}: {error} (samples per "
                "conversation do not need it)"
            ) from error

    def _encoded(self, messages: list[Message], tools: Tools, options: dict[str, Any]) -> Any:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=self.marks_generations,
            **options,
        )

    def _where_it_failed(self, messages: list[Message], tools: Tools, error: Exception) -> str:
        """The first message with which the template fails in the same way."""
        for number in range(1, len(messages) + 1):
            try:
                self.render(messages[:number], tools)
            except Exception as other:  # as above
                if str(other) == str(error):
                    return f" at message {number}"
        return ""


def _marks(mask: NDArray[np.bool_]) -> IntArray:
    """``[n, 2]`` where each run of marked tokens begins and ends."""
    return np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)


def _check_tool_calls(message: Message, number: int) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise ValueError(f"message {number}: expected tool_calls to be a list of objects, got {shortened(calls)}")
    for index, call in enumerate(calls, 1):
        what = f"message {number}: expected tool call {index} to be an object"
        if not isinstance(call, dict):
            raise ValueError(f"{what}, got {shortened(call)}")
        if not isinstance(call.get("function", {}), dict):
            raise ValueError(f"{what} whose function is an object, got {shortened(call['function'])}")


def _arguments_as_objects(messages: list[Message]) -> list[Message]:
    messages = copy.deepcopy(messages)
    for number, message in enumerate(messages, 1):
        for index, call in enumerate(message.get("tool_calls") or (), 1):
            function = at_path(call, function_path(call))
            if not isinstance(function.get("arguments"), str):
                continue
            what = f"message {number}: expected function.arguments of tool call {index} to be an object"
            try:
                arguments = json.loads(function["arguments"].strip() or "{}")  # so some servers write no arguments
            except (ValueError, RecursionError) as error:
                got = shortened(function["arguments"])
                raise ValueError(f"{what}, or a JSON string of one, got {got} ({error})") from error
            if not isinstance(arguments, dict):
                raise ValueError(f"{what}, got {shortened(arguments)}")
            function["arguments"] = arguments
    return messages


def _is_text_block(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def _without_mark(messages: list[Message]) -> list[Message]:
    """Messages of a probe less what they probe."""
    *before, last = messages
    content = "" if isinstance(last["content"], list) else last["content"]
    return [*before, {"role": last["role"], "content": content}]
