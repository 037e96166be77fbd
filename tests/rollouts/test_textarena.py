"""TextArena's single-player games."""

import random
import subprocess
import sys

import pytest

from harts_hf.rollouts.environments.textarena import TextArenaEnvironment

textarena = pytest.importorskip("textarena")

GAME = "GuessTheNumber-v0"
# Each game that runs offline, and an action of it.
OFFLINE = {
    "2048-v0": "up",
    "Bandit-v0": "red",
    "Blackjack-v0": "Hit",
    "Countdown-v0": "0 1 +",
    "Cryptarithm-v0": "S 9",
    "FifteenPuzzle-v0": "up",
    "FrozenLake-v0-random": "left",
    "GuessTheNumber-v0": "7",
    "LightsOut-v0": "1,1",
    "LogicPuzzle-v0": "Alice park X",
    "Mastermind-v0": "1 2 3 4",
    "Minesweeper-v0-small": "reveal 1 1",
    "PegJump-v0": "4 1",
    "RushHour-v0": "A+",
    "Secretary-v0": "continue",
    "Set-v0": "0 1 2",
    "Slitherlink-v0": "h 0 0",
    "Sokoban-v0": "up",
    "Sudoku-v0-very-easy": "1 1 1",
    "ThreeCardMonte-v0": "1",
    "TowerOfHanoi-v0": "A C",
}


def begun(game=GAME, *, seed=0, **options):
    """An environment after its reset, and what it said."""
    environment = TextArenaEnvironment(game, **options)
    return environment, environment.reset(game, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_game_that_goes_well(seed):
    """The game's rules, its hints as it gives them and nothing else, its reward."""
    game, rules = begun(seed=seed, game_kwargs={"max_number": 8, "max_turns": 4})
    assert rules.startswith("You are Player 0. You are playing Guess The Number.")
    assert "between 1 and 8 within 4 turns" in rules
    low, high = 1, 8
    while True:
        guess = (low + high) // 2
        observation, done = game.step(f"I think that it is [{guess}].")
        if done:
            break
        assert observation in ("The target number is higher.", "The target number is lower.")
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
    assert game.reward == 1


def test_wrong_actions_are_answered_by_the_game():
    """The first by words, a second in a row by the end of the game, with the game's reward for what was reached."""
    game, _ = begun(game_kwargs={"max_number": 9})
    game.step("[9]")
    first = game.step("[77]")
    assert "invalid move" in first.observation
    assert not first.done
    assert game.reward == 0  # nothing said yet
    assert game.step("no idea").done
    assert 0 < game.reward < 1


@pytest.mark.essential("2048-v0", "Mastermind-v0", "Minesweeper-v0-small", "Sudoku-v0-very-easy")
@pytest.mark.parametrize("name", OFFLINE)
def test_every_offline_game_forks_and_repeats(name):
    """The seed decides all, forks go on by themselves, and other uses of the generator neither matter nor notice."""
    random.seed(5)
    before = random.getstate()
    (game, text), (again, same) = begun(name, seed=11), begun(name, seed=11)
    assert random.getstate() == before
    assert text == same
    game.step(OFFLINE[name])
    twin, other = game.fork(), game.fork()
    again.step(OFFLINE[name])
    random.seed(6)
    other.step("[up]")
    other.step("nonsense")
    said = []
    for environment in (game, twin, again):
        random.random()
        said.append([environment.step(action) for action in (OFFLINE[name], "nonsense")])
    assert said[0] == said[1] == said[2]
    assert game.reward == twin.reward == again.reward


@pytest.mark.parametrize(
    ("name", "actions"),
    [("2048-v0", ["up", "left", "down", "right"] * 5), ("Blackjack-v0", ["Stand", "Hit"] * 4)],
)
def test_the_game_is_textarenas(name, actions):
    """The same texts as from TextArena alone, throughout: also where chance goes on after the reset."""
    stock = textarena.make(name)
    stock.reset(num_players=1, seed=9)
    expected = []
    for action in actions:
        stock.state.get_current_player_observation()
        done, _ = stock.step(f"[{action}]")
        expected.append([text for sender, text, _ in stock.state.observations[0] if sender == textarena.GAME_ID])
        if done:
            break
    game, _ = begun(name, seed=9)
    for action, texts in zip(actions, expected, strict=False):
        random.seed(0)
        observation, done = game.step(action)
        assert observation == "\n\n".join(text.strip() for text in texts)
    assert len(expected) > 2


def test_forks_have_the_same_luck():
    """2048 draws a tile after each move: the same one for the same move."""
    game, _ = begun("2048-v0", seed=1)
    boards = set()
    for seed in range(5):
        random.seed(seed)
        twin = game.fork()
        boards.add("".join(twin.step(move).observation for move in ("up", "left", "down", "right")))
    assert len(boards) == 1
    assert game.step("up").observation in boards.pop()


def test_nothing_is_said_twice():
    """Observations are what is new: neither the rules nor the policy's own action."""
    game, rules = begun("FrozenLake-v0")
    observation = game.step("[down]").observation
    assert "Current Board" in observation
    assert "Welcome to Frozen Lake" in rules
    assert "Welcome to Frozen Lake" not in observation
    for name in ("Countdown-v0", "Cryptarithm-v0"):
        game, _ = begun(name)
        assert "my words" not in game.step("my words [x]").observation


def test_rules_may_be_left_out():
    """Then the game's first message begins, or its id if there is none."""
    assert begun(rules=False)[1] == GAME
    assert begun("FrozenLake-v0", rules=False)[1].startswith("Current Board")


def test_games_print_nothing(capsys):
    """Some say how they were made."""
    begun("RushHour-v0")
    assert capsys.readouterr().out == ""


def test_an_unfinished_game():
    """It has no reward of its own; nor has one that ends with a text in the reward's place."""
    assert begun(unfinished_reward=-0.5)[0].reward == -0.5
    game, _ = begun("Countdown-v0", unfinished_reward=-0.5)
    while not game.step("x").done:
        pass
    assert game.reward == -0.5


def test_a_tokenizer_of_its_words():
    """One token for each action; other games have no unknown word."""
    numbers = [str(number) for number in range(1, 8)]
    game = TextArenaEnvironment(GAME, game_kwargs={"max_number": 7, "max_turns": 3}, word_actions=numbers)
    tokenizer = game.tokenizer()
    texts = [game.reset(GAME, seed=999), *(game.step(action).observation for action in ("1", "", "7"))]
    for text in texts:
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
    for number in numbers:
        assert tokenizer.decode(tokenizer(number)["input_ids"]) == number
    with pytest.raises(ValueError, match="expected word_actions"):
        TextArenaEnvironment(GAME).tokenizer()
    with pytest.raises(ValueError, match="expected word_actions of one word each, got 'go left'"):
        TextArenaEnvironment(GAME, word_actions=["go left"]).tokenizer()


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("GuesTheNumber-v0", r"got 'GuesTheNumber-v0' \(did you mean 'GuessTheNumber-v0'\?\)"),
        (7, "expected the id of a TextArena game"),
        ("Wordle-v0", r"needs no network, got 'Wordle-v0', which downloads word lists \(NLTK\)"),
        ("Hangman-v0-hardcore", "which downloads word lists"),
        ("TwentyQuestions-v0", "which asks a model of OpenRouter's"),
        ("SpellingBee-v0", "which downloads word lists"),
        ("BabyAiText-v0", "harts_hf.rollouts.environments.babyai"),
    ],
)
def test_games_that_are_refused_by_name(game, message):
    """Before anything is imported that could download."""
    with pytest.raises(ValueError, match=message):
        TextArenaEnvironment([GAME, game])


