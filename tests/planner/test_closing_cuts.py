"""Cuts that tie no finished subtree to an unfinished one: memory that does not grow with the width of a tree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_hf import PlannerConfig, RolloutTree, plan_window
from harts_hf.planner.cuts import PieceLimits, cut_greedily
from harts_hf.planner.trials import Task
from harts_hf.planner.walk import CutTable, Walk


def histories(prompts: int, turns: int = 8, seed: int = 1) -> RolloutTree:
    """Spines of equal lengths behind one prompt, a fork at every turn."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 80, (turns, 2))
    system, rows = rng.integers(2, 500, 100), []
    for prompt in range(prompts):
        history = np.append(system, [1000 + prompt])
        for turn, fork in lengths.tolist():
            history = np.append(history, rng.integers(2, 500, turn))
            rows.append(np.append(history, rng.integers(2, 500, fork)))
    return RolloutTree.from_trajectories(rows)


@pytest.mark.parametrize("execution", ["replay", "nested"])
def test_handoff_stays_flat_when_a_tree_grows(execution):
    """Eight times the histories under the same limits: handed bytes stay below twice those of one history."""
    config = PlannerConfig(max_tokens_per_microbatch=256, max_graph_tokens=512, sharing="always", execution=execution)
    one = plan_window(histories(1), config)
    limit = 2 * one.peak_handoff_bytes
    limited = PlannerConfig(**{**vars(config), "max_handoff_bytes": limit})
    eight = plan_window(histories(8), limited)
    eight.validate()
    assert eight.tree.num_tokens > 7 * one.tree.num_tokens
    assert eight.peak_handoff_bytes <= limit
    assert eight.peak_graph_tokens <= 512


def test_nested_forwards_each_row_once_on_a_wide_tree():
    """With graphs of four microbatches, as many as a history needs, no trunk is dropped and run forward again."""
    config = PlannerConfig(max_tokens_per_microbatch=256, max_graph_tokens=1024, sharing="always", execution="nested")
    schedule = plan_window(histories(20), config)
    assert len(schedule.microbatches) > 48
    assert schedule.forward_tokens < 1.1 * schedule.tree.num_tokens
    assert schedule.peak_handoff_tokens < 1000


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), budget=st.integers(64, 200))
def test_no_piece_ties_subtrees(seed, budget):
    """Of a piece that finishes what only earlier pieces hold, no row is above the row that follows the piece."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(2, 50, rng.integers(2, 150))]
    while len(rows) < 9:
        base = rows[rng.integers(len(rows))]
        rows.append(np.concatenate([base[: rng.integers(len(base) + 1)], rng.integers(2, 50, rng.integers(1, 90))]))
    tree = RolloutTree.from_trajectories(rows)
    task = Task.of(tree, PlannerConfig(max_tokens_per_microbatch=budget))
    table = CutTable.build(Walk.of_tree(tree), chunk_size=64, seconds_per=task.seconds_per)
    limits = PieceLimits(rows=budget, closing=True)
    pieces = cut_greedily(table, limits, chunk_size=64, seconds_per=task.seconds_per)
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert pieces[-1].stop == tree.num_tokens and max(piece.num_rows for piece in pieces) <= budget
    piece_of = np.repeat(np.arange(len(pieces)), [piece.num_rows for piece in pieces])
    for number, piece in enumerate(pieces[:-1]):
        above_start = path(tree, tree.parent[piece.start])
        above_stop = path(tree, tree.parent[piece.stop])
        finished = [row for row in above_start if row not in above_stop]
        open_pieces = {piece_of[row] for row in above_stop if row < piece.start}
        if any(piece_of[row] not in open_pieces for row in finished):
            assert not any(piece_of[row] == number for row in above_stop)


def path(tree: RolloutTree, row: int) -> list[int]:
    """A row and its ancestors."""
    rows = []
    while row >= 0:
        rows.append(int(row))
        row = tree.parent[row]
    return rows
