"""Messages to tokens: whatever the template skips is an error that names it, and Parquet is as JSONL."""

import copy
import json

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harts_hf.errors import RolloutFileError
from harts_hf.rollouts.files import read_rollouts
from harts_hf.rollouts.messages import chat_template

# Knows the usual roles, texts, blocks of text and images, and arguments that are mappings.
MAPPING = """{%- for m in messages %}{%- if m.role in ("system", "user", "assistant", "tool") %}<{{ m.role }}>
{%- if m.content is string %}{{ m.content.split("</think>")[-1] }}{%- else %}{%- for block in m.content or () %}
{%- if block.type == "text" %}{{ block.text }}{%- elif block.type == "image" %}<image>{%- endif %}{%- endfor %}
{%- endif %}
{%- for call in m.tool_calls or () %}{%- set call = call.function or call %}<call {{ call.name }}>
{%- for key, value in (call.arguments or {}) | items %}{{ key }}={{ value }},{%- endfor %}{%- endfor %}
{%- endif %}{%- endfor %}{%- for tool in tools or () %}<{{ tool | tojson }}>{%- endfor %}"""
STRINGS = MAPPING.replace(
    "{%- for key, value in (call.arguments or {}) | items %}{{ key }}={{ value }},{%- endfor %}",
    "{{- call.arguments if call.arguments is string else call.arguments | tojson }}",
)
SKIPS_STRINGS = MAPPING.replace("(call.arguments or {})", "(call.arguments if call.arguments is mapping else {})")


def tokenize_messages(messages, tools, tokenizer):
    """Token ids of a conversation, and the template's assistant mask where it marks generations."""
    template = chat_template(tokenizer)
    ids, mask = template.marked(template.prepared(messages, tools), tools)
    return ids.tolist(), None if mask is None else mask.astype(int).tolist()


def byte_tokenizer(template=MAPPING):
    """A tokenizer of Transformers with one token per byte."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = template
    return tokenizer


class NoDecoder:
    """The same, but its tokens cannot be decoded."""

    chat_template = ""

    def __init__(self, template=MAPPING):
        self._tokenizer = byte_tokenizer(template)
        self.num_calls = 0

    def apply_chat_template(self, messages, **options):
        self.num_calls += 1
        return self._tokenizer.apply_chat_template(messages, **options)


TOKENIZERS = pytest.mark.parametrize("make", [byte_tokenizer, NoDecoder], ids=["decoded", "not decoded"])


def text_of(ids):
    return byte_tokenizer().decode([int(token) for token in ids])


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


USER = {"role": "user", "content": "go"}


@TOKENIZERS
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER, {"role": "assistant", "content": "ok"}], "<user>go<assistant>ok"),
        ([USER, assistant(call("ls", {"path": "x"}))], "<user>go<assistant><call ls>path=x,"),
        ([USER, assistant(call("ls", {"n": 3}), call("pwd", {}))], "<user>go<assistant><call ls>n=3,<call pwd>"),
        ([USER, assistant({"name": "ls", "arguments": {"a": 1}})], "<user>go<assistant><call ls>a=1,"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "u"}]}],
            "<user>a<image>",
        ),
        (
            [USER, {"role": "assistant", "content": None}, {"role": "tool", "content": "  "}],
            "<user>go<assistant><tool>  ",
        ),
        ([USER, {"role": "assistant"}, {"role": "user", "content": "go"}], "<user>go<assistant><user>go"),
        ([USER, {"role": "assistant", "content": "", "id": "m1", "reward": 0.5}], "<user>go<assistant>"),
    ],
    ids=["texts", "call", "two calls", "flat call", "blocks", "nothing said", "no content", "annotations"],
)
def test_messages_that_are_wholly_in_the_tokens(make, messages, text):
    """Each is read as the template writes it; what says nothing need not leave a token, nor what annotates."""
    given = copy.deepcopy(messages)
    ids, mask = tokenize_messages(messages, None, make())
    assert text_of(ids) == text and mask is None and messages == given


@TOKENIZERS
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "human", "content": "hi"}], "message 1 (role 'human'): its content left no token; expected roles"),
        ([USER, {"role": "gpt", "content": "ho"}], "message 2 (role 'gpt'): its content left no token"),
        (
            [
                USER,
                {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "input": {}}]},
            ],
            "message 2 (role 'assistant'): content block 2 (type 'tool_use') left no token",
        ),
        (
            [
                USER,
                {"role": "user", "content": [{"type": "tool_result", "content": "a"}]},
                {"role": "x", "content": "a"},
            ],
            "message 2 (role 'user'): content block 1 (type 'tool_result') left no token, nor did 1 more",
        ),
        ([USER, {"type": "function_call", "name": "ls"}], "message 2 (no role): all of it left no token"),
        ([{"source": "agent", "action": "run", "args": {"command": "ls"}}], "message 1 (no role): all of it left no"),
        ([USER, {"role": "assistant", "refusal": "no"}], "message 2 (role 'assistant'): all of it left no token"),
        (
            [USER, {"role": "assistant", "content": "", "function_call": {"name": "ls", "arguments": "{}"}}],
            "message 2 (role 'assistant'): its function_call left no token",
        ),
        (
            [{"role": "gpt", **assistant(call("ls", {"a": 1}))} | {"role": "gpt"}],
            "tool call 1 left no token, nor did 1",
        ),
        (
            [{"role": "human", "content": ""}],
            "expected messages that the chat template makes tokens of, got none from 1",
        ),
    ],
)
def test_messages_that_leave_no_token(make, messages, message, tmp_path):
    """The file, the line, the message by its number and what of it is lost are named, and never 'token_ids'."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(
        json.dumps({"group": 0, "messages": [USER]}) + "\n" + json.dumps({"group": 0, "messages": messages})
    )
    with pytest.raises(RolloutFileError) as error:
        read_rollouts(path, make())
    assert str(error.value).startswith(f"{path}, line 2: ") and message in str(error.value)
    assert "token_ids" not in str(error.value)


