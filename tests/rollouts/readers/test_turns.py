"""Samples of turns against the unpatched template, rendered and tokenised whole for each."""

import json
import random
from importlib.resources import files

import numpy as np
import pytest
from support.chat import byte_tokenizer, text_of
from support.forms import MESSAGES, TURNS, with_strings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from harts_hf.errors import HartsWarning
from harts_hf.rollouts.files import read_rollout_file
from harts_hf.rollouts.messages import chat_template
from harts_hf.rollouts.segments import SegmentedTokenizer
from harts_hf.rollouts.text_template import _common_prefix

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|endoftext|>")
SPECIAL += ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|begin_of_text|>")  # noqa: RUF001
TEXTS = [
    "the cat sat",
    "  two\n\n\nlines ",
    "\n",
    "naïve café ☕",
    "x" * 40,
    "<think>",
    "12 345",
    "\t\ttabs",
    "a",
    "das Haus",
]


def merging_tokenizer(template=None):
    """A tokenizer that merges bytes, so that where a text is cut matters."""
    core = Tokenizer(models.BPE())
    # As the tokenizers of these models: line ends are words of their own.
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s?\S+|\s+"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator([" ".join(TEXTS) + "\n\n<|im_start|>assistant\n"] * 20, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin_of_text|>", eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def stock_template(name):
    """A template that TRL ships, of a model that people use."""
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def conversation(seed):
    """Ragged: several queries, answers in a row, calls or not, thoughts or not, white space at ends."""
    rng = random.Random(seed)
    text = lambda: " ".join(rng.choices(TEXTS, k=rng.randint(1, 4)))  # noqa: E731
    messages = [{"role": "system", "content": text()}] if seed % 2 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        for _ in range(rng.randint(1, 3)):
            message = {"role": "assistant", "content": text()}
            if rng.random() < 0.6:
                message["reasoning_content"] = text()
            messages.append(message)
            if rng.random() < 0.5:
                messages.append({"role": "user", "content": f"<tool_response>{text()}</tool_response>"})
    return messages


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen2_5", "llama3_1", "deepseek_r1_distill", "phi3"])
def test_turns_of_stock_templates(name):
    """The prompt is what a server would have been given; with the turn it is the whole text, up to its end token."""
    tokenizer = merging_tokenizer(stock_template(name))
    num_turns = num_whole = num_extended = 0
    template = chat_template(tokenizer)
    for seed in range(12):
        messages = conversation(seed)
        ready = template.prepared(messages, None)
        for turn in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
            ids, mask = template.turn(ready, None, turn)
            whole = tokenizer.apply_chat_template(messages[: turn + 1], return_dict=True)["input_ids"]
            prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=True)
            prompt, start = prompt["input_ids"], int(np.flatnonzero(mask)[0])
            num_turns += 1
            num_whole += ids.tolist() == whole[: len(ids)]
            num_extended += start == len(prompt)
            # Less where the prompt opens a thought that this answer does not have, or a token lies across the cut.
            assert mask[start:].all() and ids[:start].tolist() == prompt[:start] and start >= len(prompt) - 4
            own = text_of(ids[start:], tokenizer)
            assert own and text_of(whole, tokenizer).rstrip().endswith(own.strip())
        assert template.is_exact()
    assert num_turns > 30
    # Qwen3 writes the last answer otherwise than the one before it; the agent sent it as the last.
    assert num_whole >= (num_turns * 0.7 if name == "qwen3" else num_turns)
    # DeepSeek's prompt opens a thought that its histories do not have.
    assert num_extended >= (0 if name == "deepseek_r1_distill" else num_turns * 0.6)


def test_a_template_that_renders_the_history_otherwise_once_the_turn_is_there():
    """The history is the one that the agent sent: here each last answer keeps its thought, the others do not."""
    template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if loop.last or (loop.index0 == messages | length - 2 and messages[-1].role == 'user') %}"
        "{{- '<think>' + (m.reasoning_content or '') + '</think>' }}{%- endif %}{{- m.content + '<|im_end|>\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    tokenizer = byte_tokenizer(template)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e", "reasoning_content": "f"},
    ]
    found = chat_template(tokenizer)
    ids, mask = found.turn(found.prepared(messages, None), None, 3)
    before = tokenizer.apply_chat_template(messages[:3], tokenize=False)
    assert text_of(ids) == before + "<|im_start|>assistant\n<think>f</think>e<|im_end|>"
    assert text_of(ids[mask]) == "<think>f</think>e<|im_end|>"


