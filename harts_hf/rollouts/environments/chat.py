"""Conversations written by a tokenizer's chat template: no environment has to know its marks.

A row of a conversation is what the policy sampled and, between its turns, what the template writes between two
answers: the rest of the first one's end, the observation's message, the beginning of the next answer. As in TRL's tool
loop it is what a template writes more for a short conversation once the observation is there. That is right only if
the template does not write earlier messages anew by what follows them (many leave earlier thoughts out), which is
checked; where TRL has a training template that does not, it takes the place of the model's, as in TRL.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from harts_hf.rollouts.engines.engine import SampledTurn
from harts_hf.rollouts.environment import Environment, Message
from harts_hf.rollouts.environments.failures import EpisodeFailure, described
from harts_hf.rollouts.environments.messages import as_messages
from harts_hf.rollouts.environments.texts import ObservationLimit, Writer
from harts_hf.rollouts.lost import check_nothing_is_lost

_BY_URL = (
    "an agent by URL takes any template (harts_hf.rollouts.AgentRolloutCollector): each of its requests becomes a row "
    "of its own where the template rewrites the history"
)


class ChatWriter(Writer):
    """Writes messages by a chat template.

    Args:
        tokenizer: the policy's, with a chat template. It is not changed.
        end_ids: tokens that end a turn.
        template_kwargs: further variables of the template, such as ``enable_thinking``.
        limit: of observations.

    Raises:
        ValueError: a tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Sequence[int],
        template_kwargs: dict[str, Any] | None = None,
        limit: ObservationLimit | None = None,
    ) -> None:
        super().__init__(tokenizer, limit or ObservationLimit())
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"expected a tokenizer with a chat template for environments whose turns are messages, got "
                f"{type(tokenizer).__name__} without one: set tokenizer.chat_template"
            )
        self._kwargs = dict(template_kwargs or {})
        self._end_marks = [str(tokenizer.decode([token], skip_special_tokens=False)) for token in end_ids]
        self._parser = _parser_of(tokenizer)
        # By whether tools are offered: the template to use, None for the tokenizer's own.
        self._templates: dict[bool, str | None] = {}
        self._checked: set[tuple[bool, str]] = set()

    def check_tools(self) -> None:
        """Checks that tools can be offered: the template writes them, and what the policy calls can be parsed.

        Raises:
            ValueError: they cannot.
        """
        self._template_for(True)
        if self._parser is None:
            raise ValueError(
                "expected a chat template whose tool calls TRL can parse (those of Qwen3 and later, for example), got "
                "another one: set tokenizer.response_template"
            )

    def prompt(self, said: Any, environment: Environment, *, limit: int | None = None) -> list[int]:
        name = type(environment).__name__
        messages = as_messages(said, f"{name}.reset to return")
        tools = list(environment.tools) or None  # for an empty list some templates write a heading
        if tools is not None:
            self.check_tools()
        template = self._template_for(tools is not None)

        def render(others: list[Message]) -> str:
            return self._rendered(others, template, tools=tools, add_generation_prompt=True)

        text = _attempted(lambda: render(messages), f"what {name}.reset returned")
        try:
            check_nothing_is_lost(messages, text, render, decode=lambda whole: whole)
        except ValueError as error:
            raise EpisodeFailure("contract", f"what {name}.reset returned: {error}") from error
        return self._prompt_ids(text, environment, limit)

    def action(self, turn: SampledTurn, history: Sequence[int], environment: Environment) -> Any:
        message = self.message(turn.token_ids, history, environment.tools)
        return message if environment.takes_messages else message["content"]

    def message(self, ids: Sequence[int], history: Sequence[int], tools: Sequence[Any] = ()) -> Message:
        """The message that a turn is, as TRL's trainers parse it; plain text where they cannot.

        Args:
            ids: ``[T]`` the turn's token ids.
            history: ``[L]`` those before it.
            tools: on offer.
        """
        if self._parser is None:
            return {"role": "assistant", "content": self._tokenizer.decode(list(ids), skip_special_tokens=True)}
        try:
            return dict(parse_response(self._parser, list(ids), prefix=list(history), tools=list(tools) or None))
        except Exception:  # parsers have no rule for much that a policy samples
            return {"role": "assistant", "content": self._tokenizer.decode(list(ids), skip_special_tokens=True)}

    def answer(self, observation: Any, turn: SampledTurn, environment: Environment, *, limit: int) -> list[int] | None:
        name = type(environment).__name__
        messages = [self._cut(message) for message in as_messages(observation, f"{name}.step to return")]
        mark, text = self.between(messages, has_tools=bool(environment.tools))
        if turn.ended == "length":  # it was cut: the template's own mark ends it
            return self._encoder.encode(mark + text, limit)
        # After a special token text may be tokenised in another way than at the beginning.
        ids = self._encoder.encode(mark + text, limit + 1)
        return None if ids is None else ids[1:] if mark else ids

    def between(self, messages: list[Message], *, has_tools: bool = False) -> tuple[str, str]:
        """What a template writes from the end of an answer to the beginning of the next one.

        Args:
            messages: between the two answers; the first one's role is ``user`` or ``tool``.
            has_tools: whether tools are on offer.

        Returns:
            The mark that ends an answer (empty where the template has none), and all text after it.

        Raises:
            EpisodeFailure: messages that the template does not take.
            ValueError: a template that writes earlier messages in another way once there are later ones, or that
                leaves messages of such a role out.
        """
        template = self._template_for(has_tools)
        self._check_role(messages[0]["role"], has_tools)
        before = _before(messages[0])
        start = self._rendered(before, template)
        whole = _attempted(
            lambda: self._rendered(before + messages, template, add_generation_prompt=True), "an observation"
        )
        mark, end = self._last_mark(start)
        if not whole.startswith(start[:end]):
            raise _rewriting("a short conversation is written in another way once an observation follows")
        return mark, whole[end:]

    def _last_mark(self, text: str) -> tuple[str, int]:
        """The last mark that ends a turn, and where it ends; the end of the text if it has none (as in TRL)."""
        found = [(text.rfind(mark) + len(mark), mark) for mark in self._end_marks if mark and mark in text]
        end, mark = max(found, default=(len(text), ""))
        return mark, end

    def _cut(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self.limited(content)}
        blocks = [{**block, "text": self.limited(block["text"])} for block in content or ()]
        return {**message, "content": blocks}

    def _rendered(self, messages: list[Message], template: str | None, **options: Any) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **{**options, **self._kwargs}
        )
        return str(text)

    def _template_for(self, has_tools: bool) -> str | None:
        if has_tools not in self._templates:
            self._templates[has_tools] = self._tool_template() if has_tools else self._plain_template()
        return self._templates[has_tools]

    def _tool_template(self) -> str | None:
        """As TRL chooses it for tools."""
        if not supports_tool_calling(self._tokenizer):
            raise ValueError(
                "expected a chat template that writes tools, tool calls and their results, got one that does not"
            )
        if is_chat_template_prefix_preserving(self._tokenizer):
            return None
        try:
            return get_training_chat_template(self._tokenizer)
        except ValueError as error:
            raise _rewriting(f"with tools it does, and TRL has none in its place ({error})") from error

    def _plain_template(self) -> str | None:
        """The tokenizer's own, or TRL's training template; the first that keeps the history of users' messages."""
        if self._fault(None) is None:
            return None
        try:
            template = get_training_chat_template(self._tokenizer)
        except Exception:  # it probes the template with messages of tools, which may fail in any way
            template = None
        # Of one message alone nothing is written anew: later turns raise.
        return template if template is not None and self._fault(template) is None else None

    def _check_role(self, role: str, has_tools: bool) -> None:
        """Checks once that the template keeps the history when messages of this role come, and writes them."""
        if (has_tools, role) in self._checked:
            return
        template = self._template_for(has_tools)
        fault = self._fault(template) if role == "user" else None
        if fault is not None:
            raise _rewriting(fault)
        probe = {"role": role, "content": "q3q", **({"name": "q4q"} if role == "tool" else {})}
        try:
            written = "q3q" in self._rendered([*_before(probe), probe], template)
        except Exception as error:  # templates are programs: they raise what they like
            raise ValueError(f"the chat template takes no observation of role {role!r}: {described(error)}") from error
        if not written:
            raise ValueError(f"expected a chat template that writes messages of role {role!r}, got one that does not")
        self._checked.add((has_tools, role))

    def _fault(self, template: str | None) -> str | None:
        """How a template writes an answer in another way once a user's message follows; None where it does not."""
        question = [{"role": "user", "content": "q0q"}]
        thought = {"role": "assistant", "content": "q2q", "reasoning_content": "q1q"}
        as_sampled = {"role": "assistant", "content": "<think>\nq1q\n</think>\n\nq2q"}
        answers: list[Message] = [{"role": "assistant", "content": "q2q"}]
        if self._kwargs.get("enable_thinking") is not False:
            answers += [thought, as_sampled]
        try:
            opening = self._rendered(question, template, add_generation_prompt=True)
            opened = False
            for answer in answers:
                alone = self._rendered([*question, answer], template)
                later = self._rendered(
                    [*question, answer, {"role": "user", "content": "q3q"}], template, add_generation_prompt=True
                )
                if not later.startswith(alone[: alone.rfind("q2q") + 3]):
                    return "an answer is written in another way once a user's message follows it"
                if answer is as_sampled and "q1q" not in later:
                    return "thoughts are left out of the history"
                opened = opened or later.startswith(opening)
        except Exception as error:  # templates are programs: they raise what they like
            return f"it does not take a user's message after an answer ({described(error)})"
        return None if opened else "answers in the history begin in another way than the prompt for an answer"


def _before(message: Message) -> list[Message]:
    """A short conversation that such a message may follow: the one by which TRL finds what tools' results become."""
    answer: Message = {"role": "assistant", "content": "q2q"}
    if message["role"] == "tool":
        call = {"type": "function", "function": {"name": message.get("name", "dummy"), "arguments": {}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [{"role": "user", "content": "q0q"}, answer]


def _attempted(render: Callable[[], str], what: str) -> str:
    try:
        return render()
    except Exception as error:  # templates are programs: they raise what they like
        raise EpisodeFailure("observation", f"the chat template does not take {what}: {described(error)}") from error


def _rewriting(why: str) -> ValueError:
    return ValueError(
        f"expected a chat template that writes a history as it was sampled, got one that does not: {why}. {_BY_URL}"
    )


def _parser_of(tokenizer: Any) -> Any:
    """A tokenizer that parses answers, the given one left as it is; None where TRL has no parser for its template."""
    if any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
        return tokenizer
    try:
        return add_response_schema(copy.copy(tokenizer))
    except ValueError:
        return None
