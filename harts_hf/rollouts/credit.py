"""Credit on a rollout tree: which of the policy's turns earned the reward (NumPy only).

The value of a history is the mean reward of the episodes that pass through it, token by token. A turn *parts* its
trajectory from others if fewer episodes pass through its end than through its history. Turns that part nothing, such
as those below the last fork, form one step with the parting turn above them and carry the same credit (a node of
TreeRL, Hou et al., arXiv 2506.11902, is what lies between two forks; Tree-GRPO, Ji et al., arXiv 2509.21240, takes
whole steps as nodes likewise). With ``V`` for values, ``r`` for rewards:

=========== ========================================== ==========================================================
credit      of a turn                                  what it is
=========== ========================================== ==========================================================
turn        ``V(after) - V(before)``                   TreeRL's local advantage; the baseline is the history that
                                                       the turn continues
branch      ``V(after) - mean of V(siblings)``         the baseline is what the other continuations of that
                                                       history came to, each counted once and without episodes
                                                       that took this one too: leave-one-out, as RLOO (Ahmadian et
                                                       al., arXiv 2402.14740) has it for whole trajectories
treerl      ``(V(after) - V(root) + V(after)           TreeRL's global and local advantage; ``n`` episodes pass
            - V(before)) / sqrt(n)``                   through the turn, and each trains it
tree_grpo   ``(r - mean(r of the tree)) / std(same)    Tree-GRPO's intra-tree and inter-tree advantage; a prompt's
            + (r - mean(r of the prompt)) /            trees are the episodes with the same first turn
            std(same)``
=========== ========================================== ==========================================================

``turn`` and ``branch`` differ where branches hold unequally many episodes: a branch that was forked further does not
pull the baseline of ``branch`` towards itself. ``treerl`` also rewards whatever an episode does after it has gone
well. ``tree_grpo`` is one number per episode.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts_hf.rollouts.episode_values import EpisodeValues

FloatArray = NDArray[np.float64]
Scale = Literal["group", "batch", "none"]
Spans = Sequence[tuple[int, int]]

TREE_CREDITS = ("turn", "branch", "treerl", "tree_grpo")
# What TRL adds to a standard deviation that it divides by.
_EPSILON = 1e-4


def tree_advantages(
    credit: str,
    trajectories: Sequence[ArrayLike],
    turn_spans: Sequence[Spans],
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    scale: Scale,
    episodes: ArrayLike | None = None,
) -> list[FloatArray]:
    """Advantages of the policy's turns from the rewards below them.

    Args:
        credit: one of ``TREE_CREDITS``; the module has the formulas.
        trajectories: token ids of prompt and completion, ``[L_i]`` each.
        turn_spans: for each trajectory the half-open spans ``[start, end)`` of its turns, ascending, in positions of
            the trajectory. A turn may be left out where an earlier trajectory of the episode has it, token for token
            in the same history (it is trained there).
        rewards: ``[B]``; NaN for a trajectory that could not be scored, which then counts nowhere.
        groups: ``[B]`` integers; trajectories with the same number answer the same prompt and form one tree.
        scale: as TRL's ``scale_rewards``: divide by the standard deviation (ddof 1) of the group's rewards, of the
            batch's, or not. For ``tree_grpo``, ``"group"`` divides each part by the deviation of its own rewards.
        episodes: ``[B]`` integers; trajectories with the same number are one episode, with one reward, and count once
            wherever they do. None: each is its own.

    Returns:
        ``[L_i]`` float64 for each trajectory: a turn's advantage at its tokens, 0 elsewhere.

    Raises:
        ValueError: numbers of rows that differ, spans that are not ascending or outside the trajectory, another scale
            or credit, an episode of several groups or rewards.
    """
    if credit not in TREE_CREDITS:
        raise ValueError(f"expected credit to be one of {', '.join(TREE_CREDITS)}, got {credit!r}")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"expected scale to be 'group', 'batch' or 'none', got {scale!r}")
    reward = np.asarray(rewards, np.float64)
    group = np.asarray(groups)
    episode = np.arange(len(reward)) if episodes is None else np.asarray(episodes)
    counts = {"trajectories": len(trajectories), "turn_spans": len(turn_spans), "rewards": len(reward)}
    if len(set(counts.values()) | {len(group), len(episode)}) != 1:
        raise ValueError(
            f"expected one entry a trajectory, got {counts}, {len(group)} groups and {len(episode)} episodes"
        )
    for row, spans in enumerate(turn_spans):
        _check_spans(spans, len(np.asarray(trajectories[row])), row)
    _, first, inverse = np.unique(episode, return_index=True, return_inverse=True)
    _check_episodes(first[inverse], episode, reward, group)

    advantages: list[FloatArray] = [np.zeros(0)] * len(reward)
    for number in np.unique(group):
        rows = np.flatnonzero(group == number).tolist()
        values = EpisodeValues([trajectories[row] for row in rows], reward[rows], episode[rows])
        given = [turn_spans[row] for row in rows]
        spans_of = _whole_spans(values, given)
        if credit == "tree_grpo":
            both = None if scale == "group" else _divisor(reward[first], scale)
            by_turn = _tree_grpo(values, given, spans_of, both)
            divisor = 1.0
        else:
            by_turn = {"turn": _turn, "branch": _branch, "treerl": _treerl}[credit](values, spans_of)
            divisor = _divisor(values.rewards if scale == "group" else reward[first], scale)
        for row, spans, turns in zip(rows, spans_of, by_turn, strict=True):
            advantages[row] = np.zeros(len(np.asarray(trajectories[row])))
            own = set(map(tuple, turn_spans[row])) if not np.isnan(reward[row]) else ()
            for (start, end), advantage in zip(spans, turns, strict=True):
                if (start, end) in own:
                    advantages[row][start:end] = advantage / divisor
    return advantages


def _whole_spans(values: EpisodeValues, turn_spans: Sequence[Spans]) -> list[Spans]:
    """The spans of each trajectory, and those of its episode's other trajectories that lie on it."""
    tree = values.tree
    turns: list[set[tuple[int, int]]] = [set() for _ in values.rewards]  # of each episode: start and row of the end
    for index, spans in enumerate(turn_spans):
        path = tree.path(index)
        turns[values.episode[index]] |= {(start, int(path[end - 1])) for start, end in spans}
    whole: list[Spans] = []
    for end_row, episode in zip(tree.end_rows, values.episode, strict=True):
        found = {
            (start, int(tree.depth[row]) + 1)
            for start, row in turns[episode]
            if row <= end_row < tree.subtree_end[row]
        }
        whole.append(sorted(found))
    return whole


