"""Credit: a tree worked by hand, a dictionary of prefixes as oracle, sum rules, and what does not count."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts_hf.rollouts.credit import TREE_CREDITS, tree_advantages
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
    advantages = tree_advantages("turn", TREE, SPANS, REWARDS, [0, 0, 0, 0], scale="none")
    for row, expected in zip(advantages, BY_HAND, strict=True):
        assert row.dtype == np.float64
        np.testing.assert_allclose(row, expected, atol=1e-15)


def test_scales_are_trls():
    """Group and batch divide by the standard deviation (ddof 1) plus 1e-4, as TRL does."""
    doubled = [*TREE, *TREE]
    rewards = np.array([*REWARDS, 4.0, 0.0, 2.0, 0.0])
    groups = [0] * 4 + [7] * 4
    plain = tree_advantages("turn", doubled, SPANS * 2, rewards, groups, scale="none")
    by_group = tree_advantages("turn", doubled, SPANS * 2, rewards, groups, scale="group")
    by_batch = tree_advantages("turn", doubled, SPANS * 2, rewards, groups, scale="batch")
    for row in range(8):
        group = rewards[:4] if row < 4 else rewards[4:]
        np.testing.assert_allclose(by_group[row], plain[row] / (group.std(ddof=1) + 1e-4))
        np.testing.assert_allclose(by_batch[row], plain[row] / (rewards.std(ddof=1) + 1e-4))


def test_without_forks_it_is_grpo():
    """Conversations that part at their first turn get the group-relative advantage on all their turns."""
    trajectories = [[9, token, 8, 5, 8, 5] for token in range(4)]
    rewards = np.array([0.0, 1.0, 2.0, 5.0])
    advantages = tree_advantages("turn", trajectories, [[(1, 2), (3, 4), (5, 6)]] * 4, rewards, [0] * 4, scale="group")
    for row, reward in zip(advantages, rewards, strict=True):
        expected = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(row, np.array([0, 1, 0, 1, 0, 1]) * expected, atol=1e-12)


def test_groups_do_not_touch():
    """Equal tokens in another group change no value, whatever the order of the rows."""
    first = tree_advantages("turn", TREE, SPANS, REWARDS, [0, 0, 0, 0], scale="group")
    mixed = [row for pair in zip(TREE, TREE, strict=True) for row in pair]
    spans = [row for pair in zip(SPANS, SPANS, strict=True) for row in pair]
    rewards = [value for reward in REWARDS for value in (reward, 3.0)]
    both = tree_advantages("turn", mixed, spans, rewards, [4, 2] * 4, scale="group")
    for row in range(4):
        np.testing.assert_array_equal(both[2 * row], first[row])
        np.testing.assert_array_equal(both[2 * row + 1], np.zeros(len(TREE[row])))


def test_an_unscored_trajectory_counts_nowhere():
    """A NaN reward gives advantage 0 and leaves the values of the others as if the row were not there."""
    advantages = tree_advantages(
        "turn", [*TREE, TREE[0][:4]], [*SPANS, SPANS[0][:1]], [*REWARDS, np.nan], [0] * 5, scale="group"
    )
    alone = tree_advantages("turn", TREE, SPANS, REWARDS, [0] * 4, scale="group")
    np.testing.assert_array_equal(advantages[4], np.zeros(4))
    for row in range(4):
        np.testing.assert_allclose(advantages[row], alone[row], atol=1e-15)
    nothing = tree_advantages("turn", TREE, SPANS, [np.nan] * 4, [0] * 4, scale="batch")
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
    advantages = tree_advantages(
        "turn", trajectories, spans, np.full(len(rewards), 0.3), [0] * len(rewards), scale=scale
    )
    for row in advantages:
        np.testing.assert_allclose(row, 0.0, atol=1e-9)


@given(sampled_trees())
def test_sum_rules(tree):
    """Parting turns add up to value less root value along a path, and to 0 over the leaves of a history."""
    trajectories, spans, rewards = tree
    advantages = tree_advantages("turn", trajectories, spans, rewards, [0] * len(rewards), scale="none")
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


def test_other_credits_of_the_tree_worked_by_hand():
    """Sibling values 1/2 and 1/4 at the first fork; the leaf-weighted and the sibling mean are the same here."""
    branch = tree_advantages("branch", TREE, SPANS, REWARDS, [0] * 4, scale="none")
    np.testing.assert_allclose(branch[0], [0, 0, 1 / 4, 0, 1, 0, 1])
    np.testing.assert_allclose(branch[3], [0, 0, -1 / 4, 0, -1 / 2, 0, -1 / 2])
    treerl = tree_advantages("treerl", TREE, SPANS, REWARDS, [0] * 4, scale="none")
    first, second = (1 / 8 + 1 / 8) / math.sqrt(2), 5 / 8 + 1 / 2
    np.testing.assert_allclose(treerl[0], [0, 0, first, 0, second, 0, second])
    tree_grpo = tree_advantages("tree_grpo", TREE, SPANS, REWARDS, [0] * 4, scale="group")
    intra = (1 - 1 / 2) / (np.std([1, 0], ddof=1) + 1e-4)
    inter = (1 - 3 / 8) / (np.std(REWARDS, ddof=1) + 1e-4)
    np.testing.assert_allclose(tree_grpo[0], np.array([0, 0, 1, 0, 1, 0, 1]) * (intra + inter))


def test_a_branch_is_not_weighed_by_its_leaves():
    """Three leaves below one branch of two: its sibling's baseline is their mean, not that of all leaves."""
    rows = [[9, 1, 8, 3], [9, 1, 8, 4], [9, 1, 8, 5], [9, 2]]
    spans = [[(1, 2), (3, 4)]] * 3 + [[(1, 2)]]
    rewards = [1.0, 1.0, 0.0, 0.0]
    branch = tree_advantages("branch", rows, spans, rewards, [0] * 4, scale="none")
    np.testing.assert_allclose(branch[3][1], -2 / 3)
    np.testing.assert_allclose(branch[0], [0, 2 / 3, 0, 1 / 2])
    turn = tree_advantages("turn", rows, spans, rewards, [0] * 4, scale="none")
    np.testing.assert_allclose(turn[3][1], -1 / 2)