def test_a_tokenizer_without_the_words_loses_nothing():
    """Marks that a vocabulary does not have are unknown to it, not lost."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<user>": 1, "go": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = (
        "{%- for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} {% endif %}{% endfor %}"
    )
    assert tokenize_messages([USER, USER], None, tokenizer)[0] == [1, 2, 1, 2]
    with pytest.raises(ValueError, match=r"message 2 .*: its content left no token"):
        tokenize_messages([USER, {"role": "x", "content": "go"}], None, tokenizer)


def test_thoughts_that_a_template_drops_by_design_are_no_error():
    """Whether a text counts is the message's form; what a template cuts out of a text is its own affair."""
    ids, _ = tokenize_messages([{"role": "assistant", "content": "<think>x</think>"}, USER], None, byte_tokenizer())
    assert text_of(ids) == "<assistant><user>go"


def test_the_check_costs_one_rendering(monkeypatch):
    """Where tokens can be decoded, a long conversation is rendered twice, not once per message."""
    tokenizer = byte_tokenizer()
    calls = []
    stock = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: calls.append(1) or stock(*a, **k))
    tokenize_messages(
        [USER, assistant(call("ls", {"n": 1}), call("ls", {"path": "x"}), content="so")] * 40, None, tokenizer
    )
    assert len(calls) == 2


@TOKENIZERS
def test_arguments_as_json_strings(make):
    """As OpenAI's interface has them: verbatim where the template takes them, as an object where it needs one."""
    conversation = [USER, assistant(call("ls", '{"path":"x"}'))]
    assert text_of(tokenize_messages(conversation, None, make(MAPPING))[0]).endswith("<call ls>path=x,")
    assert text_of(tokenize_messages(conversation, None, make(STRINGS))[0]).endswith('<call ls>{"path":"x"}')
    without = [USER, assistant(call("ls", ""))]  # as some servers write a call without arguments
    assert text_of(tokenize_messages(without, None, make(MAPPING))[0]).endswith("<call ls>")
    with pytest.raises(
        ValueError, match=r"message 2 .*function.arguments of tool call 1 \(a JSON string: make it an obj"
    ):
        tokenize_messages(conversation, None, make(SKIPS_STRINGS))


