"""The shelf task behind tools, played by a small agent loop on OpenAI's client.

It does what makes real agents' histories part from one another: the chat template drops thinking of earlier turns, and
the agent compacts its context. A conversation, the policy's words in capitals (before a call it may think a word)::

    <user> lamp wanted <bot> CUP LOOK LAMP
    <user> lamp wanted <bot> look lamp <end> <tool> s3 listed <bot> GO S3 <end>
    <user> lamp wanted <user> s3 reached <bot> OPEN S3 <end>
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

import openai
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from harts_hf.rollouts.environments.shelf import ShelfEnvironment
from harts_hf.rollouts.gateway.agents import Agent, AgentAccess
from harts_hf.rollouts.gateway.answers import AssistantMessage, ToolCall
from harts_hf.rollouts.gateway.formats import TemplateFormat
from harts_hf.rollouts.gateway.requests import ChatRequest

# The tools, each with the name of its one argument.
_ARGUMENTS = {"look": "item", "go": "shelf", "open": "shelf"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, argument in _ARGUMENTS.items()
]
_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<bot> ' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- ' ' + call.function.name }}
            {%- for value in call.function.arguments.values() %}{{- ' ' + value }}{%- endfor %}
        {%- endfor %}
        {{- ' <end> ' }}
    {%- else %}
        {{- '<' + message.role + '> ' + message.content + ' ' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<bot>' }}{%- endif %}"""


class ShelfFormat(TemplateFormat):
    """The shelf agent's chat format: a turn's last two words are a call, words before them thinking.

    Thinking is not in the template: it is gone from the next turn on.
    """

    def parse(self, ids: Sequence[int], request: ChatRequest, *, history: Sequence[int]) -> AssistantMessage:
        words = self.plain_text(ids).split()
        *thinking, name, value = ["", "", *words][-max(2, len(words)) :]
        if name not in _ARGUMENTS:
            return AssistantMessage(content=" ".join(words))
        call = ToolCall(name=name, arguments=json.dumps({_ARGUMENTS[name]: value}))
        return AssistantMessage(reasoning_content=" ".join(thinking) or None, tool_calls=(call,))


class ShelfAgent(Agent):
    """Plays :class:`~harts_hf.rollouts.environments.shelf.ShelfEnvironment`; the reward is the game's.

    Args:
        num_items: items that may be wanted.
        num_shelves: shelves that an item may be on.
        max_turns: most turns of an episode.
        compact_after: turns after which the conversation so far is replaced by the task and what was seen last.
    """

    def __init__(
        self, *, num_items: int = 4, num_shelves: int = 4, max_turns: int = 4, compact_after: int = 2
    ) -> None:
        self._game = ShelfEnvironment(num_items=num_items, num_shelves=num_shelves)
        self._max_turns = max_turns
        self._compact_after = compact_after
        # Making one takes longer than a request: all episodes share its connections. No proxy reaches loopback.
        self._client = openai.OpenAI(api_key="none", http_client=openai.DefaultHttpxClient(trust_env=False))

    def run(self, task: Any, access: AgentAccess, *, timeout: float, stopped: threading.Event) -> float:
        client = self._client.with_options(
            base_url=access.base_url, api_key=access.api_key, timeout=timeout, max_retries=0
        )
        game = self._game.fork()
        messages: list[Any] = [{"role": "user", "content": game.reset(task, seed=access.seed)}]
        for turn in range(1, self._max_turns + 1):
            answer = client.chat.completions.create(model=access.model, messages=messages, tools=TOOLS, max_tokens=3)
            message: dict[str, Any] = answer.choices[0].message.to_dict()
            call = next(iter(message.get("tool_calls") or ()), None)
            function = call["function"] if call else {"name": "", "arguments": "{}"}
            action = " ".join([function["name"], *json.loads(function["arguments"]).values()])
            seen, is_over = game.step(action)
            if is_over:
                break
            reply = {"role": "tool", "tool_call_id": call["id"]} if call else {"role": "user"}
            messages += [message, {**reply, "content": seen}]
            if turn % self._compact_after == 0:
                messages = [messages[0], {"role": "user", "content": seen}]
        return game.reward

    def prompts(self) -> list[str]:
        """One prompt for each item."""
        return self._game.prompts()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A word-level tokenizer of the task's words, with a chat template; ``<end>`` ends a turn."""
        marks = ("<pad>", "<end>", "<unk>", "<user>", "<tool>", "<bot>")
        known = self._game.tokenizer().get_vocab()
        words = (*marks, *sorted(set(known) - set(marks)))
        core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core,
            pad_token="<pad>",
            eos_token="<end>",
            unk_token="<unk>",
            additional_special_tokens=list(marks[3:]),
            padding_side="left",
        )
        tokenizer.chat_template = _TEMPLATE
        return tokenizer

    def chat_format(self, tokenizer: Any) -> ShelfFormat:
        """The format of :meth:`tokenizer`."""
        return ShelfFormat(tokenizer)
