"""Players to compare a trained policy with: random actions, and the best that is known."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from harts_hf.cli.train_arguments import TrainArguments
from harts_hf.rollouts.environment import Environment, load_object

EPISODES = 1000

# Plays one episode: gets the environment after its reset and a generator, and is sent each observation for an action.
Player = Callable[[Any, random.Random], "Iterator[str]"]


def mean_reward(arguments: TrainArguments, player: Player, *, episodes: int = EPISODES) -> float:
    """Mean reward of so many episodes, seeds 0, 1, ..., within the turns that a recipe allows."""
    environment: Environment = load_object(arguments.environment)(**arguments.environment_kwargs)
    total = 0.0
    for seed in range(episodes):
        prompts = environment.prompts()
        environment.reset(prompts[seed % len(prompts)], seed=seed)
        actions = player(environment, random.Random(f"player {seed}"))  # the environment has the seed itself
        action = next(actions)
        for _ in range(arguments.max_turns):
            observation, done = environment.step(action)
            if done:
                break
            action = actions.send(observation)
        total += environment.reward
    return total / episodes


def move_at_random(environment, generator):
    """BabyAI: each of the actions that there are is as likely as the others."""
    while True:
        yield generator.choice(list(environment._actions))


def follow_the_bot(environment, generator):
    """BabyAI: minigrid's own bot, which knows the whole level."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    bot = BabyAIBot(environment._game)
    action = None
    while True:
        action = bot.replan(action)
        yield action.name


def guess_at_random(environment, generator):
    """GuessTheNumber: any number, also one that was tried."""
    while True:
        yield generator.choice(environment._word_actions)


def guess_in_the_middle(environment, generator):
    """GuessTheNumber: halves what the hints leave."""
    numbers = [int(word) for word in environment._word_actions]
    while True:
        guess = numbers[(len(numbers) - 1) // 2]
        hint = yield str(guess)
        numbers = [n for n in numbers if (n < guess if "lower" in hint else n > guess)]
