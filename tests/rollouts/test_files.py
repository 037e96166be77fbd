"""Rollout files: what is read, and that every broken line is named by its number."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from shared_data import SHAPE_NAMES, shape_file, shape_trees

from harts_hf.errors import RolloutFileError
from harts_hf.rollouts.files import read_rollouts

ROWS = [
    {"group": "a", "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "advantage": 0.5, "reward": 1},
    {"group": 7, "token_ids": [4]},
    {"group": "a", "token_ids": [1, 2], "advantage": [0, 1.5], "old_logprobs": [0, -0.25]},
]


def write(path, rows):
    """JSON lines; strings are written as they are."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(text)
    return path


def check_rows(groups):
    """The groups of ``ROWS``."""
    assert [group.name for group in groups] == ["a", "7"]
    first, second = groups[0].rollouts
    assert first.token_ids.tolist() == [1, 2, 3] and first.loss_mask.tolist() == [False, True, True]
    assert first.advantage == 0.5 and first.reward == 1.0 and first.old_logprobs is None
    assert second.advantage.tolist() == [0, 1.5] and second.old_logprobs.tolist() == [0, -0.25]
    assert second.loss_mask is None and second.reward is None
    assert groups[0].rewards == [1.0, None]
    assert groups[0].tree.num_tokens == 3 and groups[0].tree.end_rows.tolist() == [2, 1]


@pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.jsonl.gz"])
def test_json_lines(tmp_path, name):
    """Rows of a group need not be neighbours; empty lines do not count as rows."""
    check_rows(read_rollouts(write(tmp_path / name, [ROWS[0], "", *ROWS[1:]])))


def test_parquet(tmp_path):
    """Columns that a row leaves null are as absent."""
    rows = [{**row, "group": str(row["group"])} for row in ROWS]
    for row in rows:
        if isinstance(row.get("advantage"), float):
            row["advantage"] = [row["advantage"]] * len(row["token_ids"])
    keys = dict.fromkeys(key for row in rows for key in row)
    table = pyarrow.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "rollouts.parquet")
    groups = read_rollouts(tmp_path / "rollouts.parquet")
    assert groups[0].rollouts[0].advantage.tolist() == [0.5] * 3
    assert groups[0].rollouts[1].old_logprobs.tolist() == [0, -0.25]
    assert groups[1].rollouts[0].loss_mask is None


class Tokenizer:
    """A chat template that writes a token for the role and one a character."""

    chat_template = "{%- for m in messages %}{% generation %}"

    def apply_chat_template(self, messages, *, tools, tokenize, return_dict, return_assistant_tokens_mask):
        """What Transformers' method returns."""
        assert tokenize and return_dict and return_assistant_tokens_mask
        ids, mask = [len(tools or [])], [0]
        for message in messages:
            ids += [1 if message["role"] == "user" else 2, *map(ord, message["content"])]
            mask += [0] + [int(message["role"] == "assistant")] * len(message["content"])
        return {"input_ids": ids, "assistant_masks": mask}


