"""Trees sampled without a trainer: environments begun by hand, written as they speak."""

from functools import partial

from harts_hf.rollouts.environments.texts import ObservationLimit
from harts_hf.rollouts.environments.workers import Workers
from harts_hf.rollouts.environments.writers import AnyWriter
from harts_hf.rollouts.sampler import TreeSampler
from harts_hf.rollouts.turn_limits import TurnLimits


def tree_sampler(
    engine, tokenizer, *, chat=False, end_ids=(), observations=None, timeout=None, workers=1, limits=None, **options
):
    """A sampler; ``limits`` are those of turns."""
    limits = {"max_turns": 5, "max_turn_tokens": 3, "max_completion_tokens": 40, **(limits or {})}
    writer = AnyWriter(tokenizer, chat=chat, end_ids=end_ids, limit=observations or ObservationLimit())
    pool = Workers(timeout=timeout, count=workers, on_done=engine.wake)
    return TreeSampler(
        **{"engine": engine, "writer": writer, "workers": pool.__enter__(), "seed": 0, **options},
        limits=TurnLimits(**limits),
    )


def beginnings(environments, prompts):
    """One per environment, as a collector makes them."""

    def begin(environment, prompt):
        return environment, environment.begin({"prompt": prompt}, seed=0)

    return [partial(begin, *pair) for pair in zip(environments, prompts, strict=True)]
