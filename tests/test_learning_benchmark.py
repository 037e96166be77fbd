"""What trained policies are compared with in benchmarks/learning.py."""

import pytest

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