def by_prefixes(credit, trajectories, turn_spans, rewards, groups, scale, episodes):
    """The same advantages, one turn at a time, from a dictionary of all prefixes."""
    advantages = []
    spread = lambda scored: float(np.std(scored, ddof=1)) + 1e-4 if len(scored) > 1 else 1.0  # noqa: E731
    reward_of = dict(zip(episodes, rewards, strict=True))
    known = {episode for episode, reward in reward_of.items() if not math.isnan(reward)}
    for row, tokens in enumerate(trajectories):
        mates = [other for other in range(len(groups)) if groups[other] == groups[row]]
        through = {}  # prefix -> episodes
        for other in mates:
            for end in range(len(trajectories[other]) + 1):
                through.setdefault(tuple(trajectories[other][:end]), set()).add(episodes[other])
        everyone = sorted({episodes[other] for other in mates} & known)
        mean = lambda some: float(np.mean([reward_of[e] for e in sorted(some)])) if some else 0.0  # noqa: E731
        value = {prefix: mean(passing & known) for prefix, passing in through.items()}
        root, own = mean(everyone), reward_of[episodes[row]]
        of_group = {"group": spread([reward_of[e] for e in everyone]), "none": 1.0}.get(
            scale, spread([reward_of[e] for e in known])
        )
        result = np.zeros(len(tokens))
        baseline, compared = root, None
        for start, end in turn_spans[row]:
            before, after = tuple(tokens[:start]), tuple(tokens[:end])
            if len(through[after]) < len(through[before]):
                baseline = value[before]
            if credit == "turn":
                result[start:end] = (value[after] - baseline) / of_group
            if credit == "treerl":
                total = value[after] - root + value[after] - baseline
                result[start:end] = total / math.sqrt(len(through[after])) / of_group
            if credit == "branch":
                siblings = {
                    tuple(trajectories[other][:stop])
                    for other in mates
                    for begin, stop in turn_spans[other]
                    if begin == start and tuple(trajectories[other][:begin]) == before
                } - {after}
                rivals = [(through[sibling] & known) - through[after] for sibling in siblings]
                rivals = [mean(rival) for rival in rivals if rival]
                if rivals and through[after] & known:
                    compared = value[after] - float(np.mean(rivals))
                others = set(everyone) - through[after]
                alone = value[after] - mean(others) if others and through[after] & known else 0.0
                result[start:end] = (alone if compared is None else compared) / of_group
            if credit == "tree_grpo":
                firsts = {}
                for other in mates:
                    if turn_spans[other] and episodes[other] not in firsts:
                        firsts[episodes[other]] = tuple(trajectories[other][: turn_spans[other][0][1]])
                tree = [e for e in everyone if firsts.get(e) == firsts[episodes[row]]]
                within = spread([reward_of[e] for e in tree]) if scale == "group" else of_group
                result[start:end] = (own - mean(tree)) / within + (own - root) / of_group
        advantages.append(np.zeros(len(tokens)) if math.isnan(own) else result)
    return advantages


