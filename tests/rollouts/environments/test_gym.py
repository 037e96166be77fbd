"""Gymnasium's interface, played by text."""

import pytest

from harts_hf.rollouts import GymTextEnvironment
from harts_hf.rollouts.environments.failures import ContractError


class Steps:
    """Gymnasium's interface without Gymnasium: climb to the goal, which the seed sets."""

    def __init__(self, *, truncate_after=9):
        self._truncate_after, self.is_closed = truncate_after, False

    def reset(self, *, seed=None, options=None):
        self.at, self.goal, self.steps = 0, 2 + seed % 2, 0
        return self.at, {"goal": self.goal}

    def step(self, action):
        self.steps += 1
        self.at += action
        return self.at, -0.1 + (self.at == self.goal), self.at == self.goal, self.steps == self._truncate_after, {}

    def close(self):
        self.is_closed = True


def parse(text):
    return {"up": 1, "down": -1}.get(text.strip())


def render(observation, info):
    return f"at {observation}" + (f", goal {info['goal']}" if info else "")


def environment(**options):
    return GymTextEnvironment(Steps, **{"parse_action": parse, "render": render, **options})


def test_an_episode():
    """Texts come from ``render``, rewards add up, the end is one of both kinds."""
    game = environment()
    assert game.reset("Climb.", seed=3) == "Climb.\n\nat 0, goal 3"
    assert game.step("up") == ("at 1", False)
    assert game.step(" up\n") == ("at 2", False)
    assert game.step("up") == ("", True)
    assert game.reward == pytest.approx(0.7)
    short = environment(env_kwargs={"truncate_after": 1})
    short.reset("", seed=0)
    assert short.step("down") == ("", True)
    short.close()
    assert short._env.is_closed


def test_prompts_of_messages_and_none():
    """The first observation goes on where the prompt ends."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Climb."}]
    assert environment().reset(messages, seed=0) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Climb.\n\nat 0, goal 2"},
    ]
    assert environment().reset(None, seed=0) == "at 0, goal 2"


@pytest.mark.parametrize("parse_action", [parse, lambda text: {"up": 1}[text] if text == "up" else int(text)])
def test_actions_that_are_none(parse_action):
    """They cost a turn and what one says, not the episode; braces in them are no fields."""
    game = environment(parse_action=parse_action, invalid_action="no: {action}", invalid_reward=-1.0)
    game.reset("", seed=0)
    assert game.step("fly {now}") == ("no: fly {now}", False)
    assert game.reward == -1.0
    assert game.step("up") == ("at 1", False)


def test_forks_go_on_by_themselves():
    """By deep copy."""
    game = environment()
    game.reset("", seed=0)
    game.step("up")
    twin = game.fork()
    assert twin.step("up").done and twin.reward == pytest.approx(0.8)
    assert game.reward == pytest.approx(-0.1) and game.step("down") == ("at 0", False)


def test_texts_are_the_default():
    """An environment of texts needs neither function; another one is told so."""

    class Texts(Steps):
        def step(self, action):
            return f"you said {action}", 1, False, False, {}

    game = GymTextEnvironment(Texts, render=render)
    game.reset("", seed=0)
    assert game.step(" hello ").observation == "at you said hello"
    with pytest.raises(ContractError, match="expected an observation that is a text, or render, got 0"):
        GymTextEnvironment(Steps).reset("", seed=0)


def test_gymnasiums_own():
    """A stock environment by name, two seeds of which differ."""
    gymnasium = pytest.importorskip("gymnasium")
    game = GymTextEnvironment(
        gymnasium.make,
        env_kwargs={"id": "Blackjack-v1"},
        parse_action=["stick", "hit"].index,
        render=lambda o, i: str(o),
    )
    assert game.reset("", seed=1) != game.reset("", seed=2)
    assert game.fork().step("stick").done
    assert game.step("neither").observation == "This is no action: neither"