@pytest.mark.parametrize(
    ("game", "kwargs", "message"),
    [
        ("TicTacToe-v0", {}, "expected a game for one player"),
        ("QuantumTicTacToe-v0", {}, "whose state is a TwoPlayerState"),
        ("PublicGoodsGame-v0", {}, "whose state is a FFAMultiPlayerState"),
        ("UsedCar-v0-balanced", {}, "expected a game that this installation can make"),
        (GAME, {"colour": 1}, f"game_kwargs do not fit {GAME}"),
    ],
)
def test_games_that_are_refused_at_the_reset(game, kwargs, message):
    """Several players, files that the wheel lacks, keyword arguments that there are not."""
    with pytest.raises(ValueError, match=message):
        begun(game, game_kwargs=kwargs)


@pytest.mark.exhaustive
def test_refused_games_are_not_imported():
    """A fresh process in which any connection is an error: refusals open none, nor does a game that is played."""
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise AssertionError('a connection')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from harts_hf.rollouts.environments.textarena import TextArenaEnvironment\n"
        "try: TextArenaEnvironment('Wordle-v0')\n"
        "except ValueError: pass\n"
        "game = TextArenaEnvironment('GuessTheNumber-v0')\n"
        "game.reset('GuessTheNumber-v0', seed=0), game.step('[3]')\n"
        "assert 'textarena.envs.Wordle.env' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.exhaustive
def test_without_textarena_the_extra_is_named():
    """A fresh process without it: the error says what to install, and the module imports."""
    code = (
        "import sys; sys.modules['textarena'] = None\n"
        "from harts_hf.rollouts.environments.textarena import TextArenaEnvironment\n"
        "try: TextArenaEnvironment('GuessTheNumber-v0')\n"
        "except ImportError as error: assert 'pip install -e \".[environments]\"' in str(error)\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
