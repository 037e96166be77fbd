"""Which form a file has, whose group a row is, which rollout of it."""

import json

import pytest
from support.chat import byte_tokenizer, text_of
from support.forms import FORMS, MESSAGES

from harts_hf.errors import RolloutFileError
from harts_hf.rollouts.files import read_rollout_file
from harts_hf.rollouts.readers import FORMS as KNOWN
from harts_hf.rollouts.readers import form_of_name


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_form_is_tested():
    """A new form has to be written by ``support.forms``."""
    assert {form.name for form in KNOWN} == {name.split(":")[0] for name in FORMS} | {"rollouts", "shapes"}


def test_an_unknown_form_names_what_was_looked_for_and_what_came(tmp_path):
    """Each form by what it is recognised by, and the keys of the row."""
    with pytest.raises(RolloutFileError) as error:
        read_rollout_file(written(tmp_path / "r.jsonl", {"query": "x", "answers\x1b": []}))
    text = str(error.value)
    assert "line 1: expected a row that holds token_ids or messages" in text
    assert text.endswith("got the keys query, answers\\x1b")
    assert all(f"({form.name})" in text for form in KNOWN if form.name not in ("rollouts", "messages"))


def test_an_unknown_name(tmp_path):
    """The known ones are listed."""
    with pytest.raises(ValueError, match=r"expected a format of rollouts, shapes, .*, got 'xml'"):
        form_of_name("xml")
    with pytest.raises(ValueError, match="expected samples per turn or conversation, got 'row'"):
        read_rollout_file(written(tmp_path / "r.jsonl", {"token_ids": [1]}), samples_per="row")


def test_a_form_that_is_named_is_demanded(tmp_path):
    """A row of another form is an error of its line."""
    path = written(tmp_path / "r.jsonl", {"messages": MESSAGES})
    for form in ("tau-bench", "swe-agent", "sharegpt", "openhands", "nemo-gym", "tau2-bench", "prompt-completion"):
        with pytest.raises(RolloutFileError, match="line 1: expected"):
            read_rollout_file(path, byte_tokenizer(), format=form)


@pytest.mark.parametrize("content", [MESSAGES, [MESSAGES[:3], MESSAGES[:5], MESSAGES]], ids=["one", "a list each"])
def test_lists_alone(tmp_path, content):
    """A list of messages is a conversation; a list of such lists its requests, in JSON and in a line."""
    (tmp_path / "r.json").write_text(json.dumps(content))
    written(tmp_path / "r.jsonl", content)
    for name in ("r.json", "r.jsonl"):
        file = read_rollout_file(tmp_path / name, byte_tokenizer())
        rollouts = file.groups[0].rollouts
        assert file.num_conversations == 1 and [rollout.episode for rollout in rollouts] == [0, 0, 0]
        assert [text_of(r.token_ids[r.loss_mask])[-12:] for r in rollouts] == [
            *("depth=2;)<|im_end|>"[-12:], "es.<|im_end|>"[-12:], "ye.<|im_end|>"[-12:])
        ]


def test_a_file_without_groups_is_one(tmp_path):
    """It has the file's name; groups in some rows only are an error of the row."""
    path = written(tmp_path / "my.run.jsonl", {"token_ids": [1]}, {"token_ids": [2]})
    (group,) = read_rollout_file(path).groups
    assert group.name == "my.run" and len(group.rollouts) == 2
    path = written(tmp_path / "r.jsonl", {"token_ids": [1]}, {"token_ids": [2], "group": "a"})
    with pytest.raises(RolloutFileError, match="line 2: expected no group, as in the rows before, got 'a'"):
        read_rollout_file(path)
    path = written(tmp_path / "r.jsonl", {"token_ids": [1], "group": "a"}, {"token_ids": [2]})
    with pytest.raises(RolloutFileError, match="line 2: expected group to be a string or an integer, got None"):
        read_rollout_file(path)


