"""Recorded rollouts as rows of supervised training: tokens, labels, weights."""

import pytest

from harts_hf.rollouts import supervised_dataset


def rows():
    """Two groups; an episode of two samples; masks with gaps."""
    return [
        {"group": "a", "episode": 0, "token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "reward": 1.0},
        {"group": "a", "episode": 0, "token_ids": [5, 6, 9, 8, 4], "loss_mask": [0, 0, 1, 0, 1], "reward": 1.0},
        {"group": "a", "episode": 1, "token_ids": [5, 6, 2], "loss_mask": [0, 0, 1], "reward": 0.5},
        {"group": "b", "token_ids": [3, 3], "loss_mask": [0, 1], "reward": 0.0},
        {"group": "b", "token_ids": [3, 4], "loss_mask": [0, 1], "reward": -2.0},
    ]


def test_all_rows():
    """Labels where the policy wrote; no weights unless they are asked for."""
    found = supervised_dataset(rows())
    assert found.column_names == ["input_ids", "labels", "group"]
    assert found["input_ids"][1] == [5, 6, 9, 8, 4] and found["labels"][1] == [-100, -100, 9, -100, 4]
    assert list(found["group"]) == ["a", "a", "a", "b", "b"]


def test_weights():
    """The best of each group; rewards themselves; what weighs nothing is left out."""
    for weight in ("best", lambda reward, rewards: reward == max(rewards)):
        best = supervised_dataset(rows(), weight=weight)
        assert list(best["input_ids"]) == [[5, 6, 7, 8], [5, 6, 9, 8, 4], [3, 3]] and set(best["weight"]) == {1.0}
    by_reward = supervised_dataset(rows(), weight="reward")
    assert list(by_reward["weight"]) == [1.0, 1.0, 0.5, -2.0]


def test_refusals():
    """By name, with the row."""
    with pytest.raises(ValueError, match="expected weight to be a function, 'reward', 'best' or None, got 'worst'"):
        supervised_dataset(rows(), weight="worst")
    with pytest.raises(
        ValueError, match=r"a reward of every episode where rows are weighted, got none \(row 2 of group 'b'"
    ):
        supervised_dataset([*rows()[3:4], {k: v for k, v in rows()[4].items() if k != "reward"}], weight="reward")
    with pytest.raises(ValueError, match="finite numbers, got nan"):
        supervised_dataset(rows(), weight=lambda reward, rewards: float("nan"))
    with pytest.raises(ValueError, match="another weight than 0, got none"):
        supervised_dataset(rows(), weight=lambda reward, rewards: 0)
