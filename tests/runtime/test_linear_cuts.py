"""One linear-attention layer cut into microbatches, bit for bit: `pytest tests/runtime/test_linear_cuts.py`.

Outputs and states are those of the uncut tree at any cut. Input gradients are, for one trajectory's upstream gradient
at a time, wherever the trajectory's gradients in the chunk that a cut runs through come from one side of the cut. From
both sides they are the sum of two products instead of one: right, but rounded once more.
"""

import numpy as np
import pytest
import torch
from support.rules import INPUT_NAMES, RULES, rule_inputs, tree_tables, with_grad
from support.schedules import cut_schedule, passing

from harts_hf.batch import build_batches
from harts_hf.modeling.handoff import Handoff
from harts_hf.modeling.mixers import rule_on
from harts_hf.planner.chunks import build_chunk_tree
from harts_hf.runtime.lives import count_readers
from harts_hf.tree import RolloutTree

ALIGNED = [[64], [128], [64, 128]]
UNALIGNED = [[1], [63], [65], [80], [127], [3, 40, 64, 90, 100, 130]]
ALSO_BFLOAT16 = [[64, 128], [80]]
on_layers = pytest.mark.parametrize("rule", RULES)


def at_cuts(*cuts: list[int]) -> pytest.MarkDecorator:
    """Float32 at all of them; bfloat16, which takes the same pieces, at those of ``ALSO_BFLOAT16``."""
    cases = [pytest.param(one, torch.float32, id=str(one)) for one in cuts]
    for one in filter(ALSO_BFLOAT16.__contains__, cuts):
        cases.append(pytest.param(one, torch.bfloat16, id=f"{one}-bfloat16", marks=pytest.mark.exhaustive))
    return pytest.mark.parametrize(("cuts", "dtype"), cases)


def comb() -> RolloutTree:
    """One long path first in preorder, and branches off it at, before and after the cuts."""
    rng = np.random.default_rng(0)
    path = rng.integers(2, 50, 200)
    rows = [path, path[:70], path[:128]]
    for child, (depth, size) in enumerate(((2, 70), (64, 10), (65, 130), (80, 60), (85, 5), (127, 70), (140, 20))):
        rows.append(np.concatenate([path[:depth], [50 + child], rng.integers(2, 50, size)]))
    rows.append(np.concatenate([rows[5][:100], [90], rng.integers(2, 50, 40)]))
    return RolloutTree.from_trajectories(rows)


