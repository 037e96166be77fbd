"""What came of the episodes of a collection."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from harts_hf.rollouts.gateway.agents import AgentFailure, FailureKind, checked_reward
from harts_hf.rollouts.gateway.recording import EpisodeRow
from harts_hf.rollouts.gateway.runs import AgentJob, AgentOutcome
from harts_hf.rollouts.gateway.sessions import Session
from harts_hf.rollouts.gateway.splicing import Drift
from harts_hf.rollouts.salvage import rollout_row
from harts_hf.rollouts.seeds import seed_of

# Failures that are limits of the collector's.
LIMITS: tuple[FailureKind, ...] = ("max_turns", "timeout")


@dataclass(frozen=True, kw_only=True)
class AgentEpisode:
    """An episode that an agent has played.

    Attributes:
        task: the prompt, as it stands in the data set.
        tree: index of its prompt group in the call.
        result: what the agent returned.
        failure: why there is none, or None. What was sampled before is in ``rows`` even so.
        messages: the conversation of its last request, and the answers to it, as they came.
        rows: its samples.
        num_turns: turns of the policy.
        seconds: that the agent took.
        truncated: whether a limit ended it: turns, length, time; not where its agent came to its end, or failed.
        reward: of the episode; None where it has none.
    """

    task: Any
    tree: int
    result: Any
    failure: AgentFailure | None
    messages: list[dict[str, Any]]
    rows: list[EpisodeRow]
    num_turns: int
    seconds: float
    truncated: bool
    reward: float | None = None


@dataclass(frozen=True, kw_only=True)
class AgentSample:
    """A sample of a collection, for plots and logs."""

    tree: int
    prompt_ids: list[int]
    completion_ids: list[int]
    reward: float | None


def episode_of(job: AgentJob, tree: int, outcome: AgentOutcome) -> AgentEpisode:
    """The episode that a job became, without its reward."""
    session = job.session
    return AgentEpisode(
        task=job.task,
        tree=tree,
        result=outcome.result,
        failure=outcome.failure,
        messages=[*session.messages, *session.answers],
        rows=session.recording.rows(),
        num_turns=session.recording.num_turns,
        seconds=outcome.seconds,
        truncated=session.hit_a_limit or (outcome.failure is not None and outcome.failure.kind in LIMITS),
    )


def as_reward(result: Any) -> float | None:
    """What an agent returned, if it is a reward; agents may return what they like for other reward functions.

    NumPy's numbers and tensors of one element are rewards too.

    Raises:
        AgentFailure: a number that is no finite one; an array of several.
    """
    return checked_reward(result) if hasattr(result, "__float__") else None


def file_rows(sessions: Sequence[Session], trees: Sequence[int]) -> list[dict[str, Any]]:
    """What was sampled so far, as rows of a rollout file."""
    rows = []
    for session, tree in zip(sessions, trees, strict=True):
        try:
            reward = as_reward(session.result)
        except AgentFailure:
            reward = None
        for row in session.recording.rows():
            rows.append(
                rollout_row(
                    tree,
                    row.prompt_ids,
                    row.completion_ids,
                    env_mask=row.env_mask,
                    logprobs=row.logprobs,
                    reward=reward,
                )
            )
    return rows


def metrics_of(sessions: Sequence[Session], episodes: Sequence[AgentEpisode]) -> dict[str, float]:
    """What is logged of a collection: means over its episodes, and counts of what should be rare."""
    counts: Counter[str] = Counter()
    drifts: Counter[Drift] = Counter()
    for session in sessions:
        counts.update(session.counts)
        drifts.update(session.recording.drifts)
    kinds = Counter(episode.failure.kind for episode in episodes if episode.failure is not None)
    number = len(episodes)
    return {
        "agent/turns": sum(episode.num_turns for episode in episodes) / number,
        "agent/seconds": sum(episode.seconds for episode in episodes) / number,
        "agent/truncated": sum(episode.truncated for episode in episodes) / number,
        "agent/failed": sum(kinds.values()) / number,
        **{f"agent/failed/{kind}": float(kinds[kind]) for kind in get_args(FailureKind)},
        "agent/histories/clean": float(drifts[Drift.CLEAN]),
        "agent/histories/repaired": float(drifts[Drift.REALIGN]),
        "agent/histories/forked": float(drifts[Drift.FORK]),
        **{
            f"agent/{name}": float(counts[name])
            for name in ("requests", "refused", "disconnected", "over_limit", "out_of_room", "ignored_parameters")
        },
    }


def group_prompts(prompts: Sequence[Any], size: int, *, first: int) -> list[int]:
    """The index of each prompt's group among those of all processes: groups are ``size`` prompts in a row.

    Args:
        prompts: a process's; its share may begin or end within a group.
        size: generations of a prompt.
        first: index of the first prompt among those of all processes.

    Raises:
        ValueError: prompts of a group that differ.
    """
    groups = [index // size for index in range(first, first + len(prompts))]
    for index in range(1, len(prompts)):
        if groups[index] == groups[index - 1] and prompts[index] != prompts[index - 1]:
            raise ValueError(
                f"expected groups of {size} equal prompts over all processes, got another prompt at {first + index} "
                f"than at {first + index - 1}: have all processes the same number of prompts?"
            )
    return groups


def task_seed(entropy: Sequence[int], group: int) -> int:
    """The seed of a group's task: the same on all processes, and none of those that :func:`request_seeds` gives."""
    return seed_of(*entropy, group, 0)


def request_seeds(entropy: Sequence[int]) -> Callable[[int], int]:
    """The seeds of an episode's requests by their number."""
    return lambda number: seed_of(*entropy, number)
