"""The reuse rule: which ids of an episode a history keeps, against independent tokenisations."""

import json

import pytest
from support.agents import WEATHER, chat_tokenizer, odd_tokens

from harts_hf.rollouts.engines import SampledTurn
from harts_hf.rollouts.gateway.answers import AssistantMessage
from harts_hf.rollouts.gateway.formats import TemplateFormat, TrlFormat
from harts_hf.rollouts.gateway.pieces import cut, joined
from harts_hf.rollouts.gateway.recording import Recording
from harts_hf.rollouts.gateway.requests import read_request
from harts_hf.rollouts.gateway.splicing import Drift

TOKENIZER = chat_tokenizer()
FORMAT = TrlFormat(TOKENIZER)
END = TOKENIZER.eos_token_id
CALL = (
    "I look.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>"
)


class Conversation:
    """An agent that keeps all it hears, and an independent account of what its histories should be."""

    def __init__(self, *, tools=True):
        self.recording = Recording(FORMAT, [END])
        self.messages = [{"role": "user", "content": "hello, the weather of Paris?"}]
        self.tools = [WEATHER] if tools else None
        self.seed = 0

    def request(self):
        body = {"messages": self.messages, "tools": self.tools}
        return read_request(json.dumps(body).encode())

    def history(self):
        """The next history as the recording has it, and as it is tokenised anew."""
        rendered = FORMAT.render(self.request())
        return self.recording.splice(rendered), rendered

    def turn(self, text, *, ended="end_token", count=1):
        """Samples a turn, in tokens that the tokenizer would not choose; returns its history, ids and message."""
        history, _ = self.history()
        turns = []
        for _ in range(count):
            self.seed += 1
            ids = tuple(odd_tokens(TOKENIZER, text, seed=self.seed))
            turns.append(SampledTurn(token_ids=ids, logprobs=(-1.0,) * len(ids), ended=ended))
        request = self.request()
        self.recording.record(history, turns, request)
        return history, turns[0].token_ids, FORMAT.parse(turns[0].token_ids, request, history=history.ids)

    def hear(self, message, *replies, **changes):
        """Appends the policy's message, as a client sends it back, and what follows."""
        calls = [
            {"id": "c", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
        said = {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning_content}
        self.messages += [{**said, "tool_calls": calls or None, **changes}, *replies]


def tool(content="sunny"):
    return {"role": "tool", "tool_call_id": "c", "content": content}


def user(content="and then?"):
    return {"role": "user", "content": content}


def test_a_first_history_is_the_tokenisation_of_its_text():
    """Nothing was sampled: the ids are those of the rendered text, tokenised by itself."""
    talk = Conversation()
    history, rendered = talk.history()
    text = TOKENIZER.apply_chat_template(talk.messages, tools=[WEATHER], tokenize=False, add_generation_prompt=True)
    assert history.ids == rendered == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert history.drift is None and history.num_kept == 0


def test_pieces_are_cut_at_special_tokens_and_nothing_is_lost():
    """Every added token is a piece by itself."""
    ids = TOKENIZER(f"hello<|im_end|><think>{CALL}")["input_ids"]
    pieces = cut(ids, FORMAT)
    assert joined(pieces) == ids
    assert [piece.text for piece in pieces[:4]] == ["hello", "<|im_end|>", "<think>", "I look.\n"]
    assert [piece.is_special for piece in pieces[:4]] == [False, True, True, False]


def test_sampled_ids_stay_and_the_rest_is_tokenised():
    """The history of the second turn: the first one's ids, the sampled ids, and the tool's answer tokenised anew."""
    talk = Conversation()
    first, sampled, message = talk.turn(CALL)
    assert message.tool_calls[0].arguments == '{"city": "Paris", "days": 2}'
    talk.hear(message, tool())
    second, rendered = talk.history()
    kept = (*first.ids, *sampled)
    assert second.drift is Drift.CLEAN and second.num_kept == len(kept)
    assert tuple(second.ids[: len(kept)]) == kept
    # The tokenizer would have chosen others, for the same text.
    assert second.ids != rendered and TOKENIZER.decode(second.ids) == TOKENIZER.decode(rendered)
    rest = "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert second.ids[len(kept) :] == TOKENIZER(rest, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("\n</parameter>", "  \n</parameter>"),
        CALL.replace("<parameter=days>\n2\n", "<parameter=days>\n 2\n"),
        CALL.replace("\n</think>\n\n", "</think>"),
        CALL.replace("I look.\n", "I \t look.\n\n\n"),
    ],
    ids=["space", "number", "thinking-end", "thinking-space"],
)
def test_the_last_answer_is_repaired(text):
    """White space and the format of arguments are written anew by the template: the sampled ids stay."""
    talk = Conversation()
    first, sampled, message = talk.turn(text)
    talk.hear(message, tool(), reasoning_content="I look.")
    second, rendered = talk.history()
    kept = (*first.ids, *sampled)
    assert TOKENIZER.decode(kept) != TOKENIZER.decode(rendered)[: len(TOKENIZER.decode(kept))]
    assert second.drift is Drift.REALIGN and tuple(second.ids[: len(kept)]) == kept
    # What was repaired once stays so in all later histories.
    _, again, message = talk.turn("ok\n</think>\n\nhello<|im_end|>")
    talk.hear(message, tool("and rain"))
    third, _ = talk.history()
    assert third.drift is Drift.CLEAN
    assert tuple(third.ids[: len(second.ids) + len(again)]) == (*second.ids, *again)