def test_messages(tmp_path):
    """Messages become tokens and the template's assistant mask; a mask in the row wins."""
    row = {"group": "a", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}
    path = write(tmp_path / "r.jsonl", [row, {**row, "tools": [{}], "loss_mask": [1, 0, 0, 0, 0, 0, 1]}])
    first, second = read_rollouts(path, Tokenizer())[0].rollouts
    assert first.token_ids.tolist() == [0, 1, *map(ord, "hi"), 2, *map(ord, "ok")]
    assert first.loss_mask.tolist() == [False] * 5 + [True, True]
    assert second.token_ids[0] == 1 and second.loss_mask.tolist() == [True] + [False] * 5 + [True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"group": "a", "token_ids": [1, 2', "invalid JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ({"token_ids": [1]}, "group to be a string or an integer, got None"),
        ({"group": True, "token_ids": [1]}, "group to be a string or an integer, got True"),
        ({"group": "a"}, "either token_ids or messages"),
        ({"group": "a", "token_ids": [1], "messages": []}, "either token_ids or messages"),
        ({"group": "a", "token_ids": []}, "token_ids of at least one value, got an empty list"),
        ({"group": "a", "token_ids": [1, -5]}, "token ids of at least 0, got -5"),
        ({"group": "a", "token_ids": [1, 2.5]}, "token_ids to be a list of integers, got 2.5 at position 1"),
        ({"group": "a", "token_ids": [1, 3.0]}, "token_ids to be a list of integers, got 3.0 at position 1"),
        ({"group": "a", "token_ids": [1, True]}, "token_ids to be a list of integers, got True at position 1"),
        ({"group": "a", "token_ids": [1, None]}, "token_ids to be a list of integers, got None at position 1"),
        ({"group": "a", "token_ids": [1, "2"]}, "token_ids to be a list of integers, got '2' at position 1"),
        ({"group": "a", "token_ids": [1, [2]]}, r"token_ids to be a list of integers, got \[2\] at position 1"),
        ('{"group": "a", "token_ids": [1, NaN]}', "token_ids to be a list of integers, got nan at position 1"),
        ({"group": "a", "token_ids": [1, 2**31]}, "token ids of at most 2147483647, got 2147483648"),
        ({"group": "a", "token_ids": [1, 2**64]}, "token_ids to be integers of 64 bits, got 18446744073709551616"),
        ('{"group": ' + "[" * 100_000, "invalid JSON"),
        ({"group": "a", "token_ids": [1], "loss_mask": [1.0]}, "loss_mask to be a list of 0 and 1, got 1.0"),
        ({"group": "a", "token_ids": [1], "advantage": [True]}, "advantage to be a list of numbers, got True"),
        (
            {"group": "a", "token_ids": [1], "old_logprobs": ["-1"]},
            "old_logprobs to be a list of numbers and null, got",
        ),
        ({"group": "a", "token_ids": [1], "old_logprobs": [10**400]}, "old_logprobs to be numbers that a float can"),
        ({"group": "a", "token_ids": [1], "reward": 10**400}, "reward to be finite, got 1000"),
        ({"group": "a", "token_ids": [1], "reward": False}, "reward to be a number, got False"),
        ({"group": "a", "token_ids": [[1], [2, 3]]}, "token_ids to be a list of integers"),
        ({"group": "a", "token_ids": "1 2"}, "token_ids to be a list of integers"),
        ({"group": "a", "token_ids": [1, 2], "loss_mask": [1]}, "loss_mask of 2 values, one a token, got 1"),
        ({"group": "a", "token_ids": [1], "loss_mask": [2]}, "loss_mask to hold 0 and 1, got 2"),
        ({"group": "a", "token_ids": [1, 2], "old_logprobs": [-1]}, "old_logprobs of 2 values, one a token, got 1"),
        ('{"group": "a", "token_ids": [1, 2], "old_logprobs": [0, -Infinity]}', "old_logprobs to be finite, got -inf"),
        ('{"group": "a", "token_ids": [1], "advantage": NaN}', "advantage to be finite, got nan"),
        ({"group": "a", "token_ids": [1, 2], "advantage": [1]}, "advantage of 2 values"),
        ({"group": "a", "token_ids": [1], "advantage": "high"}, "advantage to be a number, got 'high'"),
        ({"group": "a", "token_ids": [1], "reward": [1]}, r"reward to be a number, got \[1\]"),
        (
            {"group": "a", "token_ids": [1], "old_logprob": [0]},
            "unknown key 'old_logprob'; known are group, token_ids",
        ),
        ({"group": "a", "messages": [{"role": "user"}]}, "messages need a tokenizer"),
        ({"group": "a", "parent": [-1], "length": [1], "sample_node": [0]}, "rollouts only or shapes only"),
    ],
)
def test_broken_line_is_named(tmp_path, row, message):
    """The message says the file, the line and what was expected."""
    path = write(tmp_path / "rollouts.jsonl", [ROWS[0], "", row])
    with pytest.raises(RolloutFileError, match=rf"rollouts\.jsonl, line 3: .*{message}"):
        read_rollouts(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"parent": [-1]}, "none of length, sample_node"),
        ({"parent": [-1], "length": [1], "sample_node": [3]}, "sample_node in"),
        ({"parent": [-1], "length": [1], "sample_node": [0], "reward": [1, 2]}, "reward to be a list of 1 values"),
        ({"parent": [-1], "length": [1], "sample_node": [0], "trained": [[[0, 2]]]}, "within 1 tokens"),
        ({"parent": [-1], "length": [1], "sample_node": [0], "rewards": [1]}, "unknown key 'rewards'"),
        ({"parent": [-1], "length": [True], "sample_node": [0]}, "length to be a list of integers, got True"),
        ({"parent": -1, "length": [1], "sample_node": [0]}, "parent to be a list of integers, got -1"),
        ({"parent": [-1], "length": [2.0], "sample_node": [0]}, "length to be a list of integers, got 2.0"),
        ({"parent": [-1], "length": [1], "sample_node": [0], "reward": 0}, "reward to be a list of 1 values"),
        ({"parent": [-1], "length": [1], "sample_node": [0], "trained": [3]}, "trained spans .* got 3"),
        ({"parent": [-1], "length": [2], "sample_node": [0], "trained": [[0, 1]]}, "trained spans .* got 0"),
        ({"parent": [-1], "length": [2], "sample_node": [0], "trained": [[[0.5, 1]]]}, r"trained spans .* got \[0.5"),
    ],
)
def test_broken_shape_is_named(tmp_path, row, message):
    """Shape files are held to the same strictness."""
    path = write(tmp_path / "shapes.jsonl", [{"group": "a", **row}])
    with pytest.raises(RolloutFileError, match=rf"line 1: .*{message}"):
        read_rollouts(path)


