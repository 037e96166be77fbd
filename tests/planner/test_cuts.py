"""Level 1: cuts against brute force, limits of rows, alignment."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import shapes

from harts_hf.planner import CostModel, PlannerConfig, build_chunk_tree, plan_window
from harts_hf.planner.cuts import PieceLimits, cut_evenly, cut_greedily, cut_whole_paths
from harts_hf.planner.spans import contains, count_below, merge_spans, places_in, rows_of_spans
from harts_hf.planner.walk import CutTable, Walk
from harts_hf.tree import RolloutTree

STEP = CostModel().step()


def walk_of(shape, deepest="last"):
    """A tree and a walk over it."""
    tree = RolloutTree.from_shape(*shape)
    return tree, Walk.of_tree(tree).reordered(deepest=deepest)


@given(shapes(), st.sampled_from(["first", "last"]), st.sampled_from([1, 2, 4]))
def test_walk_and_cut_table(shape, deepest, size):
    """A walk visits every row once, parents first; the table's sums equal sums over its rows."""
    tree, walk = walk_of(shape, deepest)
    rows = np.concatenate(
        [np.arange(row, row + length) for row, length in zip(walk.row.tolist(), walk.length.tolist(), strict=True)]
    )
    assert sorted(rows.tolist()) == list(range(tree.num_tokens))
    place = np.argsort(rows)
    inner = tree.parent >= 0
    assert (place[tree.parent[inner]] < place[inner]).all()
    table = CutTable.build(walk, chunk_size=size, seconds_per=STEP)
    assert table.position[0] == 0 and table.position[-1] == tree.num_tokens
    for cut, stop in enumerate(table.position.tolist()):
        before = np.sort(rows[:stop])
        assert table.pairs[cut] == (tree.depth[before] + 1).sum()
        number = np.full(tree.num_tokens + 1, -1)
        number[before] = np.arange(len(before))
        chunks = build_chunk_tree(number[tree.parent[before]], tree.depth[before], size)
        assert table.linear[cut] + table.partial[cut] == chunks.linear_rows
        if stop < tree.num_tokens:
            assert table.above[cut] == tree.depth[rows[stop]]
            path = [row for run in next(walk.paths_above([stop])) for row in rows[slice(*run)].tolist()]
            assert sorted(path) == tree.path_to(int(rows[stop]))[:-1].tolist()


@given(shapes(), st.integers(4, 40), st.sampled_from([None, 4, 9]))
def test_greedy_pieces_keep_limits(shape, max_rows, max_linear):
    """Pieces cover the walk, hold at most the limits, and none could take the next cut as well (when not aligned)."""
    _, walk = walk_of(shape)
    table = CutTable.build(walk, chunk_size=4, seconds_per=STEP)
    limits = PieceLimits(rows=max_rows, linear_rows=max_linear, aligned=False)
    pieces = cut_greedily(table, limits, chunk_size=4, seconds_per=STEP)
    assert pieces[0].start == 0 and pieces[-1].stop == walk.num_rows
    assert all(a.stop == b.start for a, b in pairwise(pieces))
    linear = (table.linear + table.partial).tolist()
    place = table.position.tolist()

    def fits(start, stop):
        rows = place[stop] - place[start]
        return rows <= max_rows and (max_linear is None or linear[stop] - table.linear[start] <= max_linear)

    for piece in pieces:
        start, stop = place.index(piece.start), place.index(piece.stop)
        assert fits(start, stop)
        assert stop + 1 == len(place) or not fits(start, stop + 1)


@given(shapes())
def test_aligned_cuts_leave_no_chunk_unfinished(shape):
    """Where a chunk boundary or a leaf's end lies within a chunk before the limit, the cut goes there."""
    _, walk = walk_of(shape)
    table = CutTable.build(walk, chunk_size=4, seconds_per=STEP)
    for piece in cut_greedily(table, PieceLimits(rows=12), chunk_size=4, seconds_per=STEP):
        cut = table.position.tolist().index(piece.stop)
        if table.partial[cut]:
            earlier = (table.position < piece.stop) & (table.position > piece.start) & (table.partial == 0)
            assert not (earlier & (table.position >= piece.stop - 4)).any()
            # Nothing better was near, so nothing is given away: the next cut would break the limit.
            assert table.position[cut + 1] - piece.start > 12


@given(st.lists(shapes(), min_size=1, max_size=3), st.integers(0, 3))
def test_even_pieces_are_no_slower_than_greedy_ones(all_shapes, extra):
    """With as many pieces as the greedy cut, or more, the slowest piece is not slower."""
    tables = [CutTable.build(walk_of(shape)[1], chunk_size=4, seconds_per=STEP) for shape in all_shapes]
    limits = PieceLimits(rows=16)
    greedy = [cut_greedily(table, limits, chunk_size=4, seconds_per=STEP) for table in tables]
    count = max(map(len, greedy)) + extra
    even = cut_evenly(tables, limits, count, chunk_size=4, seconds_per=STEP)
    assert all(len(pieces) <= count for pieces in even)
    assert cut_evenly(tables, limits, max(map(len, greedy)) - 1, chunk_size=4, seconds_per=STEP) is None

    def slowest(cuts):
        return max(
            table.seconds[table.position.tolist().index(piece.stop)]
            - table.seconds[table.position.tolist().index(piece.start)]
            for table, pieces in zip(tables, cuts, strict=True)
            for piece in pieces
        )

    assert slowest(even) <= slowest(greedy) * 1.002 + 1e-12  # the search stops within 1e-3 of the least