# Each of these answers, for every trajectory of a group, one number per turn.


def _turn(values: EpisodeValues, turn_spans: Sequence[Spans]) -> list[list[float]]:
    return [
        [values.values[end] - baseline for end, baseline in _steps(values, index, spans)]
        for index, spans in enumerate(turn_spans)
    ]


def _treerl(values: EpisodeValues, turn_spans: Sequence[Spans]) -> list[list[float]]:
    root = values.values[-1]
    return [
        [
            ((values.values[end] - root) + (values.values[end] - baseline)) / np.sqrt(values.counts[end])
            for end, baseline in _steps(values, index, spans)
        ]
        for index, spans in enumerate(turn_spans)
    ]


def _steps(values: EpisodeValues, index: int, spans: Spans) -> list[tuple[int, float]]:
    """For each turn the row where it ends, and the value before the last turn up to it that parted its trajectory."""
    path = values.tree.path(index)
    baseline = values.values[-1]
    steps = []
    for start, end in spans:
        before = path[start - 1] if start else -1
        if values.counts[path[end - 1]] < values.counts[before]:
            baseline = values.values[before]
        steps.append((int(path[end - 1]), float(baseline)))
    return steps


def _branch(values: EpisodeValues, turn_spans: Sequence[Spans]) -> list[list[float]]:
    paths = [values.tree.path(index) for index in range(len(turn_spans))]
    # The rows where the turns end that continue a history, by the row where the history ends (-1: at the beginning).
    ways: dict[int, set[int]] = {}
    for path, spans in zip(paths, turn_spans, strict=True):
        for start, end in spans:
            ways.setdefault(int(path[start - 1]) if start else -1, set()).add(int(path[end - 1]))
    episodes = {end: values.through(end) for ends in ways.values() for end in ends}

    def against_siblings(before: int, own: int) -> float | None:
        others = [episodes[end] - episodes[own] for end in sorted(ways[before]) if end != own]
        siblings = [float(np.mean(values.rewards[sorted(other)])) for other in others if other]
        return values.values[own] - float(np.mean(siblings)) if siblings and episodes[own] else None

    scored = set(np.flatnonzero(~np.isnan(values.rewards)).tolist())

    def against_others(own: int) -> float:
        others = sorted(scored - episodes[own])
        return values.values[own] - float(np.mean(values.rewards[others])) if others and episodes[own] else 0.0

    known: dict[tuple[int, int], float | None] = {}
    by_turn = []
    for path, spans in zip(paths, turn_spans, strict=True):
        turns: list[float] = []
        last: float | None = None
        for start, end in spans:
            key = (int(path[start - 1]) if start else -1, int(path[end - 1]))
            if key not in known:
                known[key] = against_siblings(*key)
            if (credit := known[key]) is not None:
                last = credit
            # Where a history that the policy did not write parted the episodes, a turn has no siblings.
            turns.append(against_others(key[1]) if last is None else last)
        by_turn.append(turns)
    return by_turn