def test_broken_row_of_parquet_is_named(tmp_path):
    """Parquet has rows, not lines."""
    rows = [{"group": "a", "token_ids": [1]}, {"group": "a", "token_ids": [-1]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    with pytest.raises(RolloutFileError, match=r"row 2: expected token ids of at least 0"):
        read_rollouts(tmp_path / "r.parquet")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pyarrow.array([["1"]]), "token_ids to be a list of integers, got '1'"),
        (pyarrow.array([[1.0]]), "token_ids to be a list of integers, got 1.0"),
        (pyarrow.array([[True]]), "token_ids to be a list of integers, got True"),
        (pyarrow.array([[1, None]]), "token_ids to be a list of integers, got None at position 1"),
        (pyarrow.array([1]), "token_ids to be a list of integers, got 1"),
        (pyarrow.array([b"1"]), "token_ids to be a list of integers, got b'1'"),
    ],
)
def test_columns_of_a_wrong_type_are_named(tmp_path, column, message):
    """Parquet brings its own types; only lists of integers are token ids."""
    pyarrow.parquet.write_table(pyarrow.table({"group": ["a"], "token_ids": column}), tmp_path / "r.parquet")
    with pytest.raises(RolloutFileError, match=rf"r\.parquet, row 1: expected {message}"):
        read_rollouts(tmp_path / "r.parquet")


def test_damaged_files_are_named(tmp_path):
    """A file cut short, or of another format than its name says, is an error of that file."""
    rows = [{"group": "a", "token_ids": np.random.default_rng(0).integers(0, 9, 500).tolist()}] * 2
    whole = write(tmp_path / "whole.jsonl.gz", rows).read_bytes()
    for name, content, message in (
        ("short.jsonl.gz", whole[:-9], "after line [0-2]: expected a whole gzip file"),
        ("changed.jsonl.gz", whole[:60] + bytes(40) + whole[100:], "after line [0-2]: expected a whole gzip file"),
        ("text.jsonl.gz", b"{}", "after line 0: expected a whole gzip file"),
        ("text.parquet", b"{}", "after row 0: expected a Parquet file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RolloutFileError, match=rf"{name}, {message}"):
            read_rollouts(tmp_path / name)


def test_files_that_cannot_be_read(tmp_path):
    """No file, an empty file, another suffix."""
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path / "none.jsonl")
    with pytest.raises(RolloutFileError, match="empty file"):
        read_rollouts(write(tmp_path / "empty.jsonl", [""]))
    with pytest.raises(RolloutFileError, match=r"expected a rollout file .* got a folder; each row holds"):
        read_rollouts(tmp_path)
    with pytest.raises(RolloutFileError, match=r"expected a rollout file \(\.jsonl, .* got \.txt; each row holds"):
        read_rollouts(write(tmp_path / "rollouts.txt", ROWS))


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_real_shapes(name):
    """Shape files give the same trees as their arrays, and a mask of the trained spans a trajectory."""
    groups = read_rollouts(shape_file(name))
    for group, tree in zip(groups, shape_trees(name), strict=True):
        assert np.array_equal(group.tree.parent, tree.parent) and np.array_equal(group.tree.end_rows, tree.end_rows)
        for rollout, length in zip(group.rollouts, tree.trajectory_lengths, strict=True):
            assert rollout.loss_mask is None or len(rollout.loss_mask) == length
