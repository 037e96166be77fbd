"""Files that are no conversations: each is an error of that file and line, and none ends in another way."""

import copy
import gzip
import json

import pytest
from support.chat import byte_tokenizer
from support.forms import FORMS, MESSAGES

from harts_hf.errors import HartsWarning, RolloutFileError
from harts_hf.rollouts import rows
from harts_hf.rollouts.files import read_rollout_file


def paths(value, path=()):
    """The paths to all values within a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from paths(entry, (*path, key))


def replaced(value, path, new):
    """A copy of a value with another one at the end of a path."""
    twin = copy.deepcopy(value)
    place = twin
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return twin


@pytest.mark.filterwarnings("ignore::harts_hf.errors.HartsWarning")
@pytest.mark.essential("messages", "tau-bench", "swe-agent")
@pytest.mark.parametrize("name", FORMS)
def test_wrong_types_anywhere(tmp_path, name):
    """Whatever stands in the place of a value: the row is read, or the error names the line."""
    row, tokenizer, path = FORMS[name].rows[0], byte_tokenizer(), tmp_path / "r.jsonl"
    errors = 0
    places = list(paths(row))
    for number, place in enumerate(places[:: 1 + len(places) // 80]):
        # Each value has its turn in some places; all of them in all would take minutes.
        new = (None, 7, "text", [], {}, [{}], [[]], True, 1e400, "\ud800")[(number + len(name)) % 10]
        path.write_text(json.dumps(replaced(row, place, new)) + "\n")
        try:
            read_rollout_file(path, tokenizer, format=name.split(":")[0])
        except RolloutFileError as error:
            errors += 1
            assert str(error).startswith(f"{path}, line 1: ") or "at least one trajectory" in str(error)
    assert errors > 0 or len(places) < 10


@pytest.mark.parametrize("name", FORMS)
def test_nulls_in_the_place_of_anything(tmp_path, name):
    """A null key of a row is as an absent one."""
    row = FORMS[name].rows[0]
    if name.startswith("swe-agent"):
        row = {**row, "instance_id": None}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**row, "group_of_nobody": None, "reward": None}) + "\n")
    file = read_rollout_file(path, byte_tokenizer())
    assert file.form == name.split(":")[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.json", b'{"messages": [', "expected a JSON object, got invalid JSON"),
        ("r.traj", b"", "expected at least one trajectory, got an empty file"),
        ("r.json", b"[]", "expected a JSON object, got list"),
        ("r.json", b"[1, 2]", "expected a JSON object, got list of other things"),
        ("r.json", b"null", "expected a JSON object, got NoneType"),
        ("r.json", b'"text"', "expected a JSON object, got str"),
        ("r.json", b'{"messages": "\xff"}', "expected text in UTF-8, got another encoding"),
        ("r.json", b'{"messages": []}\n{"messages": []}', r"Extra data.*several JSON values are a .jsonl file"),
        ("r.json", b"[" * 10**5, "expected a JSON object, got invalid JSON"),
        ("r.jsonl", b'{"messages": []}', "line 1: expected messages to be a non-empty list of objects, got"),
        ("r.jsonl", b'[{"role": "user"}, 1]', "line 1: expected a JSON object, got list of other things"),
        ("r.json.gz", b"{}", "expected a whole gzip file"),
        ("r.traj.gz", gzip.compress(b'{"history": []}' * 99, mtime=0)[:-9], "expected a whole gzip file"),
        ("r.parquet.gz", gzip.compress(b"{}", mtime=0), "after row 0: expected a Parquet file"),
        ("r.txt", b"{}", r"expected a rollout file"),
        ("r.json", b'{"simulations": []}', r"at least one trajectory, got no conversation \(tau2-bench\)"),
        ("r.json", b'{"simulations": [{}]}', "document: simulation 1: expected messages to be a list, got none"),
        ("r.json", b'{"eval": {}, "samples": [{"messages": 1}]}', "sample 1: expected messages to be a list, got 1"),
        ("r.jsonl", b'{"conversations": [{"from": "alien", "value": "x"}]}', "message 1: expected from to be one of"),
        ("r.jsonl", b'{"conversations": [{"from": "gpt", "value": 1}]}', "message 1: expected value to be a text"),
        ("r.jsonl", b'{"prompt": "a", "completion": ""}', "expected a completion of at least one character"),
        ("r.jsonl", b'{"prompt": "a", "completion": [{"role": "user"}]}', "expected prompt to be messages"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    """Truncated, empty, of another encoding or type."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RolloutFileError, match=message):
        read_rollout_file(tmp_path / name, byte_tokenizer())


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.json.gz", "bomb.parquet.gz", "bomb.jsonl"])
def test_what_unfolds_to_too_much(tmp_path, monkeypatch, name):
    """A value ends somewhere, however small its file; a whole file does, too."""
    monkeypatch.setattr(rows, "MAX_VALUE_BYTES", 10_000)
    content = b" " * 10**6
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(RolloutFileError, match=r"expected (lines of )?at most 10,000 bytes"):
        read_rollout_file(tmp_path / name, byte_tokenizer())
    monkeypatch.setattr(rows, "MAX_FILE_BYTES", 20_000)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(b"\n" * 10**6))
    with pytest.raises(RolloutFileError, match=r"line 20001: expected lines of at most .* and 20,000 in all"):
        read_rollout_file(tmp_path / "lines.jsonl.gz", byte_tokenizer())


def test_a_broken_line_is_named_by_number(tmp_path):
    """Of conversations, too; and the message in it."""
    path = tmp_path / "r.jsonl"
    broken = replaced(MESSAGES, (3, "role"), "alien")
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (MESSAGES, MESSAGES, broken)))
    with pytest.raises(RolloutFileError, match=r"line 3: message 4 \(role 'alien'\): its content left no token"):
        read_rollout_file(path, byte_tokenizer())


def test_lone_surrogates_are_named(tmp_path):
    """No tokenizer takes them."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": replaced(MESSAGES, (1, "content"), "a\ud800b")}) + "\n")
    with pytest.raises(RolloutFileError, match=r"line 1: expected messages of valid Unicode, got '\\ud800'"):
        read_rollout_file(path, byte_tokenizer())


def test_columns_of_others_are_ignored_with_one_warning(tmp_path):
    """All of them in one, by their names, whatever form; a slip for a key of ours is an error."""
    path = tmp_path / "r.jsonl"
    rows_of_file = [{"messages": MESSAGES, "zone": 1, "alpha\x1b[31m": 2}, {"messages": MESSAGES, "beta": [3]}]
    rows_of_file.append({"token_ids": [1, 2, 3]})  # ours, and read
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))
    with pytest.warns(HartsWarning) as caught:
        read_rollout_file(path, byte_tokenizer())
    assert [str(w.message) for w in caught] == [f"{path}: keys that are not read: alpha\\x1b[31m, beta, zone"]
    path.write_text('{"token_ids": [1], "advantages": 1}\n')
    with pytest.raises(RolloutFileError, match=r"unknown key 'advantages'; known are .* meant to be 'advantage'\?"):
        read_rollout_file(path)
