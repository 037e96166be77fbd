"""Environments that fail in every way cost their episode; siblings go on, and what is trained is said."""

import threading
import time

import pytest
from support.engines import SeededEngine
from support.sampling import beginnings, tree_sampler

from harts_hf.rollouts.environment import StepResult
from harts_hf.rollouts.environments.encoding import Encoder
from harts_hf.rollouts.environments.failures import EpisodeFailure, guarded
from harts_hf.rollouts.environments.shelf import ShelfEnvironment
from harts_hf.rollouts.environments.texts import ObservationLimit, PlainWriter
from harts_hf.rollouts.environments.workers import Workers
from harts_hf.rollouts.forks import NoForks, TurnForks
from harts_hf.rollouts.growing_forks import EntropyForks

TOKENIZER = ShelfEnvironment().tokenizer()
FORKS = TurnForks(branching=(3, 2), fork_turns=(0, 1))
NEVER = threading.Event()


class Bad(ShelfEnvironment):
    """Goes wrong in one way; of the twins of a tree only in one, if ``branch`` says which."""

    def __init__(self, how, *, where="step"):
        super().__init__()
        self.how, self.where, self.closed = how, where, []

    def _go_wrong(self, where, value):
        return self.how() if self.where == where else value

    def reset(self, prompt, *, seed):
        return self._go_wrong("reset", super().reset(prompt, seed=seed))

    def step(self, action):
        return self._go_wrong("step", super().step(action))

    @property
    def reward(self):
        return self._go_wrong("reward", super().reward)

    def fork(self):
        return self._go_wrong("fork", super().fork())

    def close(self):
        self.closed.append(1)


def raises(error):
    def how():
        raise error

    return how


class Waiting(SeededEngine):
    """Waits for calls of environments as a real engine does."""

    def run(self, until):
        while not until():
            if self._queue:
                super().run(lambda: bool(not self._queue) or until())
            else:
                time.sleep(0.002)


def sample(environments, *, policy=FORKS, episodes=6, engine=None, **options):
    sampler = tree_sampler(
        engine or SeededEngine(len(TOKENIZER), TOKENIZER.eos_token_id),
        TOKENIZER,
        policy=policy,
        num_episodes=episodes,
        **options,
    )
    return sampler.sample(beginnings(environments, ["lamp wanted"] * len(environments)))


@pytest.mark.parametrize("where", ["reset", "step", "reward", "fork"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("broke"), SystemExit(0), StopIteration(), BrokenPipeError("a tool's pipe"), ImportError("no such")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_is_raised_costs_its_episode(where, error):
    """Every tree has its leaves; the tree beside it is as it would have been alone."""
    rollouts = sample([Bad(raises(error), where=where), ShelfEnvironment()])
    failures = [rollout.failure for rollout in rollouts[:6] if rollout.failure]
    assert len(rollouts) == 12
    # The first branch of a fork goes on with the environment itself, and twins of it are made by `super().fork`.
    assert len(failures) == (5 if where == "fork" else 6)
    assert all(failure.kind == "raised" and type(error).__name__ in str(failure) for failure in failures)
    assert all(rollout.reward is None for rollout in rollouts[:6] if rollout.failure)
    alone = sample([ShelfEnvironment(), ShelfEnvironment()])
    assert rollouts[6:] == alone[6:] and all(rollout.failure is None for rollout in rollouts[6:])


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("step", None, r"expected Bad.step to return a StepResult, got None \(turn 0\)"),
        ("step", ("x", False, {}), "expected Bad.step to return a StepResult, got"),
        ("step", StepResult(None, False), "to return a text as observation, got None"),
        ("step", StepResult(b"lamp", False), "to return a text as observation, got b'lamp'"),
        ("step", StepResult("\ud800 zzz", False), "got the character"),
        ("step", StepResult([{"role": "user", "content": "x"}], False), r"got .* \(chat=True writes messages\)"),
        ("reward", float("nan"), "expected Bad.reward to be a finite number that float32 holds, got nan"),
        ("reward", 1e300, "to be a finite number that float32 holds"),
        ("reward", None, "to be a finite number that float32 holds, got None"),
        ("reset", None, "expected Bad.reset to return a text, got None"),
        ("reset", "", "expected Bad.reset to return at least one token, got ''"),
    ],
)
def test_what_breaks_the_contract_costs_its_episode(where, value, message):
    """Named, not trained, and no error of the run."""
    rollouts = sample([Bad(lambda: value, where=where)])
    assert {rollout.failure.kind for rollout in rollouts} == {"contract"}
    with pytest.raises(EpisodeFailure, match=message):
        raise rollouts[0].failure


def test_a_prompt_longer_than_the_model_costs_its_episodes():
    """By its tokens, or by a part of them where they are too many to be encoded."""
    for count in (600, 1_000_000):
        engine = SeededEngine(len(TOKENIZER), TOKENIZER.eos_token_id, max_positions=512)
        rollouts = sample([Bad(lambda count=count: "lamp " * count, where="reset")], engine=engine)
        assert "expected Bad.reset to return at most 511 tokens" in str(rollouts[0].failure)


def test_an_interruption_ends_the_run():
    """Ctrl-C is the user's, not the environment's."""
    for workers in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            sample([Bad(raises(KeyboardInterrupt()))], engine=Waiting(len(TOKENIZER), 1), workers=workers)