def test_group_keys(tmp_path):
    """Of the row, or of objects in it; it wins over what the form has; a row without it is an error."""
    rows = [{"messages": MESSAGES, "task": {"id": number % 2, "a.b": "x"}} for number in range(3)]
    path = written(tmp_path / "r.jsonl", *rows)
    groups = read_rollout_file(path, byte_tokenizer(), group_key="task.id").groups
    assert [(group.name, len(group.rollouts)) for group in groups] == [("0", 6), ("1", 3)]
    with pytest.raises(RolloutFileError, match=r"line 1: expected the group key 'task\.name', got none"):
        read_rollout_file(path, byte_tokenizer(), group_key="task.name")
    with pytest.raises(RolloutFileError, match=r"line 1: expected group to be a string or an integer, got \{'id'"):
        read_rollout_file(path, byte_tokenizer(), group_key="task")
    with pytest.raises(RolloutFileError, match="keys are group, token_ids; rows say their group by"):
        read_rollout_file(written(tmp_path / "own.jsonl", {"group": 1, "token_ids": [1, 2]}), group_key="task")
    path = written(tmp_path / "t.jsonl", *FORMS["tau2-bench"].rows)
    groups = read_rollout_file(path, byte_tokenizer(), group_key="trial").groups
    assert [group.name for group in groups] == ["0", "1"]
    assert [g.name for g in read_rollout_file(path, byte_tokenizer(), group_key="timestamp").groups] == ["t"]


def test_episodes(tmp_path):
    """Given by the rows, or one per conversation; rows of tokens without one have none."""
    rows = [{"token_ids": [1, 2], "episode": e} for e in ("a", 3, None)]
    rollouts = read_rollout_file(written(tmp_path / "r.jsonl", *rows)).groups[0].rollouts
    assert [rollout.episode for rollout in rollouts] == ["a", 3, None]
    rows = [{"messages": MESSAGES[:3], "episode": "x"}, {"messages": MESSAGES[:5], "episode": "x"}]
    rollouts = read_rollout_file(written(tmp_path / "m.jsonl", *rows), byte_tokenizer()).groups[0].rollouts
    assert [rollout.episode for rollout in rollouts] == ["x"] * 3
    with pytest.raises(RolloutFileError, match="expected episode to be a string or an integer, got True"):
        read_rollout_file(written(tmp_path / "e.jsonl", {"token_ids": [1], "episode": True}))


def test_rows_with_values_per_token_are_one_sample(tmp_path):
    """A mask is of the whole conversation; beside requests it means nothing."""
    size = len(
        read_rollout_file(
            written(tmp_path / "r.jsonl", {"messages": MESSAGES}), byte_tokenizer(), samples_per="conversation"
        )
        .groups[0]
        .rollouts[0]
        .token_ids
    )
    row = {"messages": MESSAGES, "loss_mask": [0] * (size - 1) + [1], "advantage": [0.5] * size}
    (rollout,) = read_rollout_file(written(tmp_path / "r.jsonl", row), byte_tokenizer()).groups[0].rollouts
    assert rollout.loss_mask.sum() == 1 and rollout.advantage.shape == (size,)
    row = {"messages": MESSAGES, "advantage": -1}
    rollouts = read_rollout_file(written(tmp_path / "r.jsonl", row), byte_tokenizer()).groups[0].rollouts
    assert [rollout.advantage for rollout in rollouts] == [-1.0] * 3


def test_plain_prompts_and_completions(tmp_path):
    """Texts have no template; what is trained is the completion."""
    rows = [{"prompt": "Q: é ", "completion": "A: b", "group": "g", "reward": 1}]
    file = read_rollout_file(written(tmp_path / "r.jsonl", *rows), byte_tokenizer())
    (rollout,) = file.groups[0].rollouts
    assert file.form == "prompt-completion" and text_of(rollout.token_ids) == "Q: é A: b"
    assert rollout.loss_mask.tolist() == [False] * 6 + [True] * 4 and rollout.reward == 1.0


def test_examples_of_a_prompt_are_not_sampled(tmp_path):
    """Answers in a prompt are context, in SWE-agent's demonstrations and tau2's greeting as well (test_forms)."""
    row = {"prompt": MESSAGES[:5] + MESSAGES[5:6], "completion": "Bye."}
    file = read_rollout_file(written(tmp_path / "r.jsonl", row), byte_tokenizer())
    (rollout,) = file.groups[0].rollouts
    assert text_of(rollout.token_ids[rollout.loss_mask]) == "</think>Bye.<|im_end|>"
