"""The planner's counts of handed rows and states against what a running window keeps."""

import pytest
import torch
from support.models import VOCAB, tiny_model
from support.schedules import random_schedule
from support.trees import branching, random_trajectories

from harts_hf import PlannerConfig, RolloutTree, patch
from harts_hf.modeling import LABEL_VALUES
from harts_hf.planner.lives import gradient_lives, value_lives
from harts_hf.runtime import TreeValues, TreeWindow, WindowRun


def kept(run, layer, kind, gradients):
    """Rows of one layer whose values, or gradient sums, are kept, over all trunks."""
    slots = [slot for (_, of, index), slot in run.handoff._slots.items() if (of, index) == (kind, layer)]
    tensors = [(slot.gradients if gradients else slot.values, slot.dims) for slot in slots]
    return sum(found[0].shape[dims[0]] for found, dims in tensors if found)


def planned(lives, position, sizes):
    """What the planner says is left after an op: what ends with the op is freed."""
    return sum(sizes[trunk] for trunk, first, last in lives if first <= position < last)


def check(run, window):
    """Runs the schedule and compares after every op."""
    schedule = window.schedule
    ops, exports = schedule.ops(dummies=False), schedule.handed
    trunks = [microbatch.trunk_ids for microbatch in schedule.microbatches]
    values, gradients = value_lives(ops, trunks), gradient_lives(ops, trunks)
    rows = {trunk: export.rows for trunk, export in exports.items()}
    states = {trunk: export.states for trunk, export in exports.items()}
    seen = []

    def compare():
        position = len(seen)
        seen.append(kept(run, 1, "keys", False))
        assert seen[-1] == planned(values, position, rows)
        assert kept(run, 0, "states", False) == planned(values, position, states)
        assert kept(run, 1, "keys", True) == planned(gradients, position, rows)
        # A dependent that reads rows of a trunk need not read its states: the planner counts sums from the first one.
        assert kept(run, 0, "states", True) <= planned(gradients, position, states)

    forward, free = run._forward, run.handoff.free

    def forward_and_compare(*args):
        out = forward(*args)
        compare()
        return out

    def free_and_compare(trunk):
        free(trunk)
        compare()

    run._forward, run.handoff.free = forward_and_compare, free_and_compare
    num_tokens = window.tree.num_tokens
    coefficients = TreeValues(rows={"log_prob": torch.ones(num_tokens)})
    if schedule.execution == "nested":
        wanted = dict.fromkeys(LABEL_VALUES, torch.ones(num_tokens, dtype=torch.bool))
        run.backward_unscored(coefficients, wanted, torch.Tensor.backward)
    else:
        run.score()
        run.backward(coefficients, torch.Tensor.backward)
    assert len(seen) == len(ops) and max(seen) > 0


@pytest.mark.essential("qwen3_5_text-nested", "bailing_hybrid-replay")
@pytest.mark.parametrize("execution", ["replay", "nested", "keep"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "bailing_hybrid"])
def test_planned_windows(family, execution):
    """After every op as many handed rows and states, and gradients of them, are kept as the planner counts."""
    rows = branching(65, vocab=VOCAB) + random_trajectories(3, vocab=VOCAB, count=4)
    planner = PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution=execution)
    window = TreeWindow(rows, planner)
    mode = "unscored" if execution == "nested" else "train"
    check(WindowRun(patch(tiny_model(family)), window, mode=mode), window)


@pytest.mark.essential("0-replay", "1-nested")
@pytest.mark.parametrize("execution", ["replay", "nested", "keep"])
@pytest.mark.parametrize("seed", range(3))
def test_random_windows(execution, seed):
    """The same with trunks that are dropped and made again."""
    rows = random_trajectories(seed, vocab=VOCAB, count=5, max_piece=70)
    schedule = random_schedule(RolloutTree.from_trajectories(rows), seed, execution, pieces=7)
    window = TreeWindow.from_schedule(rows, schedule)
    mode = "unscored" if execution == "nested" else "train"
    check(WindowRun(patch(tiny_model("qwen3_5_text")), window, mode=mode), window)
