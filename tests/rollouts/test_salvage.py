"""What was collected before a failure lies on disk, as a file that the package reads."""

import json

import numpy as np
import pytest

from harts_hf.cli.main import main
from harts_hf.rollouts.files import read_rollouts
from harts_hf.rollouts.salvage import rollout_row, save_rows, saved_on_failure

ROWS = [
    rollout_row("p", [5, 6], [7, 8, 9], env_mask=[1, 0, 1], logprobs=[-0.5, 0.0, -0.25], reward=1),
    rollout_row("p", [5, 6], [7], logprobs=[np.float32(-0.5)], reward=np.float64(0.5)),
    rollout_row(3, [4], [np.int64(2)]),
]


def test_rows_come_back(tmp_path):
    """Tokens, masks, log-probs and rewards, by group."""
    path = save_rows(ROWS, tmp_path / "new" / "folder", "step-3")
    assert path == tmp_path / "new" / "folder" / "step-3.jsonl" and len(list(path.parent.iterdir())) == 1
    first, second = read_rollouts(path)
    assert (first.name, second.name) == ("p", "3")
    rollout = first.rollouts[0]
    assert rollout.token_ids.tolist() == [5, 6, 7, 8, 9] and rollout.reward == 1.0
    assert rollout.loss_mask.tolist() == [False, False, True, False, True]
    assert rollout.old_logprobs.tolist() == [0, 0, -0.5, 0, -0.25]
    assert first.rollouts[1].loss_mask.tolist() == [False, False, True]
    assert second.rollouts[0].reward is None and second.rollouts[0].old_logprobs is None


def test_harts_plan_reads_it(tmp_path, capsys):
    """As any rollout file."""
    assert main(["plan", str(save_rows(ROWS, tmp_path, "rows"))]) == 0
    assert "p" in capsys.readouterr().out


def test_no_file_is_written_over(tmp_path):
    """A second one of the same name gets a number."""
    paths = [save_rows(ROWS[:count], tmp_path, "rows") for count in (1, 2, 3)]
    assert [path.name for path in paths] == ["rows.jsonl", "rows-2.jsonl", "rows-3.jsonl"]
    assert [len(path.read_text().splitlines()) for path in paths] == [1, 2, 3]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_failure_saves_and_is_raised(tmp_path, kind):
    """What was there at the failure; the exception names the file. Interruptions, too."""
    collected = []
    with pytest.raises(kind) as error, saved_on_failure(lambda: collected, tmp_path, "step-3"):
        collected.extend(ROWS[:2])
        raise kind("broken")
    path = tmp_path / "step-3.jsonl"
    assert error.value.__notes__ == [f"What was collected before (2 rollouts) is in {path}"]
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS[:2]


def test_without_a_failure_nothing_is_written(tmp_path):
    """Nor with nothing collected."""
    with saved_on_failure(lambda: ROWS, tmp_path / "none", "rows"):
        pass
    with pytest.raises(ValueError) as error, saved_on_failure(list, tmp_path / "none", "rows"):
        raise ValueError("broken")
    assert not hasattr(error.value, "__notes__") and not (tmp_path / "none").exists()


def test_what_cannot_be_saved_hides_nothing(tmp_path):
    """The block's exception stays; the note says why there is no file."""
    (tmp_path / "file").write_text("")
    broken = [{**ROWS[0], "reward": float("nan")}]
    for rows, folder, said in [
        (lambda: ROWS, tmp_path / "file", "could not be saved: (FileExists|NotADirectory)Error"),
        (lambda: broken, tmp_path, "could not be saved: ValueError"),
        (lambda: [{"tokens": [1]}], tmp_path, "could not be saved: ValueError: unknown key 'tokens'"),
        (lambda: 1 / 0, tmp_path, "could not be saved: ZeroDivisionError"),
    ]:
        with pytest.raises(LookupError, match="the block's") as error, saved_on_failure(rows, folder, "rows"):
            raise LookupError("the block's")
        assert len(error.value.__notes__) == 1
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(error.value.__notes__[0])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lists_that_do_not_fit():
    """Named with their lengths; no rows are no file."""
    with pytest.raises(
        ValueError, match="expected 2 entries of env_mask and of logprobs, one per token, got 1 and none"
    ):
        rollout_row("p", [1], [2, 3], env_mask=[1])
    with pytest.raises(ValueError, match="got 2 and 3"):
        rollout_row("p", [1], [2, 3], logprobs=[0, 0, 0])
    with pytest.raises(ValueError, match="at least one row, got none"):
        save_rows([], "nowhere", "rows")
