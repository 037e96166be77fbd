"""Credit per turn: a tree worked by hand, sum rules, and what does not count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts_hf.rollouts.credit import turn_advantages
from harts_hf.tree import RolloutTree

# Prompt 9 9, then turns of one token (1 to 6), the environment's 8 between them:
#
#   9 9 ─┬─ 1 ── 8 ─┬─ 3 ── 8 ── 5      reward 1     value after turn: 1 -> 1/2, 2 -> 1/4
#        │          └─ 4 ── 8 ── 5      reward 0     root: 3/8
#        └─ 2 ── 8 ─┬─ 3                reward 1/2
#                   └─ 4 ── 8 ── 6      reward 0
TREE = [[9, 9, 1, 8, 3, 8, 5], [9, 9, 1, 8, 4, 8, 5], [9, 9, 2, 8, 3], [9, 9, 2, 8, 4, 8, 6]]
SPANS = [[(2, 3), (4, 5), (6, 7)], [(2, 3), (4, 5), (6, 7)], [(2, 3), (4, 5)], [(2, 3), (4, 5), (6, 7)]]
REWARDS = [1.0, 0.0, 0.5, 0.0]
BY_HAND = [
    [0, 0, 1 / 8, 0, 1 / 2, 0, 1 / 2],
    [0, 0, 1 / 8, 0, -1 / 2, 0, -1 / 2],
    [0, 0, -1 / 8, 0, 1 / 4],
    [0, 0, -1 / 8, 0, -1 / 4, 0, -1 / 4],
]


def test_a_tree_worked_by_hand():
    """Each parting turn gets the change of value, and the turns below it share that."""
    advantages = turn_advantages(TREE, SPANS, REWARDS, [0, 0, 0, 0], scale="none")
    for row, expected in zip(advantages, BY_HAND, strict=True):
        assert row.dtype == np.float64
        np.testing.assert_allclose(row, expected, atol=1e-15)


def test_scales_are_trls():
    """Group and batch divide by the standard deviation (ddof 1) plus 1e-4, as TRL does."""
    doubled = [*TREE, *TREE]
    rewards = np.array([*REWARDS, 4.0, 0.0, 2.0, 0.0])
    groups = [0] * 4 + [7] * 4
    plain = turn_advantages(doubled, SPANS * 2, rewards, groups, scale="none")
    by_group = turn_advantages(doubled, SPANS * 2, rewards, groups, scale="group")
    by_batch = turn_advantages(doubled, SPANS * 2, rewards, groups, scale="batch")
    for row in range(8):
        group = rewards[:4] if row < 4 else rewards[4:]
        np.testing.assert_allclose(by_group[row], plain[row] / (group.std(ddof=1) + 1e-4))
        np.testing.assert_allclose(by_batch[row], plain[row] / (rewards.std(ddof=1) + 1e-4))


def test_without_forks_it_is_grpo():
    """Conversations that part at their first turn get the group-relative advantage on all their turns."""
    trajectories = [[9, token, 8, 5, 8, 5] for token in range(4)]
    rewards = np.array([0.0, 1.0, 2.0, 5.0])
    advantages = turn_advantages(trajectories, [[(1, 2), (3, 4), (5, 6)]] * 4, rewards, [0] * 4, scale="group")
    for row, reward in zip(advantages, rewards, strict=True):
        expected = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(row, np.array([0, 1, 0, 1, 0, 1]) * expected, atol=1e-12)


def test_groups_do_not_touch():
    """Equal tokens in another group change no value, whatever the order of the rows."""
    first = turn_advantages(TREE, SPANS, REWARDS, [0, 0, 0, 0], scale="group")
    mixed = [row for pair in zip(TREE, TREE, strict=True) for row in pair]
    spans = [row for pair in zip(SPANS, SPANS, strict=True) for row in pair]
    rewards = [value for reward in REWARDS for value in (reward, 3.0)]
    both = turn_advantages(mixed, spans, rewards, [4, 2] * 4, scale="group")
    for row in range(4):
        np.testing.assert_array_equal(both[2 * row], first[row])
        np.testing.assert_array_equal(both[2 * row + 1], np.zeros(len(TREE[row])))


def test_an_unscored_trajectory_counts_nowhere():
    """A NaN reward gives advantage 0 and leaves the values of the others as if the row were not there."""
    advantages = turn_advantages(
        [*TREE, TREE[0][:4]], [*SPANS, SPANS[0][:1]], [*REWARDS, np.nan], [0] * 5, scale="group"
    )
    alone = turn_advantages(TREE, SPANS, REWARDS, [0] * 4, scale="group")
    np.testing.assert_array_equal(advantages[4], np.zeros(4))
    for row in range(4):
        np.testing.assert_allclose(advantages[row], alone[row], atol=1e-15)
    nothing = turn_advantages(TREE, SPANS, [np.nan] * 4, [0] * 4, scale="batch")
    assert all((row == 0).all() for row in nothing)


@st.composite
def sampled_trees(draw):
    """Trees as a sampler makes them: full forks at every turn, few tokens so that siblings may coincide."""
    branching = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    histories = [[9]]
    for factor in branching:
        histories = [[*history, draw(st.integers(0, 2)), 8] for history in histories for _ in range(factor)]
    trajectories = [history[:-1] for history in histories]
    rewards = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=len(histories), max_size=len(histories)))
    spans = [[(1 + 2 * turn, 2 + 2 * turn) for turn in range(len(branching))]] * len(histories)
    return trajectories, spans, np.array(rewards)


@given(sampled_trees(), st.sampled_from(["group", "batch", "none"]))
def test_equal_rewards_teach_nothing(tree, scale):
    """Where all leaves got the same, every advantage is 0."""
    trajectories, spans, rewards = tree
    advantages = turn_advantages(trajectories, spans, np.full(len(rewards), 0.3), [0] * len(rewards), scale=scale)
    for row in advantages:
        np.testing.assert_allclose(row, 0.0, atol=1e-9)


@given(sampled_trees())
def test_sum_rules(tree):
    """Parting turns add up to value less root value along a path, and to 0 over the leaves of a history."""
    trajectories, spans, rewards = tree
    advantages = turn_advantages(trajectories, spans, rewards, [0] * len(rewards), scale="none")
    rows = RolloutTree.from_trajectories(trajectories)
    values = {}
    for row, tokens in enumerate(trajectories):
        for end in range(1, len(tokens) + 1):
            values.setdefault(tuple(tokens[:end]), []).append(rewards[row])
    means = {history: np.mean(leaves) for history, leaves in values.items()}
    sums_below: dict[tuple[int, ...], float] = {}
    for row, tokens in enumerate(trajectories):
        parted, path = 0.0, rows.path(row)
        for start, end in spans[row]:
            before = tuple(tokens[:start])
            sums_below[before] = sums_below.get(before, 0.0) + advantages[row][start]
            if rows.occurrence_counts[path[end - 1]] < rows.occurrence_counts[path[start - 1]]:
                parted += advantages[row][start]
                np.testing.assert_allclose(advantages[row][start], means[tuple(tokens[:end])] - means[before])
        np.testing.assert_allclose(parted, means[tuple(tokens)] - rewards.mean(), atol=1e-9)
    for before, total in sums_below.items():
        leaves = values[before]
        # Where nothing parts, the turn carries the credit of the fork above, the same for all leaves below.
        if len({tuple(t[: len(before) + 1]) for t in trajectories if tuple(t[: len(before)]) == before}) > 1:
            assert abs(total) < 1e-9 * max(1, len(leaves))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [0.0] * 3}, "expected one entry a trajectory"),
        ({"groups": [0] * 5}, "expected one entry a trajectory"),
        ({"turn_spans": SPANS[:3]}, "expected one entry a trajectory"),
        ({"turn_spans": [*SPANS[:3], [(2, 9)]]}, "ascending turn spans inside .* of trajectory 3"),
        ({"turn_spans": [[(4, 5), (2, 3)], *SPANS[1:]]}, "ascending turn spans inside .* of trajectory 0"),
        ({"turn_spans": [[(2, 2)], *SPANS[1:]]}, "ascending turn spans inside .* of trajectory 0"),
        ({"scale": "std"}, "expected scale to be 'group', 'batch' or 'none', got 'std'"),
    ],
)
def test_input_that_does_not_fit(changes, message):
    """Rows, spans and the scale are checked."""
    arguments = {"turn_spans": SPANS, "rewards": REWARDS, "groups": [0] * 4, "scale": "none", **changes}
    scale = arguments.pop("scale")
    with pytest.raises(ValueError, match=message):
        turn_advantages(TREE, *arguments.values(), scale=scale)
