"""Episodes as a rollout function returns them: what is completed, what is trained, what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts_hf.rollouts.checks import check_rollouts
from harts_hf.rollouts.episodes import read_episodes, without_absent

END = 9


def rollouts(rows, episode, **more):
    """Rows of (prompt, completion, mask)."""
    prompts, completions, masks = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "env_mask": masks,
        "logprobs": [[-1.0] * len(ids) for ids in completions],
        "episode": episode,
        **more,
    }


def test_an_episode_without_a_sample_has_one_row_of_which_nothing_is_trained():
    """In its place among the others, whose rows stay together and in order."""
    rows = [([1, 2], [3], [1]), ([1, 2, 3], [4, 5], [0, 1]), ([6], [7], [1])]
    found, episodes = read_episodes(rollouts(rows, [1, 1, 3], reward=[0, 1, 2, 3]), 4, END)
    assert episodes.index.tolist() == [0, 1, 1, 2, 3]
    assert episodes.is_empty.tolist() == [True, False, True, False]
    assert episodes.counts.tolist() == [1, 2, 1, 1]
    assert episodes.last_rows == [0, 2, 3, 4]
    assert episodes.of_each("abcde") == [["a"], ["b", "c"], ["d"], ["e"]]
    assert found["prompt_ids"] == [[END], [1, 2], [1, 2, 3], [END], [6]]
    assert found["completion_ids"] == [[END], [3], [4, 5], [END], [7]]
    assert found["env_mask"] == [[0], [1], [0, 1], [0], [1]]
    assert found["logprobs"] == [[0.0], [-1.0], [-1.0, -1.0], [0.0], [-1.0]]
    assert found["reward"] == [0, 1, 2, 3] and "episode" not in found


def test_a_mask_that_was_not_given_is_added_only_where_it_is_needed():
    """Without empty episodes and recurrences the trainer's batch has no mask, as in TRL."""
    rows = [([1], [2], None), ([1, 3], [2, 4], None)]
    plain = rollouts(rows, [0, 1])
    del plain["env_mask"]
    assert "env_mask" not in read_episodes(plain, 2, END)[0]
    assert read_episodes(plain, 3, END)[0]["env_mask"] == [[1], [1, 1], [0]]


def test_a_sampled_token_is_trained_where_it_comes_first():
    """It recurs as history of a later sample, which split it into prompt and completion elsewhere."""
    rows = [
        ([1, 2], [3, 4, 5], [1, 0, 1]),  # 3 and 5 are trained here
        ([1], [2, 3, 4, 5, 6], [0, 1, 1, 1, 1]),  # 4 was not the policy's above: here it is said to be
        ([1, 2], [3, 9], [1, 1]),
        ([1, 3], [4, 5], [1, 1]),  # the same tokens after another history
    ]
    found, _ = read_episodes(rollouts(rows, [0, 0, 0, 0]), 1, END)
    assert found["env_mask"] == [[1, 0, 1], [0, 0, 1, 0, 1], [0, 1], [1, 1]]
    other, _ = read_episodes(rollouts(rows, [0, 1, 2, 3]), 4, END)
    assert other["env_mask"] == [mask for _, _, mask in rows]


def test_exact_masks_are_left_as_they_are():
    """Two independent draws that coincide are both trained, where whoever drew them says so."""
    rows = [([1], [2, 3], [1, 1]), ([1], [2, 4], [1, 1])]
    found, _ = read_episodes(rollouts(rows, [0, 0], exact_env_mask=True), 1, END)
    assert found["env_mask"] == [[1, 1], [1, 1]] and "exact_env_mask" not in found
    assert read_episodes(rollouts(rows, [0, 0], exact_env_mask=False), 1, END)[0]["env_mask"] == [[1, 1], [0, 1]]


@given(st.data())
def test_trained_once_against_a_set_of_histories(data):
    """Against a set of (history, token) per episode, on random rows of few tokens."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    rows = []
    for _ in range(data.draw(st.integers(1, 6))):
        completion = data.draw(tokens)
        mask = data.draw(st.lists(st.integers(0, 1), min_size=len(completion), max_size=len(completion)))
        rows.append((data.draw(tokens), completion, mask))
    index = sorted(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    found, episodes = read_episodes(rollouts(rows, index), 3, END)
    seen, expected = set(), []
    for number, (prompt, completion, mask) in zip(index, rows, strict=True):
        row = []
        for position, trained in enumerate(mask):
            key = (number, tuple(prompt + completion[: position + 1]))
            row.append(int(trained and key not in seen))
            if trained:
                seen.add(key)
        expected.append(row)
    fillers = [number for number in range(3) if number not in index]
    kept = [mask for mask, number in zip(found["env_mask"], episodes.index, strict=True) if number not in fillers]
    assert kept == expected


ROW = ([1], [2], [1])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (rollouts([ROW, ROW], [1, 0]), "in the order of the prompts, got episode 0 after 1 in row 1"),
        (rollouts([ROW, ROW], [0, 2]), r"in \[0, 2\), got 2 in row 1"),
        (rollouts([ROW], [-1]), "got -1 in row 0"),
        (rollouts([ROW], [0.0]), "got 0.0 in row 0"),
        (rollouts([ROW], [True]), "got True in row 0"),
        (rollouts([ROW], "0"), "a list of indices"),
        (rollouts([ROW, ROW], [0]), "1 rows, as many as 'episode' has entries, got 2 in 'prompt_ids'"),
        (rollouts([ROW, ROW, ROW], [0, 0, 1], reward=[1, 2, 3]), "'reward' to have 2 entries, one per episode"),
        (rollouts([ROW], [0], samples=[[], []]), "no samples beside 'episode'"),
        (rollouts([ROW], [0], advantages=[[1.0, 2.0]]), r"advantages\[0\] to have 1 entries"),
        (rollouts([ROW], [0], exact_env_mask="yes"), "'exact_env_mask' to be true or false"),
        ({**rollouts([ROW], [0], exact_env_mask=True), "env_mask": None}, "'env_mask' where 'exact_env_mask' is set"),
        ({**rollouts([ROW], [0]), "logprobs": [None]}, r"logprobs\[0\] to be a list of 1 entries"),
        ({**rollouts([ROW] * 3, None)}, "the key 'episode'"),
        ({**rollouts([ROW, ROW], None), "absent": [True]}, "'absent' to be a list of 2 of true and false"),
    ],
)
def test_refused(output, message):
    """What is wrong with ``episode``, named before anything is trained."""
    with pytest.raises(ValueError, match=message):
        check_rollouts(output, 2)


def test_rows_that_are_absent_are_left_out():
    """As if the function had said so by the key ``episode``; nothing else changes."""
    output = {**rollouts([ROW, ROW], None), "absent": [False, True], "reward": [1.0, None]}
    check_rollouts(output, 2)
    found = without_absent(output)
    check_rollouts(found, 2)
    assert found["episode"] == [0] and found["reward"] == [1.0, None]
    assert len(found["prompt_ids"]) == len(found["completion_ids"]) == 1
    assert read_episodes(found, 2, END)[1].is_absent.tolist() == [False, True]
    assert without_absent(rollouts([ROW, ROW], None))["episode"] == [0, 1]  # another process has absent ones


def test_indices_of_numpy_and_no_rows_at_all():
    """Any integers; all episodes may be empty."""
    check_rollouts(rollouts([ROW], np.array([1])), 2)
    check_rollouts(rollouts([], []), 2)
    found, episodes = read_episodes(rollouts([], []), 2, END)
    assert found["completion_ids"] == [[END], [END]] and episodes.is_empty.all()