def test_an_answer_that_begins_as_the_prompt_that_it_does_not_have():
    """The prompt opens a thought that answers do not write: an answer that begins alike is whole, its role is not."""
    template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>' }}{%- endif %}"
    )
    found = chat_template(byte_tokenizer(template))
    for content in ("<thistle>", "<thistle> of <|im_start|>assistant\n"):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        ids, mask = found.turn(found.prepared(messages, None), None, 1)
        assert text_of(ids[mask]) == content + "<|im_end|>"


def test_where_a_template_has_no_prompt_for_an_answer():
    """The turn begins where its rendering leaves that of the messages before."""
    tokenizer = byte_tokenizer("{%- for m in messages %}{{- '<' + m.role + '>' + m.content }}{%- endfor %}", ())
    found = chat_template(tokenizer)
    ready = found.prepared([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)
    ids, mask = found.turn(ready, None, 1)
    assert text_of(ids) == "<user>a<assistant>b" and text_of(ids[mask]) == "<assistant>b"


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, texts, **options):
        self.characters += sum(map(len, texts))
        return self._tokenizer(texts, **options)


def test_histories_are_tokenised_once(tmp_path):
    """Of 60 turns that repeat their histories, each character is tokenised once, and once more to prove it."""
    messages = [{"role": "user", "content": "go"}]
    for number in range(60):
        messages += [
            {"role": "assistant", "content": f"{number} " * 50},
            {"role": "tool", "content": f"<{number}>" * 50},
        ]
    tokenizer = Counting(byte_tokenizer())
    template = chat_template(tokenizer)
    ready = template.prepared(messages, None)
    turns = range(1, 121, 2)
    expanded = sum(len(template.turn(ready, None, turn)[0]) for turn in turns)
    assert template.is_exact()
    once = len(tokenizer.apply_chat_template(messages, tokenize=False))
    assert expanded > 25 * once and tokenizer.characters < 2.2 * once


@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_exact(seed):
    """Ids by pieces are those of the whole text, whatever texts came before; so is the number before a cut."""
    rng = random.Random(seed)
    tokenizer = merging_tokenizer()
    segments = SegmentedTokenizer(tokenizer)
    text = ""
    for _ in range(30):
        kept = text[: rng.choice((len(text), rng.randint(0, len(text))))]
        text = kept + "".join(rng.choices([*TEXTS, *SPECIAL[:4], " ", "<|im_", "start|>"], k=rng.randint(0, 8)))
        ids = segments.encode(text)
        assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert segments.is_exact(text, ids)
        inside = {i for m in segments.special.finditer(text) for i in range(m.start() + 1, m.end())}
        cut = rng.choice([i for i in range(len(text) + 1) if i not in inside])
        head = tokenizer(text[:cut], add_special_tokens=False)["input_ids"]
        same = next((i for i, (a, b) in enumerate(zip(head, ids, strict=False)) if a != b), min(len(head), len(ids)))
        assert segments.tokens_before(text, cut) == same


class Dependent:
    """A tokenizer whose first token says how long the whole text is: no piece can know."""

    def __init__(self):
        self.added_tokens_decoder = {0: AddedToken("<|im_start|>", special=True, normalized=False)}

    def __call__(self, texts, **options):
        return {"input_ids": [[1000 + len(text), *map(ord, text)] for text in texts]}


def test_pieces_that_depend_on_their_neighbours_are_given_up():
    """The proof fails once; from then on whole texts are tokenised."""
    segments = SegmentedTokenizer(Dependent())
    text = "<|im_start|>a<|im_start|>b"
    assert not segments.is_exact(text, segments.encode(text))
    assert segments.encode(text).tolist() == [1000 + len(text), *map(ord, text)]
    assert segments.is_exact(text, segments.encode(text))


