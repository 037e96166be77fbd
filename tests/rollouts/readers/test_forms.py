"""The same conversation in every form: samples, masks, groups, rewards and sharing as counted without the reader."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support.chat import byte_tokenizer, count, text_of, trie_size, turn_texts, written
from support.forms import FORMS

from harts_hf.rollouts.files import read_rollout_file

CASES = pytest.mark.parametrize("name", FORMS)


def write(path, rows):
    """The rows as the suffix says."""
    if ".jsonl" in path.name:
        content = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        content = json.dumps(rows[0] if len(rows) == 1 else rows)
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(content.encode())
    return path


def check(file, form, stem):
    """The samples are those of an independent count."""
    expected = turn_texts(form.messages, form.turns)
    (group,) = file.groups
    assert group.name == (stem if form.group is None else form.group)
    assert len(group.rollouts) == form.conversations * len(expected)
    assert file.num_conversations == form.conversations
    for number, rollout in enumerate(group.rollouts):
        before, own = expected[number % len(expected)]
        assert text_of(rollout.token_ids) == before + own
        assert rollout.loss_mask.tolist() == [False] * count(before) + [True] * count(own)
        assert rollout.reward == form.reward and rollout.episode == number // len(expected)
    assert group.tree.num_tokens == trie_size([before + own for before, own in expected])


@CASES
@pytest.mark.parametrize(
    "suffix", [".jsonl", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (".json", ".jsonl.gz", ".traj"))]
)
def test_samples_of_each_form(tmp_path, name, suffix):
    """A sample per turn: what the template writes for the messages before, and the turn; only the turn is trained."""
    file = read_rollout_file(write(tmp_path / f"r{suffix}", FORMS[name].rows), byte_tokenizer())
    assert file.form == name.split(":")[0]
    check(file, FORMS[name], "r")


# The others have contents of several types, which do not go into one column.
IN_PARQUET = [
    *(
        "messages",
        "messages: JSON strings and nulls",
        "messages: flat calls",
        "messages: one text",
        "requests",
        "mini-swe-agent",
    ),
    *("nemo-gym: input and output", "tau-bench", "tau2-bench", "swe-agent", "prompt-completion"),
    *("openhands: SDK", "prompt-completion: JSON"),
]


@pytest.mark.parametrize("name", IN_PARQUET)
def test_parquet_of_each_form(tmp_path, name):
    """Parquet, whose objects have the fields of all, gives the same; arguments of calls are written as JSON."""

    def kept(value, key=None):
        if key == "arguments" and isinstance(value, dict):
            return json.dumps(value)
        if isinstance(value, dict):
            return {k: kept(v, k) for k, v in value.items() if v not in ({}, [])}
        return [kept(entry) for entry in value] if isinstance(value, list) else value

    table = pyarrow.Table.from_pylist([kept(row) for row in FORMS[name].rows])
    pyarrow.parquet.write_table(table, tmp_path / "r.parquet")
    (tmp_path / "r.parquet.gz").write_bytes(gzip.compress((tmp_path / "r.parquet").read_bytes()))
    for suffix in ("parquet", "parquet.gz"):
        check(read_rollout_file(tmp_path / f"r.{suffix}", byte_tokenizer()), FORMS[name], "r")


@CASES
def test_a_sample_per_conversation(tmp_path, name):
    """One sample of all messages, or of each request's; the mask shows the turns, and those that were sampled only."""
    form = FORMS[name]
    file = read_rollout_file(write(tmp_path / "r.jsonl", form.rows), byte_tokenizer(), samples_per="conversation")
    rollouts = [rollout for rollout in file.groups[0].rollouts if rollout.episode == 0]
    is_requests = len(rollouts) > 1
    assert len(file.groups[0].rollouts) == form.conversations * (len(form.turns) if is_requests else 1)
    for number, rollout in enumerate(rollouts):
        turns = form.turns[number : number + 1] if is_requests else form.turns
        text, places = written(form.messages[: turns[-1] + 1] if is_requests else form.messages)
        mask = np.zeros(len(text), bool)
        for turn in turns:
            start, end = places[turn]
            opening = "<|im_start|>assistant\n<think>"
            mask[start + len(opening if text.startswith(opening, start) else opening[: -len("<think>")]) : end - 1] = (
                True
            )
        assert text_of(rollout.token_ids) == text
        assert text_of(rollout.token_ids[rollout.loss_mask]) == "".join(np.array(list(text))[mask])
        assert rollout.loss_mask.sum() == count("".join(np.array(list(text))[mask]))


@CASES
def test_format_by_name(tmp_path, name):
    """``--format`` says what is otherwise recognised."""
    path, form = write(tmp_path / "r.jsonl", FORMS[name].rows), name.split(":")[0]
    file = read_rollout_file(path, byte_tokenizer(), format=form)
    other = read_rollout_file(path, byte_tokenizer())
    for mine, theirs in zip(file.groups[0].rollouts, other.groups[0].rollouts, strict=True):
        assert np.array_equal(mine.token_ids, theirs.token_ids)