@st.composite
def episodes_on_trees(draw):
    """Ragged rows of turns of one or two tokens; rows of one episode share anything or nothing; some are unscored."""
    rows, spans = [], []
    for _ in range(draw(st.integers(1, 9))):
        # A sub-agent's prompt is another one: rows may part at their first token.
        tokens, turns = list(draw(st.sampled_from([[9], [9, 9], [7]]))), []
        for _ in range(draw(st.integers(0, 4))):
            turn = draw(st.lists(st.integers(0, 1), min_size=1, max_size=2))
            turns.append((len(tokens), len(tokens) + len(turn)))
            tokens += [*turn, *[8] * draw(st.integers(0, 1))]
        rows.append(tokens)
        spans.append(turns)
    episodes = draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
    reward = [draw(st.sampled_from([0.0, 0.25, 1.0, math.nan])) for _ in range(6)]
    group = [draw(st.integers(0, 1)) for _ in range(6)]
    return rows, spans, [reward[e] for e in episodes], [group[e] for e in episodes], episodes


@pytest.mark.essential("branch")
@pytest.mark.parametrize("credit", TREE_CREDITS)
@given(data=episodes_on_trees(), scale=st.sampled_from(["group", "batch", "none"]))
def test_credits_equal_a_dictionary_of_prefixes(credit, data, scale):
    """Every credit, with several rows an episode; float64, sums of at most nine numbers below 1e5."""
    rows, spans, rewards, groups, episodes = data
    expected = by_prefixes(credit, rows, spans, rewards, groups, scale, episodes)
    advantages = tree_advantages(credit, rows, spans, rewards, groups, scale=scale, episodes=episodes)
    for row, oracle in zip(advantages, expected, strict=True):
        assert row.dtype == np.float64
        np.testing.assert_allclose(row, oracle, rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("credit", TREE_CREDITS)
@given(data=episodes_on_trees())
def test_without_episodes_each_row_is_its_own(credit, data):
    """Bit for bit what numbering the rows gives, and what any other numbers give."""
    rows, spans, rewards, groups, _ = data
    plain = tree_advantages(credit, rows, spans, rewards, groups, scale="group")
    for numbers in (np.arange(len(rows)), 7 * np.arange(len(rows)) + 3):
        numbered = tree_advantages(credit, rows, spans, rewards, groups, scale="group", episodes=numbers)
        for one, other in zip(plain, numbered, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("credit", TREE_CREDITS)
def test_a_row_twice_in_an_episode_changes_nothing(credit):
    """A conversation that comes back as several equal rows, or as its own prefixes, weighs as one."""
    rows = [row for row in TREE for _ in range(2)] + [TREE[0][:4]]
    spans = [row for row in SPANS for _ in range(2)] + [SPANS[0][:1]]
    episodes = [0, 0, 1, 1, 2, 2, 3, 3, 0]
    rewards = [REWARDS[episode] for episode in episodes]
    alone = tree_advantages(credit, TREE, SPANS, REWARDS, [0] * 4, scale="group")
    several = tree_advantages(credit, rows, spans, rewards, [0] * 9, scale="group", episodes=episodes)
    for row, episode in zip(several[:8], episodes[:8], strict=True):
        np.testing.assert_allclose(row, alone[episode], atol=1e-12)
    np.testing.assert_allclose(several[8], alone[0][:4], atol=1e-12)


@pytest.mark.essential("turn", "treerl")
@pytest.mark.parametrize("credit", TREE_CREDITS)
@given(data=episodes_on_trees())
def test_turns_trained_in_an_earlier_row_may_be_left_out(credit, data):
    """Masks that train a token once leave the others' advantages as they are."""
    rows, spans, rewards, groups, episodes = data
    whole = tree_advantages(credit, rows, spans, rewards, groups, scale="none", episodes=episodes)
    seen, once = set(), []
    for tokens, turns, episode in zip(rows, spans, episodes, strict=True):
        keys = [(episode, start, *tokens[:end]) for start, end in turns]
        once.append([turn for turn, key in zip(turns, keys, strict=True) if key not in seen])
        seen.update(keys)
    advantages = tree_advantages(credit, rows, once, rewards, groups, scale="none", episodes=episodes)
    for row, expected, turns, tokens in zip(advantages, whole, once, rows, strict=True):
        trained = np.zeros(len(tokens))
        for start, end in turns:
            trained[start:end] = 1
        np.testing.assert_array_equal(row, expected * trained)


def test_an_episode_does_not_part_from_itself():
    """Its second row goes another way from the same history: what it did before the two parted counts in both."""
    rows = [[9, 1, 8, 3], [9, 1, 8, 4], [9, 2]]
    spans = [[(1, 2), (3, 4)], [(1, 2), (3, 4)], [(1, 2)]]
    for credit, first in (("turn", 1 / 2), ("branch", 1.0)):
        advantages = tree_advantages(credit, rows, spans, [1, 1, 0], [0] * 3, scale="none", episodes=[5, 5, 6])
        np.testing.assert_allclose(advantages[0], [0, first, 0, first])
        np.testing.assert_allclose(advantages[1], [0, first, 0, first])


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
        ({"episodes": [0, 1, 2]}, "expected one entry a trajectory, got .* and 3 episodes"),
        ({"episodes": [4, 5, 6, 5]}, r"expected one reward an episode, got 0\.0 and 0\.5 for .* 1 and 3 of episode 5"),
        (
            {"episodes": [0, 1, 2, 1], "groups": [0, 0, 0, 1]},
            "expected one group an episode, got 0 and 1 for trajectories 1 and 3 of episode 1",
        ),
    ],
)
def test_input_that_does_not_fit(changes, message):
    """Rows, spans, episodes and the scale are checked."""
    arguments = {"turn_spans": SPANS, "rewards": [1, 0, 0.5, 0.5], "groups": [0] * 4, "scale": "none", **changes}
    with pytest.raises(ValueError, match=message):
        tree_advantages("turn", TREE, **arguments)


def test_credits_that_are_none():
    """The message has those that are."""
    with pytest.raises(ValueError, match="expected credit to be one of turn, branch, treerl, tree_grpo, got 'token'"):
        tree_advantages("token", TREE, SPANS, REWARDS, [0] * 4, scale="none")