def test_a_file_of_such_a_tokenizer_is_read_exactly(tmp_path, monkeypatch):
    """The samples are made again, of whole texts, and it is said."""
    path = tmp_path / "r.json"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
    tokenizer = byte_tokenizer()
    right = read_rollout_file(path, tokenizer).groups[0].rollouts[0]
    stock = SegmentedTokenizer._whole

    def cut_short(self, texts):  # whatever is no whole text
        return [
            ids if "a" in text and "b" in text else ids[:-1]
            for ids, text in zip(stock(self, texts), texts, strict=True)
        ]

    monkeypatch.setattr(SegmentedTokenizer, "_whole", cut_short)
    file = read_rollout_file(path, tokenizer)
    assert file.groups[0].rollouts[0].token_ids.tolist() == right.token_ids.tolist()
    assert any("tokenised whole" in note for note in file.notes)


def test_common_prefix():
    """As counted character by character."""
    for left, right, size in (("", "", 0), ("ab", "abc", 2), ("abc", "abd", 2), ("x", "y", 0), ("aaaa", "aaaa", 4)):
        assert _common_prefix(left, right) == _common_prefix(right, left) == size


def test_tokens_across_the_prompt_are_trained():
    """A token that begins in the prompt and ends in the answer was not in the prompt that the model was given."""
    tokenizer = merging_tokenizer(
        "{%- for m in messages %}{{- m.role + '\n' + m.content }}{%- endfor %}"
        "{%- if add_generation_prompt %}assistant\n{%- endif %}"
    )
    template = chat_template(tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    ids, mask = template.turn(template.prepared(messages, None), None, 1)
    assert text_of(ids[mask], tokenizer) == "\n\nb"


def test_thoughts_that_a_template_does_not_know_are_counted(tmp_path):
    """One warning with the number of turns."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + (m.content or '') }}"
        "{{- (m.tool_calls | string) + '<|im_end|>' }}"
    )
    with pytest.warns(HartsWarning, match="2 turns have thoughts that the chat template does not write"):
        file = read_rollout_file(path, byte_tokenizer(template + "{%- endfor %}"))
    assert file.notes["turns whose thoughts the chat template does not write"] == 2


def test_images_are_no_text_in_silence(tmp_path):
    """A template may write a placeholder for them, which is then trained on: one warning, and a note of the file."""
    path = tmp_path / "r.jsonl"
    blocks = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]
    rows = [{"messages": [{"role": "user", "content": content}, *MESSAGES[-1:]]} for content in (blocks, "a", blocks)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{%- for m in messages %}{{- '<|im_start|>' + m.role + (m | string) + '<|im_end|>' }}{%- endfor %}"
    with pytest.warns(HartsWarning, match="2 messages have images, audio or files"):
        file = read_rollout_file(path, byte_tokenizer(template))
    assert file.notes["messages with images, audio or files, of which samples hold what the chat template writes"] == 2


def test_a_conversation_whose_turns_cannot_be_told(tmp_path):
    """A template without a prompt for answers and without marks: no mask, and it is said."""
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    tokenizer = byte_tokenizer("{%- for m in messages %}{{- m.role + m.content + '<|im_end|>' }}{%- endfor %}")
    file = read_rollout_file(path, tokenizer, samples_per="conversation")
    assert file.groups[0].rollouts[0].loss_mask is None
    assert file.summary[1] == "1 lists of messages in whose text the turns cannot be told: they have no mask"


MARKED = """{%- for m in messages %}{{- "<|im_start|>" + m.role + "\n" }}{%- if m.role == "assistant" %}
{%- generation %}{{- m.content + "<|im_end|>" if m.content else "" }}{% endgeneration %}
{%- else %}{{- m.content + "<|im_end|>" }}{%- endif %}{{- "\n" }}
{%- endfor %}{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{%- endif %}"""
UNMARKED = MARKED.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
ASK = {"role": "user", "content": "go"}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marks-generations", "marks-none"])
@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"prompt": [ASK, says("example"), ASK], "completion": [says("own")]}, ["own"]),
        ({"prompt": [ASK, says("example")], "completion": [ASK]}, [""]),
        ([[ASK, says("one")], [ASK, says("one"), ASK, says("two")]], ["one", "two"]),
        ({"history": [ASK, says("example", is_demo=True), ASK, says("own")]}, ["own"]),
        ({"messages": [says("greeting"), ASK, says("own")]}, ["own"]),
        ({"messages": [ASK, says("no", weight=0), ASK, says("own", weight=1)]}, ["own"]),
        (
            {"conversations": [{"from": "human", "value": "go"}, {"from": "gpt", "value": "no", "weight": 0}] * 2},
            [""],
        ),
    ],
    ids=["prompt", "no-turn", "requests", "demonstration", "greeting", "weights", "sharegpt"],
)
@pytest.mark.filterwarnings("ignore:.*nothing of it would be trained")
def test_answers_that_nobody_sampled_are_context(row, trained, template, tmp_path):
    """Of whole conversations too, where a template's own mask is of all answers."""
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    file = read_rollout_file(tmp_path / "r.jsonl", byte_tokenizer(template), samples_per="conversation")
    found = [text_of(rollout.token_ids[rollout.loss_mask]) for rollout in file.groups[0].rollouts]
    assert [text.replace("<|im_end|>", "") for text in found] == trained


def test_marks_that_cannot_be_told_apart(tmp_path):
    """An answer that leaves no mark: nobody can say whose the others are, so there is no mask, and it is said."""
    rows = [{"prompt": [ASK, says(""), ASK], "completion": [says("own"), ASK, says("too")]}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = read_rollout_file(tmp_path / "r.jsonl", byte_tokenizer(MARKED), samples_per="conversation")
    assert file.groups[0].rollouts[0].loss_mask is None
    assert any("have no mask" in note for note in file.notes)


TWICE = MARKED.replace(
    "{%- generation %}",
    "{%- generation %}{{- m.reasoning_content or '' }}{% endgeneration %}{{- '|' }}{%- generation %}",
)


@pytest.mark.parametrize("own", [says("own"), says("own", reasoning_content="thought")], ids=["one", "two"])
def test_as_many_marks_as_answers_by_chance(own, tmp_path):
    """An answer without a mark, and one with two: the marks are not one by one those of the answers."""
    example = [ASK, says(""), ASK, says("example", reasoning_content="why"), ASK]
    (tmp_path / "r.jsonl").write_text(json.dumps({"prompt": example, "completion": [own]}) + "\n")
    rollouts = read_rollout_file(tmp_path / "r.jsonl", byte_tokenizer(TWICE), samples_per="conversation")
    (rollout,) = rollouts.groups[0].rollouts
    # Of one mark it is sure that the last is the last answer's.
    found = None if rollout.loss_mask is None else text_of(rollout.token_ids[rollout.loss_mask])
    assert found == (None if "reasoning_content" in own else "own<|im_end|>")
    row = {"prompt": example[:3], "completion": example[3:4]}
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    file = read_rollout_file(tmp_path / "r.jsonl", byte_tokenizer(TWICE), samples_per="conversation")
    assert file.groups[0].rollouts[0].loss_mask is None


def test_rows_with_values_per_token_know_weights(tmp_path):
    """Where they have no mask of their own, it is that of the template, less answers of weight 0."""
    messages = [ASK, says("no", weight=0), ASK, says("own")]
    tokenizer = byte_tokenizer(MARKED)
    size = len(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])
    (tmp_path / "r.jsonl").write_text(json.dumps({"messages": messages, "old_logprobs": [None] * size}) + "\n")
    (rollout,) = read_rollout_file(tmp_path / "r.jsonl", tokenizer).groups[0].rollouts
    assert text_of(rollout.token_ids[rollout.loss_mask]) == "own<|im_end|>"


def test_what_is_not_in_a_sample_is_counted(tmp_path):
    """Messages after the last turn, conversations without one."""
    path = tmp_path / "r.jsonl"
    rows = [{"messages": MESSAGES[:4]}, {"messages": MESSAGES[:2]}, {"messages": with_strings()}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = read_rollout_file(path, byte_tokenizer())
    assert file.summary == [
        "5 samples of 3 conversations (messages), one per turn",
        "1 messages after the last turn left out",
        "1 conversations without a turn of the assistant: nothing of them is trained",
    ]
    assert not file.groups[0].rollouts[1].loss_mask.any()
    assert [rollout.episode for rollout in file.groups[0].rollouts] == [0, 1, 2, 2, 2] and len(TURNS) == 3
