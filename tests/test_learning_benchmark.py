"""What trained policies are compared with: players in benchmarks.learning, one another in benchmarks.algorithms."""

import pytest

from benchmarks.algorithms import STEPS, WAYS, WINDOW, apart, write
from benchmarks.learning import CASES, ROOT
from benchmarks.reference_play import mean_reward
from harts_hf.cli.train import parse


@pytest.mark.parametrize("name", CASES)
def test_players_play_by_the_recipe(name, monkeypatch):
    """Every case is a recipe; random actions get something, the best play all."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    arguments, *_ = parse([str(ROOT / "recipes" / f"{name}.yaml")])
    bar, players = CASES[name]
    rewards = {player: mean_reward(arguments, play, episodes=40) for player, play in players.items()}
    if rewards:
        assert 0 < rewards["random_actions"] < bar.last_above < rewards["best_play"] <= 1


def test_algorithms_have_one_model_task_and_budget(monkeypatch):
    """Ways differ in the trainer and in what is said of them."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    shared = ("model_config", "environment", "environment_kwargs", "branching", "max_turns", "max_turn_tokens")
    found = {
        way: parse([str(ROOT / "recipes" / f"{recipe}.yaml"), *changes]) for way, (recipe, changes) in WAYS.items()
    }
    for arguments, training, _ in found.values():
        assert {name: getattr(arguments, name) for name in shared} == {
            name: getattr(found["PPO"][0], name) for name in shared
        }
        assert training.per_device_train_batch_size == found["PPO"][1].per_device_train_batch_size
    training = {way: one[1] for way, one in found.items()}
    assert all(one.max_steps == STEPS for one in training.values())
    assert training["GRPO"].tree_credit == training["RLOO"].tree_credit == "trajectory"
    assert (training["GRPO"].scale_rewards, training["RLOO"].scale_rewards) == ("group", "none")
    assert training["PPO, nothing shared"].tree_sharing == "never" != training["PPO"].tree_sharing


@pytest.mark.exhaustive
def test_how_far_ways_are_apart(tmp_path):
    """Running means: of two ways beside those of seeds; the file and its picture hold them."""
    count = 3 * WINDOW

    def level(*values):
        return {str(seed): [[step, value] for step in range(count)] for seed, value in enumerate(values)}

    near, far = apart(level(0.0, 0.4), level(0.1, 0.5)), apart(level(0.0, 0.1), level(0.5, 0.6))
    assert near["means"] == pytest.approx(0.1) and near["seeds"] == pytest.approx(0.4)
    assert (near["part_of_steps_where_ranges_overlap"], far["part_of_steps_where_ranges_overlap"]) == (1.0, 0.0)
    runs = {
        way: {
            seed: {"curve": curve, "last_mean_reward": 0.5, "cpu_seconds": 1.0} for seed, curve in level(0.2).items()
        }
        for way in WAYS
    }
    assert write({**runs, "PPO": {}}, tmp_path / "found.json")["shared_or_not_apart"] is None
    content = write(runs, tmp_path / "found.json")
    assert content["shared_or_not_apart"]["means"] == 0 and (tmp_path / "found.png").stat().st_size > 1000