def test_a_reward_for_failures():
    """Those that sampled something have it; one that failed before has none."""
    rollouts = sample([Bad(raises(OSError())), Bad(raises(OSError()), where="reset")], failed_reward=-1.0)
    assert [rollout.reward for rollout in rollouts] == [-1.0] * 6 + [None] * 6
    assert all(rollout.completion_ids for rollout in rollouts[:6])
    assert not any(rollout.prompt_ids or rollout.completion_ids for rollout in rollouts[6:])


@pytest.mark.parametrize("policy", [NoForks(), FORKS, EntropyForks(roots=2)], ids=lambda policy: type(policy).__name__)
def test_calls_that_hang_are_left_behind(policy):
    """Every tree has its leaves before long; with more workers they are the same ones."""
    engine = Waiting(len(TOKENIZER), TOKENIZER.eos_token_id)
    begun = time.monotonic()
    environments = [ShelfEnvironment(), Bad(lambda: NEVER.wait(20)), ShelfEnvironment()]
    rollouts = sample(environments, policy=policy, engine=engine, timeout=0.1, workers=4)
    assert time.monotonic() - begun < 10
    assert {rollout.failure.kind for rollout in rollouts[6:12]} == {"timeout"}
    plain = sample([ShelfEnvironment()] * 3, policy=policy)
    assert rollouts[:6] + rollouts[12:] == plain[:6] + plain[12:]
    assert len(rollouts) == 18


def test_a_fork_that_hangs_takes_its_place_with_it():
    """Nobody knows what the call is doing to the environment, so no branch goes on with it."""
    engine = Waiting(len(TOKENIZER), TOKENIZER.eos_token_id)
    rollouts = sample([Bad(lambda: NEVER.wait(20), where="fork")], engine=engine, timeout=0.1)
    assert [rollout.failure.kind for rollout in rollouts] == ["timeout"] * 6


def test_one_worker_is_one_thread():
    """Connections that belong to a thread keep working under a time-out, as long as nothing hangs."""
    threads = set()
    sample(
        [Bad(lambda: (threads.add(threading.get_ident()), StepResult("error", False))[1])],
        engine=Waiting(len(TOKENIZER), TOKENIZER.eos_token_id),
        timeout=60,
    )
    assert len(threads) == 1 and threads != {threading.get_ident()}


def test_environments_are_closed():
    """Each once, whether its episode ended or failed."""
    closed = []

    class Closes(ShelfEnvironment):
        def close(self):
            closed.append(id(self))
            raise RuntimeError("changes nothing any more")

    for policy in (FORKS, EntropyForks(roots=2)):
        closed.clear()
        environments = [Closes()]
        rollouts = sample(environments, policy=policy)
        assert len(closed) == len(set(closed)) >= len({rollout.path for rollout in rollouts})
        assert all(rollout.failure is None for rollout in rollouts)
    bad = Bad(raises(OSError()))
    sample([bad], policy=NoForks(), episodes=1)
    assert bad.closed == [1]


LONG = "".join(f"{number} " for number in range(400))


@pytest.mark.parametrize("long", ["cut", "fail"])
def test_long_observations(long):
    """Cut in the middle, with a line that says so, or failures; short ones stay."""
    observations = ObservationLimit(max_characters=100, long=long)
    answers = iter([StepResult("error", False), StepResult(LONG, False), StepResult("", True)])
    rollouts = sample([Bad(lambda: next(answers))], policy=NoForks(), episodes=1, observations=observations)
    if long == "fail":
        assert rollouts[0].failure.kind == "observation"
        assert str(rollouts[0].failure) == "expected an observation of at most 100 characters, got 1,490"
        return
    assert rollouts[0].failure is None
    text = PlainWriter(TOKENIZER, observations).limited(LONG)
    assert text == f"{LONG[:50]}\n[... 1,390 characters left out ...]\n{LONG[-50:]}"


@pytest.mark.parametrize(("most", "long"), [(0, "cut"), (5, "drop")])
def test_limits_of_observations_are_checked(most, long):
    """Numbers and words."""
    with pytest.raises(ValueError, match=r"expected (max_observation_characters|long_observations)"):
        ObservationLimit(max_characters=most, long=long)


@pytest.mark.parametrize(("timeout", "count"), [(0, 1), (-1.0, 1), (None, 0)])
def test_workers_are_checked(timeout, count):
    """Numbers out of range."""
    with pytest.raises(ValueError, match=r"expected (an )?environment_(timeout|workers)"):
        Workers(timeout=timeout, count=count, on_done=lambda: None)


@pytest.mark.parametrize("count", [1, 30, 31, 32, 200, 800, 5000])
def test_only_a_part_of_what_cannot_fit_is_encoded(count):
    """Answers as if all were; what is encoded grows with the limit, not with the text."""
    lengths = []

    def words(text, **_):
        lengths.append(len(text))
        return {"input_ids": text.split()}

    ids = Encoder(words).encode("abcdefgh " * count, limit=31)
    assert (ids is not None) == (count <= 31)
    assert sum(lengths) <= 6 * 8 * (31 + 64)


def test_the_failure_keeps_its_cause():
    """For the log: where it happened."""
    with pytest.raises(EpisodeFailure) as failure:
        guarded(raises(OSError("reset by peer")))
    assert "in how" in failure.value.described() and "OSError: reset by peer" in failure.value.described()