@TOKENIZERS
@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("ls", "message 2: expected tool_calls to be a list of objects, got 'ls'"),
        (["ls()"], r"message 2: expected tool call 1 to be an object, got 'ls\(\)'"),
        ([call("a", {}), {"function": "ls"}], "message 2: expected tool call 2 to be an object whose function is an"),
        ([call("ls", '{"path":')], "message 2: expected function.arguments of tool call 1 to be an object, or a JSON"),
        ([call("ls", "[1]")], r"message 2: expected function.arguments of tool call 1 to be an object, got \[1\]"),
    ],
)
def test_tool_calls_of_other_forms(make, calls, message):
    """The message and the call are named."""
    with pytest.raises(ValueError, match=message):
        tokenize_messages([USER, {"role": "assistant", "content": "", "tool_calls": calls}], None, make())


def test_a_template_that_fails_names_the_message():
    """The first message with which it fails in the same way."""
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content + 'x' }}{% endfor %}")
    with pytest.raises(ValueError, match=r"the chat template failed at message 2: .* has no attribute 'content'"):
        tokenize_messages([USER, {"role": "user"}, USER], None, tokenizer)


def nested(arguments):
    return {"messages": [USER, assistant(call("run", arguments))], "tools": [{"name": "run", "schema": arguments}]}


@TOKENIZERS
@pytest.mark.parametrize(
    "rows",
    [
        [
            {"messages": [USER, assistant(call("a", {"x": "1"}))]},
            {"messages": [USER, assistant(call("b", {"y": "2"}))]},
        ],
        [nested({"deep": {"list": [{"x": 1}, {"y": [{"z": "2"}]}]}}), nested({"deep": {"other": {"w": "3"}}})],
        [
            {"messages": [{"role": "assistant", "content": None}, USER]},
            {"messages": [assistant(call("a", {"b": "c"}))]},
        ],
        [{"messages": [USER], "tools": [{"a": "1"}, {"b": {"c": [{"d": "2"}, {"e": "3"}]}}]}, {"messages": [USER]}],
        [{"messages": [USER, {"role": "assistant", "tool_calls": [call("a", {"b": "c"})]}]}],
    ],
    ids=["arguments", "every depth", "content", "tools", "no content"],
)
def test_parquet_gives_the_tokens_of_json_lines(make, rows, tmp_path):
    """Fields that Parquet fills with null, in messages and tools and at every depth, are as absent."""
    rows = [{"group": "a", **row} for row in rows]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    lines, parquet = (
        [text_of(rollout.token_ids) for rollout in read_rollouts(tmp_path / name, make())[0].rollouts]
        for name in ("r.jsonl", "r.parquet")
    )
    assert lines == parquet


def test_items_that_parquet_gives_a_content(tmp_path):
    """What a template skips is an error in both: a content that Parquet fills with null says nothing."""
    rows = [{"group": "a", "messages": [{"role": "user", "text": "hi"}, {"role": "assistant", "content": "x"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    with pytest.raises(RolloutFileError, match=r"row 1: message 1 \(role 'user'\): all of it left no token"):
        read_rollouts(tmp_path / "r.parquet", byte_tokenizer())


def test_nulls_of_lists_and_of_json_lines_stay(tmp_path):
    """What Parquet does not fill, and what a JSON line says, is meant."""
    rows = [{"group": "a", "messages": [USER, assistant(call("a", {"x": [None, "1"]}))]}]
    (tmp_path / "r.jsonl").write_text(json.dumps(rows[0]).replace('"x"', '"y": null, "x"'))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    for name, arguments in (("r.jsonl", "y=None,x=[None, '1'],"), ("r.parquet", "x=[None, '1'],")):
        assert text_of(read_rollouts(tmp_path / name, byte_tokenizer())[0].rollouts[0].token_ids).endswith(arguments)


def test_without_a_tokenizer_nothing_is_rendered():
    """A row with messages asks for what it needs."""
    with pytest.raises(ValueError, match="messages need a tokenizer, and none was given"):
        tokenize_messages([USER], None, None)