def forked(talk, sampled, keeps):
    """Checks that a history forks, keeps the ids up to a text, and is the tokenised text from there on."""
    history, rendered = talk.history()
    assert history.drift is Drift.FORK and history.row is None
    assert TOKENIZER.decode(history.ids) == TOKENIZER.decode(rendered)
    assert TOKENIZER.decode(history.ids[: history.num_kept]).endswith(keeps)
    rest = TOKENIZER.decode(rendered)[len(TOKENIZER.decode(history.ids[: history.num_kept])) :]
    assert history.ids[history.num_kept :] == TOKENIZER(rest, add_special_tokens=False)["input_ids"]
    return history


def test_thinking_that_the_template_drops_is_never_put_back():
    """After a user's message, Qwen's template renders earlier answers without their thinking."""
    talk = Conversation(tools=False)
    _, sampled, message = talk.turn("I wonder.\n</think>\n\nhello world<|im_end|>")
    talk.hear(message, user())
    history = forked(talk, sampled, keeps="<|im_end|>\n<|im_start|>")
    assert "wonder" not in TOKENIZER.decode(history.ids)


def test_empty_thinking_that_the_template_drops_is_not_put_back_either():
    """Its tags are gone: they are no white space."""
    talk = Conversation(tools=False)
    _, sampled, message = talk.turn("\n</think>\n\nhello world<|im_end|>")
    talk.hear(message, user())
    history = forked(talk, sampled, keeps="<|im_end|>\n<|im_start|>")
    assert TOKENIZER.decode(history.ids).count("<think>") == 1  # of the answer to come


def test_tags_that_the_policy_sampled_are_no_white_space():
    """A template whose answers begin with the policy's own tags, and that leaves out empty ones."""

    class Bare(TemplateFormat):
        def parse(self, ids, request, *, history):
            return AssistantMessage(content=self.decode(ids).split("</think>")[-1].removesuffix("<|im_end|>"))

    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    bare = Bare(tokenizer)
    for text, drift in (("<think>\n</think>hello<|im_end|>", Drift.FORK), ("hello \n<|im_end|>", Drift.REALIGN)):
        recording = Recording(bare, [END])
        ids = tuple(tokenizer(text)["input_ids"])
        first = read_request(json.dumps({"messages": [user()]}).encode())
        history = recording.splice(bare.render(first))
        turn = SampledTurn(token_ids=ids, logprobs=(-1.0,) * len(ids), ended="end_token")
        recording.record(history, [turn], first)
        said = {"role": "assistant", "content": "hello"}
        second = read_request(json.dumps({"messages": [user(), said, user()]}).encode())
        assert recording.splice(bare.render(second)).drift is drift


