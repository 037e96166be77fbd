"""How commands read files of others: options, what is said of it, warnings."""

import json
import warnings

import pytest
from support.chat import byte_tokenizer, trie_size, turn_texts
from support.forms import FORMS, MESSAGES, TURNS

from harts_hf.cli.main import main
from harts_hf.errors import HartsWarning
from harts_hf.rollouts.files import read_rollout_rows
from harts_hf.rollouts.recorded_episodes import read_groups


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer and a template."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def rollouts(tmp_path):
    """Three conversations of two tasks, with a column that nobody needs."""
    path = tmp_path / "r.jsonl"
    rows = [{"messages": MESSAGES, "task": {"id": number % 2}} for number in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_was_made_of_conversations_is_said(rollouts, tokenizer, tmp_path, capsys):
    """Samples of conversations, and the column that was ignored, once."""
    assert main(["plan", rollouts, "--tokenizer", tokenizer, "--json", str(tmp_path / "out.json")]) == 0
    captured = capsys.readouterr()
    assert "9 samples of 3 conversations (messages), one per turn" in captured.out
    assert captured.err == (
        f"harts: warning: {rollouts}: keys that are not read: task\n"
        f"harts: {rollouts}: no row says its group, so all 3 rollouts are one group, and one step: "
        "--group-key task.id makes 2 groups\n"
    )
    unique = trie_size([before + own for before, own in turn_texts(MESSAGES, TURNS)])
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["total"]["unique"] == unique and content["total"]["trajectories"] == 9
    assert content["input"] == {"form": "messages", "conversations": 3, "notes": {}}


@pytest.mark.parametrize(
    ("row", "trains"),
    [
        ({"token_ids": [1, 2, 3], "loss_mask": [1, 0, 0]}, False),  # nothing predicts the first token
        ({"token_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, True),
        ({"token_ids": [1, 2, 3]}, True),  # does not say
        ({"parent": [-1], "length": [3], "sample_node": [0], "trained": [[]]}, False),
        ({"parent": [-1], "length": [3], "sample_node": [0], "trained": [[[1, 2]]]}, True),
    ],
)
def test_a_file_that_trains_nothing_says_so(row, trains, tmp_path, capsys):
    """Masks that leave no token, in rollouts and shapes; `harts verify` compares all tokens and passes."""
    (path := tmp_path / "r.jsonl").write_text(f"{json.dumps({'group': 'a', **row})}\n" * 2)
    assert main(["plan", str(path)]) == 0
    assert capsys.readouterr().err.startswith(f"harts: warning: {path}: nothing of it would be trained") != trains


def test_a_recording_without_groups_names_the_likely_key(tmp_path):
    """In Python as on the command line, and the key is not said to be unread beside."""
    rows = [{"token_ids": [1, 2], "loss_mask": [0, 1], "task": number % 2} for number in range(3)]
    (path := tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(HartsWarning) as caught:
        read_groups(path, None, format="auto", samples_per="turn", group_key=None)
    (said,) = (str(one.message) for one in caught)
    assert said.startswith(f"{path}: no row says its group") and "task makes 2 groups (in Python group_key=)" in said


def test_options_of_reading(rollouts, tokenizer, capsys):
    """A sample per conversation, groups by a key; a key that is read is not ignored."""
    options = ["--tokenizer", tokenizer, "--samples-per", "conversation", "--group-key", "task.id"]
    assert main(["plan", rollouts, *options]) == 0
    captured = capsys.readouterr()
    assert "3 samples of 3 conversations (messages), one per conversation" in captured.out and not captured.err
    table = captured.out.split("calls (ends)\n")[1].splitlines()
    assert table[0].split()[:2] == ["0", "2"] and table[1].split()[:2] == ["1", "1"]


@pytest.mark.parametrize(
    ("rows", "hint"),
    [
        # Neither what differs in each row, nor what is equal in all, nor what counts attempts.
        (
            [{"task": n // 2, "instance_id": n, "question": "a", "trial": n % 2} for n in range(4)],
            "task makes 2 groups",
        ),
        ([{"info": {"problem_id": "ab"[n % 2]}} for n in range(3)], "info.problem_id makes 2 groups"),
        ([{"task": 1}, {"task": 2}, {"task": 1}, {}], "KEY names a key of the rows that does"),
        ([{"task": [1]}, {"task": [1]}], "names a key"),
        ([{"episode": 1, "trial": 0}, {"episode": 1, "trial": 0}], None),
        ([{"group": 1, "task": n // 2} for n in range(4)], None),
    ],
)
def test_the_key_that_was_likely_forgotten(rows, hint):
    """Of rows that are one group because none says which it is of; samples of one rollout are no group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HartsWarning)
        file = read_rollout_rows([{"token_ids": [1, 2], **row} for row in rows])
    assert len(file.groups) == 1
    assert file.group_hint is None if hint is None else hint in file.group_hint


def test_one_of_each_is_no_plural(tokenizer, tmp_path, capsys):
    """A file of one conversation with one turn."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES[: TURNS[0] + 1]}))
    assert main(["plan", str(path), "--tokenizer", tokenizer]) == 0
    assert "1 sample of 1 conversation (messages), one per turn" in capsys.readouterr().out


def test_verify_reads_conversations(tokenizer, tmp_path, capsys):
    """With a tokenizer of its own; the draws are of the turns."""
    from support.models import tiny_model

    tiny_model("qwen3_5_text", vocab_size=300).config.save_pretrained(tmp_path / "model")
    path = tmp_path / "r.json"
    path.write_text(json.dumps(FORMS["tau2-bench"].rows[0]))
    options = ["--model", str(tmp_path / "model"), "--tokenizer", tokenizer, "--draws", "1", "--max-tokens", "64"]
    assert main(["verify", str(path), *options, "--no-oracle"]) in (0, 1)
    said = capsys.readouterr().out
    assert f"{path}: 6 samples of 2 conversations (tau2-bench), one per turn; " in said
    assert (
        "2 events left out: tool calls of the user" in said
        and "2 events left out: results of the user's tools" in said
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "line 1: messages need a tokenizer, and none was given: --tokenizer path/to/model (or tokenizer=)"),
        (["--format", "tau-bench"], "line 1: expected traj to be a list, got none; keys are messages, task"),
        (["--group-key", "task"], "line 1: expected group to be a string or an integer, got {'id': 0}"),
    ],
)
def test_what_cannot_be_read_is_a_line(rollouts, tokenizer, capsys, options, message):
    """With the file and the line, without a traceback."""
    given = ["--tokenizer", tokenizer] if options else []
    assert main(["plan", rollouts, *given, *options]) == 2
    assert capsys.readouterr().err == f"harts plan: {rollouts}, {message}\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere.jsonl", None, "nowhere.jsonl: no such file"),
        ("r.csv", "a,b", "r.csv: expected a rollout file"),
        ("r.jsonl", '{"text": "a"}', "line 1: expected a row that holds"),
        ("r.jsonl", '{"messages": []}', "line 1: expected messages to be a non-empty list of objects"),
    ],
)
@pytest.mark.parametrize("command", [["plan"], ["verify", "--model", "."]])
def test_files_are_looked_at_first(tmp_path, capsys, command, name, content, message):
    """Before tokenizers and weights, which here are not even there."""
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main([*command, str(tmp_path / name), "--tokenizer", "nowhere"]) == 2
    assert message in capsys.readouterr().err
