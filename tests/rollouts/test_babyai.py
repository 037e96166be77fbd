"""BabyAI and MiniGrid levels as text."""

import subprocess
import sys

import numpy as np
import pytest

from harts_hf.rollouts.environments.babyai import ACTIONS, BabyAIEnvironment
from harts_hf.rollouts.environments.grid_text import describe_view

pytest.importorskip("minigrid")

LEVEL = "BabyAI-GoToRedBallNoDists-v0"
WALL, EMPTY, DOOR, BALL, KEY = (2, 5, 0), (1, 0, 0), (4, 4, 2), (6, 0, 0), (5, 2, 0)


def begun(level=LEVEL, *, seed=0, **options):
    """An environment after its reset, and what it said."""
    environment = BabyAIEnvironment(level, **options)
    return environment, environment.reset(level, seed=seed)


def play(environment, actions):
    """Observations of some actions, up to the end of the episode."""
    said = []
    for action in actions:
        said.append(environment.step(action))
        if said[-1].done:
            break
    return said


def view(things, size=7):
    """A view of an empty floor with ``things``, by (ahead, side)."""
    image = np.tile(np.array(EMPTY, dtype=np.uint8), (size, size, 1))
    for (ahead, side), thing in things.items():
        image[size // 2 + side, size - 1 - ahead] = thing
    return image


def test_what_lies_where():
    """Nearest first, sides by their names, the state of doors; the agent's own place is what it carries."""
    things = {(2, -1): BALL, (0, 3): DOOR, (1, 0): KEY, (3, 0): WALL, (5, 0): WALL, (0, -2): WALL, (0, 0): KEY}
    assert describe_view(view(things), ("blue", "key"), "sentences") == (
        "You see a blue key 1 step ahead, a red ball 2 steps ahead and 1 step to the left, and a locked yellow door "
        "3 steps to the right.\nThere is a wall 3 steps ahead, 2 steps to the left.\nYou carry a blue key."
    )
    assert describe_view(view(things), ("blue", "key"), "words") == (
        "blue key 1 ahead , red ball 2 ahead 1 left , locked yellow door 3 right , carrying blue key"
    )
    assert describe_view(view({}), None, "sentences") == "You see nothing but the floor and walls."
    assert describe_view(view({}), None, "words") == "nothing"
    assert describe_view(view({(1, 0): WALL}), None, "words") == "wall 1 ahead"


def test_positions_are_those_of_the_level():
    """Turned and walked by the description alone, the agent comes to the ball, in every one of 20 instances."""
    for seed in range(20):
        game, text = begun(seed=seed, style="words")
        done = False
        for _ in range(30):
            seen = text.rpartition(": ")[2].split(" , ")[0].split()
            way = "forward" if "ahead" in seen else "right" if "right" in seen else "left"
            elsewhere = "left" if "wall" in seen else "forward"
            text, done = game.step(way if "ball" in seen else elsewhere)
            if done:
                break
        assert done
        assert game.reward == 1


def test_the_seed_decides_the_instance():
    """Equal seeds give equal texts throughout, different ones different instances."""
    actions = ["go forward", "turn left", "go forward", "turn right", "pick up", "toggle"] * 3
    texts = {}
    for seed in (0, 1, 2, 0):
        game, text = begun("BabyAI-GoToLocal-v0", seed=seed)
        said = [text, *play(game, actions)]
        assert texts.setdefault(seed, said) == said
    assert texts[0] != texts[1] != texts[2]


def test_forks_are_independent():
    """A fork goes on from the same state, and neither sees what the other does."""
    game, _ = begun("BabyAI-GoToLocal-v0", seed=4)
    play(game, ["turn left", "go forward"])
    twin, other = game.fork(), game.fork()
    actions = ["turn right", "go forward", "go forward", "turn left", "go forward"]
    play(other, ["turn left", "turn left", "go forward"])
    assert play(twin, actions) == play(game, actions)


def test_an_action_is_the_last_line():
    """Phrases and minigrid's names, whatever is around them; each action does what it says."""
    for text in (
        "turn left",
        "Left.",
        "Action: turn left",
        "The ball is to my left: I turn right and then\n\n**Turn  left**\n",
        "`left`",
    ):
        game, _ = begun(seed=1, style="words")
        twin = game.fork()
        assert game.step(text) == twin.step("left")
        assert twin._game.agent_dir != begun(seed=1)[0]._game.agent_dir


@pytest.mark.parametrize(
    "action", ["", "\n", "jump", "turn left and go forward", "I turn left\nthen what?", "forward x"]
)
def test_wrong_actions_are_answered(action):
    """They are no step of the level, and the answer says which actions there are."""
    game, _ = begun(seed=1, actions=["left", "forward"])
    before = game._game.hash(size=64), game._game.step_count
    answer = game.step(action)
    assert not answer.done
    assert "turn left or go forward" in answer.observation
    assert (game._game.hash(size=64), game._game.step_count) == before
    assert game.step("turn right") == game.step("")  # it is not among this environment's actions
    assert begun(seed=1, style="words")[0].step(action) == ("error", False)


def test_an_action_that_changes_nothing_says_so():
    """Dropping nothing, and walking into a wall."""
    game, _ = begun(seed=1)
    assert game.step("drop").observation.startswith("Nothing happens. ")
    said = play(game, ["go forward"] * 8)
    assert said[-1].observation.startswith("Nothing happens. ")
    assert not said[0].observation.startswith("Nothing happens. ")


def test_rewards():
    """Success is 1, minigrid's reward falls with the steps; an episode that the level cut short has none."""
    rewards = {}
    for kind in ("success", "discounted"):
        game, _ = begun("BabyAI-GoToObjS4-v0", seed=0, reward=kind)
        assert game.reward == 0
        said = play(game, ["turn left", "go forward"] * 8)
        assert said[-1].done
        rewards[kind] = game.reward
        steps = len(said)
    assert rewards["success"] == 1
    assert rewards["discounted"] == pytest.approx(1 - 0.9 * steps / 16)
    game, _ = begun(level_kwargs={"max_steps": 3})
    assert [result.done for result in play(game, ["drop"] * 4)] == [False, False, True]
    assert game.reward == 0


@pytest.mark.exhaustive
def test_a_tokenizer_of_its_words():
    """One token for each word and action; other instances have no unknown word; texts survive."""
    game = BabyAIEnvironment("BabyAI-GoToLocalS5N2-v0", style="words", actions=["left", "right", "forward"])
    tokenizer = game.tokenizer()
    assert len(tokenizer) < 40
    generator = np.random.default_rng(0)
    for seed in range(1000, 1040):
        texts = [game.reset(game.prompts()[0], seed=seed)]
        texts += [said.observation for said in play(game, generator.choice(["left", "right", "forward", "x"], 8))]
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
    for action in ("left", "right", "forward"):
        (token,) = tokenizer(action)["input_ids"]
        assert tokenizer.decode([token]) == action


def test_several_levels_and_prompts_of_a_data_set():
    """Each level is a prompt, and so is any other level's id."""
    game = BabyAIEnvironment([LEVEL, "MiniGrid-Empty-5x5-v0"])
    assert game.prompts() == [LEVEL, "MiniGrid-Empty-5x5-v0"]
    assert "red ball" in game.reset(LEVEL, seed=0)
    assert "green goal" in game.reset("MiniGrid-Empty-5x5-v0", seed=0)
    assert "open the red door" in game.reset("BabyAI-OpenRedDoor-v0", seed=0)


def test_levels_print_nothing(capsys):
    """minigrid prints how it draws instances."""
    for seed in range(20):
        begun("BabyAI-BossLevel-v0", seed=seed)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": "BabyAI-GoToRedBal-v0"}, r"got 'BabyAI-GoToRedBal-v0' \(did you mean 'BabyAI-GoToRedBall-v0'\?\)"),
        ({"levels": "CartPole-v1"}, "expected the id of a BabyAI or MiniGrid level"),
        ({"levels": []}, "expected at least one level, got none"),
        ({"style": "emoji"}, "expected style to be one of sentences, words, got 'emoji'"),
        ({"reward": "dense"}, "expected reward to be one of success, discounted, got 'dense'"),
        ({"actions": ["left", "jump"]}, f"expected actions to be one of {', '.join(ACTIONS)}, got 'jump'"),
        ({"actions": []}, "expected actions to be a list of"),
        ({"actions": "left"}, "expected actions to be a list of"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_refusals(options, message):
    """What is wrong is said before an episode begins."""
    with pytest.raises(ValueError, match=message):
        BabyAIEnvironment(**options)


def test_refusals_of_a_reset():
    """A prompt that is no level, and keyword arguments that a level does not take."""
    with pytest.raises(ValueError, match="expected the id of a BabyAI or MiniGrid level"):
        BabyAIEnvironment().reset({"level": LEVEL}, seed=0)
    with pytest.raises(ValueError, match=f"level_kwargs do not fit {LEVEL}.*rooms"):
        begun(level_kwargs={"rooms": 3})


@pytest.mark.exhaustive
def test_without_minigrid_the_extra_is_named():
    """A fresh process without it: the error says what to install, and the module imports."""
    code = (
        "import sys; sys.modules['minigrid'] = None\n"
        "from harts_hf.rollouts.environments.babyai import BabyAIEnvironment\n"
        "try: BabyAIEnvironment()\n"
        "except ImportError as error: assert 'pip install -e \".[environments]\"' in str(error)\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