def test_thinking_that_the_agent_drops_is_not_put_back():
    """A client that does not send ``reasoning_content`` back."""
    talk = Conversation()
    _, sampled, message = talk.turn(CALL)
    talk.hear(message, tool(), reasoning_content=None)
    forked(talk, sampled, keeps="<think>")


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "hello word"},
        {"content": "hello world!"},
        {"reasoning_content": "I was thinking."},
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    ],
    ids=["letter", "more", "thinking", "call"],
)
def test_an_answer_that_was_changed_forks(changes):
    """What the agent says that the policy said is not what it sampled."""
    talk = Conversation()
    _, _, message = talk.turn("I think.\n</think>\n\nhello world<|im_end|>")
    talk.hear(message, tool(), **changes)
    history, _ = talk.history()
    assert history.drift is Drift.FORK


def test_arguments_of_another_value_fork():
    """2 and 3 differ in more than format."""
    talk = Conversation()
    _, _, message = talk.turn(CALL)
    arguments = json.dumps({"city": "Paris", "days": 3})
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    talk.hear(message, tool(), tool_calls=[call])
    assert talk.history()[0].drift is Drift.FORK


def test_a_turn_that_was_cut_has_the_end_of_the_template():
    """After its ids comes the end token, which nobody sampled: mask 0."""
    talk = Conversation()
    first, sampled, message = talk.turn("I think.\n</think>\n\nhello wor", ended="length")
    assert message.content == "hello wor"
    talk.hear(message, tool())
    second, _ = talk.history()
    assert second.drift is Drift.CLEAN and second.num_kept == len(first.ids) + len(sampled)
    assert second.ids[second.num_kept] == END
    talk.turn("a\n</think>\n\nb<|im_end|>")
    (row,) = talk.recording.rows()
    assert row.env_mask[: len(sampled) + 1] == [1] * len(sampled) + [0]
    assert row.completion_ids[len(sampled)] == END and row.logprobs[len(sampled)] == 0.0


def test_a_turn_that_was_cut_is_repaired_with_the_end_of_the_template():
    """Cut and written anew at once: the sampled ids, then the end token."""
    talk = Conversation()
    first, sampled, message = talk.turn("I  think.</think>hello wor", ended="length")
    talk.hear(message, tool(), reasoning_content="I think.")
    second, _ = talk.history()
    kept = (*first.ids, *sampled)
    assert second.drift is Drift.REALIGN and tuple(second.ids[: len(kept) + 1]) == (*kept, END)
    assert second.num_kept == len(kept)


def test_compaction_keeps_what_both_histories_begin_with():
    """The agent begins anew with a summary: the system part and the tools are the same ids, the rest is tokenised."""
    talk = Conversation()
    _, sampled, message = talk.turn(CALL)
    talk.hear(message, tool())
    talk.messages = [user("summary: sunny")]
    forked(talk, sampled, keeps="<|im_end|>\n<|im_start|>")


def test_of_several_rows_the_one_that_is_extended_is_continued():
    """A sub-agent speaks between two turns of the first conversation: that one is continued all the same."""
    talk = Conversation()
    _, _, message = talk.turn(CALL)
    main = [*talk.messages]
    talk.messages = [user("you are a sub-agent in Paris")]
    talk.turn("s\n</think>\n\nsub<|im_end|>")
    talk.messages = main
    talk.hear(message, tool())
    history, _ = talk.history()
    assert history.drift is Drift.CLEAN and history.row == 0
    talk.turn("t\n</think>\n\nok<|im_end|>")
    assert len(talk.recording.rows()) == 2
    assert talk.recording.drifts == {Drift.FORK: 1, Drift.CLEAN: 1}


def test_templates_that_nobody_can_parse_are_refused_by_name():
    """Without a parser there is no message: the ways out are named."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.name_or_path = "my-model"
    with pytest.raises(
        ValueError, match=r"expected a chat template whose answers TRL can parse .*, got that of .my-model"
    ):
        TrlFormat(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
        TrlFormat(tokenizer)


def test_a_template_that_fails_is_the_requests_fault():
    """Templates raise what they like; Qwen's wants a user's message."""
    request = read_request(json.dumps({"messages": [{"role": "system", "content": "x"}]}).encode())
    with pytest.raises(ValueError, match="the chat template does not take these messages: No user query"):
        FORMAT.render(request)
    assert issubclass(TrlFormat, TemplateFormat)