class CutLayer:
    """The rule on a tree that is cut, run through exports and imports, trunks first and backward in reverse."""

    def __init__(self, rule: str, tree: RolloutTree, cuts: list[int], inputs: list[torch.Tensor]) -> None:
        self.schedule = cut_schedule(tree, cuts)
        self.schedule.validate()
        self.batches = build_batches(self.schedule)
        self.handoff = Handoff(count_readers(self.batches))
        self.handoff.keeping = True
        self.leaves = with_grad(inputs)
        self.outputs = []
        for batch, microbatch in zip(self.batches, self.schedule.microbatches, strict=True):
            rows = torch.from_numpy(microbatch.rows.copy())
            q, k, v, g, beta = (leaf[rows][None] for leaf in self.leaves)
            run = rule_on(passing(batch, self.handoff), 0, RULES[rule])
            self.outputs.append(run(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0][0])

    @property
    def output(self) -> torch.Tensor:
        """``[N, HV, V]`` of all pieces."""
        return torch.cat([output.detach() for output in self.outputs])

    def gradients(self, upstream: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of the inputs; can be asked for again."""
        for slot in self.handoff._slots.values():
            slot.gradients, slot.contributions = [], 0
        totals = [torch.zeros_like(leaf) for leaf in self.leaves]
        for output, microbatch in reversed([*zip(self.outputs, self.schedule.microbatches, strict=True)]):
            rows = torch.from_numpy(microbatch.rows.copy())
            inputs = [*self.leaves, self.handoff.anchor]
            found = torch.autograd.grad(output, inputs, upstream[rows], retain_graph=True, allow_unused=True)
            for total, gradient in zip(totals, found, strict=False):
                total += gradient  # pieces hold different rows: nothing but zeros is added
        return totals


def both(rule: str, cuts: list[int], dtype: torch.dtype) -> tuple[RolloutTree, CutLayer, torch.Tensor, list]:
    """The tree, the cut layer, and the whole one's output and inputs."""
    tree = comb()
    inputs = rule_inputs(rule, tree.num_tokens, value_heads=2, dtype=dtype)
    whole = with_grad(inputs)
    return tree, CutLayer(rule, tree, cuts, inputs), RULES[rule](*whole, tree_tables(tree)).output, whole


@on_layers
@at_cuts(*ALIGNED, *UNALIGNED)
def test_outputs_and_states(rule, dtype, cuts):
    """Every output, and every state that is handed over, equals the uncut tree's."""
    tree, cut, expected, whole = both(rule, cuts, dtype)
    assert torch.equal(cut.output, expected)
    chunks = build_chunk_tree(tree.parent, tree.depth, 64)
    last_rows = chunks.rows[np.arange(chunks.num_nodes), chunks.lengths - 1]
    states = RULES[rule](*whole, tree_tables(tree), export_nodes=torch.arange(chunks.num_nodes)).states
    num_states = 0
    for batch, microbatch in zip(cut.batches, cut.schedule.microbatches, strict=True):
        if "states" not in batch.exports:
            continue
        (handed,) = cut.handoff.slot(batch.id, "states", 0).values
        assert handed.dtype == torch.float32
        ends = batch.linear.gather.index.view(batch.linear.num_nodes, -1)[batch.exports["states"], 63]
        own = microbatch.rows[ends.numpy() - (batch.linear.gather.num_rows - batch.num_rows)]
        for state, row in zip(handed, own, strict=True):
            (node,) = np.flatnonzero(last_rows == row)
            assert torch.equal(state, states[node])
            num_states += 1
    assert num_states > 0 or cuts[-1] < 64


def upstream_of(path: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A random gradient of one trajectory's outputs."""
    upstream = torch.zeros_like(like)
    upstream[path] = torch.randn(len(path), *like.shape[1:]).to(like.dtype)
    return upstream


def assert_same_gradients(cut: CutLayer, expected: torch.Tensor, whole: list, upstream: torch.Tensor) -> None:
    """Bit for bit, for every input."""
    reference = torch.autograd.grad(expected, whole, upstream, retain_graph=True)
    for name, one, two in zip(INPUT_NAMES, cut.gradients(upstream), reference, strict=True):
        assert torch.equal(one, two), f"{name}: {(one - two).abs().max().item():.1e}"


def above_a_cut(tree: RolloutTree, cuts: list[int], path: np.ndarray) -> np.ndarray:
    """Which rows of a path lie in a chunk that a cut runs through, above its last cut."""
    owner = np.searchsorted(cuts, path, side="right")
    chunk = tree.depth[path] // 64
    last_owner = owner[np.searchsorted(chunk, chunk, side="right") - 1]
    return owner != last_owner


@pytest.mark.essential("[64]-gated", "[64, 128]-kimi", "[65]-gated", "[3, 40, 64, 90, 100, 130]-kimi")
@on_layers
@at_cuts(*ALIGNED, *UNALIGNED)
def test_gradients(rule, dtype, cuts):
    """A trajectory's gradients with its loss on every row but those above a cut within the cut's chunk.

    So on every row for a trajectory that is cut at chunk boundaries only.
    """
    torch.manual_seed(0)
    tree, cut, expected, whole = both(rule, cuts, dtype)
    whole_paths = 0
    for index in range(tree.num_trajectories):
        path = tree.path(index)
        above = above_a_cut(tree, cuts, path)
        whole_paths += not above.any() and len(np.unique(np.searchsorted(cuts, path, side="right"))) > 1
        upstream = upstream_of(torch.from_numpy(path), expected)
        upstream[torch.from_numpy(path[above])] = 0
        assert_same_gradients(cut, expected, whole, upstream)
    assert whole_paths > 0 or cuts not in ALIGNED


@pytest.mark.essential("[80]-kimi", "[127]-gated")
@on_layers
@at_cuts(*UNALIGNED)
def test_gradients_from_one_piece(rule, dtype, cuts):
    """A trajectory's gradients with its loss in one microbatch, above cuts or below them."""
    torch.manual_seed(0)
    tree, cut, expected, whole = both(rule, cuts, dtype)
    owner = torch.from_numpy(np.searchsorted(cuts, np.arange(tree.num_tokens), side="right"))
    for index in range(tree.num_trajectories):
        path = torch.from_numpy(tree.path(index))
        for piece in owner[path].unique()[:-1]:  # the last one alone is part of the test above
            upstream = upstream_of(path, expected)
            upstream[owner != piece] = 0
            assert_same_gradients(cut, expected, whole, upstream)


@on_layers
def test_gradients_from_both_sides_of_an_unaligned_cut(rule):
    """Within the cut chunk from both sides: one more rounding, in float64 below 1e-13 of the largest gradient.

    Measured: 1.1e-15 of it. Not bit for bit: the trunk's backward runs last, so its rows' gradients cannot enter
    through the dependent's copy of the chunk.
    """
    torch.manual_seed(0)
    tree, cut, expected, whole = both(rule, [80], torch.float64)
    for index in range(tree.num_trajectories):
        upstream = upstream_of(torch.from_numpy(tree.path(index)), expected)
        reference = torch.autograd.grad(expected, whole, upstream, retain_graph=True)
        for name, one, two in zip(INPUT_NAMES, cut.gradients(upstream), reference, strict=True):
            assert (one - two).abs().max() <= 1e-13 * two.abs().max(), name