def whole_paths(walk, **limits):
    """Pieces of whole paths at chunks of 4."""
    table = CutTable.build(walk, chunk_size=4, seconds_per=STEP)
    return cut_whole_paths(walk, table, PieceLimits(**limits), chunk_size=4)


@pytest.mark.exhaustive
@settings(max_examples=300)
@given(shapes(max_nodes=11, max_length=5), st.integers(4, 16), st.none() | st.integers(4, 16))
def test_whole_paths_against_every_split(shape, max_rows, max_linear):
    """Without handoff the rows are the fewest of all splits of the leaves into runs within both budgets."""
    tree, walk = walk_of(shape)
    pieces = whole_paths(walk, rows=max_rows, linear_rows=max_linear)
    leaves = [row for row in range(tree.num_tokens) if tree.subtree_end[row] == row + 1]
    order = [int(walk.row[s] + walk.length[s] - 1) for s in np.flatnonzero(walk.is_leaf)]
    assert sorted(order) == leaves

    def rows_of(run):
        return len(set().union(*(tree.path_to(leaf).tolist() for leaf in run)))

    def linear_rows_of(run):
        chunks = (tree.path_to(leaf)[start : start + 4] for leaf in run for start in range(0, tree.depth[leaf] + 1, 4))
        return sum(map(len, {tuple(chunk.tolist()) for chunk in chunks}))

    def fits(run):
        return rows_of(run) <= max_rows and (max_linear is None or linear_rows_of(run) <= max_linear)

    best = np.inf
    for size in range(len(order)):
        for cuts in combinations(range(1, len(order)), size):
            runs = [order[a:b] for a, b in zip((0, *cuts), (*cuts, len(order)), strict=True)]
            if all(len(run) == 1 or fits(run) for run in runs):
                best = min(best, sum(map(rows_of, runs)))
    assert sum(piece.num_rows for piece in pieces) == best


def test_whole_paths_look_back_further_than_the_last_cut():
    """A forest where the shortest prefix for the last piece would force a longer one before it: 7 rows, not 12."""
    _, walk = walk_of(([-1, 0, 0, 0, 1, 1, 3], [6, 1, 4, 4, 2, 4, 1], [2, 4, 5, 6]))
    assert sum(piece.again for piece in whole_paths(walk, rows=16)) == 7


def test_cut_that_cannot_be_aligned_gives_nothing_away():
    """Two rows of time and no boundary within them: the piece takes both rows."""
    # A root of one row, below it a segment of one row that branches: cuts after one and two rows are unaligned.
    _, walk = walk_of(([-1, 0, 0, 1, 1], [1, 1, 9, 1, 2], [2, 3, 4]))
    table = CutTable.build(walk, chunk_size=4, seconds_per=STEP)
    assert table.position[:4].tolist() == [0, 1, 2, 3] and table.partial[:4].tolist() == [0, 1, 2, 0]
    pieces = cut_greedily(table, PieceLimits(rows=12), chunk_size=4, seconds_per=STEP, seconds=float(table.seconds[2]))
    assert pieces[0].stop == 2


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"max_tokens_per_microbatch": 63},
            "max_tokens_per_microbatch of at least 64 .*one chunk of 64 tokens.*got 63",
        ),
        ({"max_linear_rows": 10}, "max_linear_rows of at least 64"),
        ({"max_graph_tokens": 10}, "max_graph_tokens of at least 64"),
        ({"max_handoff_bytes": -1}, "max_handoff_bytes of at least 0"),
        ({"world_size": 0}, "world_size of at least 1 .*got 0"),
        ({"world_size": True}, "world_size to be an integer, got True"),
        ({"chunk_size": 0}, "chunk_size of at least 1"),
        ({"sharing": "maybe"}, "sharing to be one of auto, always, never, got 'maybe'"),
        ({"execution": "later"}, "execution to be one of auto, replay, nested, keep, got 'later'"),
    ],
)
def test_bad_settings(settings_, message):
    """Each setting that no plan can meet is named, with the smallest that works."""
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**settings_)


def test_long_trajectory_without_handoff_is_said():
    """A single trajectory over the budget runs alone and stands in ``oversized``; with handoff it is cut."""
    tree = RolloutTree.from_shape([-1, 0, 0], [10, 300, 5], [1, 2])
    config = {"max_tokens_per_microbatch": 64, "sharing": "always"}
    whole = plan_window(tree, PlannerConfig(**config, handoff=False))
    cut = plan_window(tree, PlannerConfig(**config))
    assert [whole.microbatches[i].num_rows for i in whole.oversized] == [310]
    assert cut.oversized == () and max(m.num_rows for m in cut.microbatches) <= 64


def test_spans_are_merged():
    """Spans in any order become ascending, and neighbours that touch become one."""
    spans = np.array([[8, 9], [0, 2], [2, 5], [6, 8]])
    assert merge_spans(spans).tolist() == [[0, 5], [6, 9]]


@pytest.mark.parametrize("spans", [[], [[0, 4]], [[3, 5]], [[0, 1], [2, 5], [6, 8]], [[1, 2], [4, 9]]])
def test_rows_in_spans(spans):
    """Whether rows lie in spans, which of theirs they are, and how many are smaller."""
    spans, rows = np.array(spans, np.int64).reshape(-1, 2), np.arange(-1, 11)
    held = rows_of_spans(spans).tolist()
    assert contains(spans, rows).tolist() == [row in held for row in rows]
    assert places_in(spans, rows).tolist() == [held.index(row) if row in held else -1 for row in rows]
    if held:  # a microbatch has rows
        assert count_below(spans, rows).tolist() == [sum(one < row for one in held) for row in rows]