def _tree_grpo(
    values: EpisodeValues, given: Sequence[Spans], turn_spans: Sequence[Spans], divisor: float | None
) -> list[list[float]]:
    """``given``: as they came; ``divisor``: of both parts, None for the deviation of each part's own rewards."""
    rewards, episode = values.rewards, values.episode
    tree_of = np.full(len(rewards), -1)
    for index in range(len(given) - 1, -1, -1):  # the first trajectory of an episode has the last word
        if given[index]:
            tree_of[episode[index]] = values.tree.path(index)[given[index][0][1] - 1]

    def relative(reward: float, among: FloatArray) -> float:
        return (reward - float(np.nanmean(among))) / (_divisor(among, "group") if divisor is None else divisor)

    by_turn = []
    for index, spans in enumerate(turn_spans):
        reward = float(rewards[episode[index]])
        advantage = 0.0
        if spans and not np.isnan(reward):
            advantage = relative(reward, rewards[tree_of == tree_of[episode[index]]]) + relative(reward, rewards)
        by_turn.append([advantage] * len(spans))
    return by_turn


def _divisor(rewards: FloatArray, scale: str) -> float:
    scored = rewards[~np.isnan(rewards)]
    if scale == "none":
        return 1.0
    return float(np.std(scored, ddof=1)) + _EPSILON if len(scored) > 1 else 1.0


def _check_spans(spans: Spans, length: int, row: int) -> None:
    position = 0
    for start, end in spans:
        if not position <= start < end <= length:
            got = list(map(tuple, spans))
            raise ValueError(f"expected ascending turn spans inside [0, {length}) of trajectory {row}, got {got}")
        position = end


def _check_episodes(first: NDArray[np.intp], episode: NDArray, reward: FloatArray, group: NDArray) -> None:
    """``first``: for each trajectory the first one of its episode."""
    equal = (reward == reward[first]) | (np.isnan(reward) & np.isnan(reward[first]))
    for name, ok, given in (("group", group == group[first], group), ("reward", equal, reward)):
        if not ok.all():
            row = int(np.flatnonzero(~ok)[0])
            raise ValueError(
                f"expected one {name} an episode, got {given[first[row]]} and {given[row]} for trajectories "
                f"{first[row]} and {row} of episode {episode[row]}"
            )
