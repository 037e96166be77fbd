"""Playing again is forking: the same rollouts as with copies, whatever the policy."""

import pytest
from support.engines import SeededEngine
from support.sampling import beginnings, tree_sampler

from harts_hf.rollouts import EntropyForks, ReplayedEnvironment, TurnForks
from harts_hf.rollouts.environments.failures import ReplayError
from harts_hf.rollouts.environments.shelf import ShelfEnvironment

TOKENIZER = ShelfEnvironment().tokenizer()


class Uncopied(ShelfEnvironment):
    """Holds something that has no copy, and counts what is played."""

    steps = 0

    def step(self, action):
        Uncopied.steps += 1
        return super().step(action)

    def fork(self):
        raise TypeError("a process cannot be copied")


@pytest.mark.parametrize(
    "policy",
    [TurnForks(branching=(3, 2), fork_turns=(0, 2)), EntropyForks(roots=2)],
    ids=lambda policy: type(policy).__name__,
)
def test_the_same_rollouts_as_with_copies(policy):
    """Rows, rewards and paths; one branch of each fork goes on with what is running, and is not played again."""

    def sample(environment):
        sampler = tree_sampler(
            SeededEngine(len(TOKENIZER), TOKENIZER.eos_token_id), TOKENIZER, policy=policy, num_episodes=6
        )
        return sampler.sample(beginnings([environment], ["lamp wanted"]))

    copied = sample(ShelfEnvironment())
    Uncopied.steps = 0
    assert sample(ReplayedEnvironment(Uncopied)) == copied
    played = {
        (rollout.path[: len([turn for turn in rollout.fork_turns if turn <= at])], at)
        for rollout in copied
        for at in range(rollout.num_turns)
    }
    again = sum(max(0, turn) for rollout in copied for turn in rollout.fork_turns[-1:])
    assert len(played) <= Uncopied.steps <= len(played) + again


def test_it_is_named_by_a_path_and_speaks_for_the_other():
    """As a recipe has it: prompts and tokenizer are the other environment's."""
    path = "harts_hf.rollouts.environments.shelf:ShelfEnvironment"
    environment = ReplayedEnvironment(path, environment_kwargs={"num_items": 2})
    assert environment.prompts() == ["lamp wanted", "book wanted"]
    assert len(environment.tokenizer()) == len(TOKENIZER) - 2
    with pytest.raises(TypeError, match="num_things"):
        ReplayedEnvironment(path, environment_kwargs={"num_things": 2})


def test_another_answer_says_where():
    """The turn, and both answers from shortly before they part."""

    class Drifts(ShelfEnvironment):
        made = 0

        def __init__(self):
            super().__init__()
            Drifts.made += 1
            self._number = Drifts.made

        def step(self, action):
            return super().step(action)._replace(observation=f"{'the same words ' * 5}{self._number} lamp")

    environment = ReplayedEnvironment(Drifts)
    environment.begin({"prompt": "lamp wanted"}, seed=0)
    environment.step("look lamp")
    twin = environment.fork()
    assert twin.step("go s1").observation.endswith("1 lamp")
    with pytest.raises(
        ReplayError, match=r"Drifts to be deterministic.* from step of turn 0 .*words 2 lamp.*words 1 lamp"
    ):
        environment.step("go s1")
