"""Handed states and their gradients by themselves: `pytest tests/runtime/test_handoff.py`."""

import pytest
import torch
from support.device_tags import tensors_of
from support.models import VOCAB, tiny_model
from support.schedules import cut_schedule, passing
from support.trees import branching

from harts_hf import RolloutTree, patch
from harts_hf.batch import build_batches
from harts_hf.modeling.boundary import export_rows, import_rows
from harts_hf.modeling.handoff import Handoff
from harts_hf.runtime import TreeValues, TreeWindow, WindowRun
from harts_hf.runtime.lives import count_readers


def test_bfloat16_gradients_are_summed_in_float32():
    """256 dependents that add 2**-9 each to a gradient of 1: in bfloat16 every one of them would be rounded away."""
    tree = RolloutTree.from_trajectories([[1, 2, 3, 10 + child] for child in range(257)])
    trunk, *dependents = build_batches(cut_schedule(tree, list(range(3, tree.num_tokens))))
    handoff = Handoff(count_readers([trunk, *dependents]))
    handoff.keeping = True
    keys = torch.ones(1, 1, 3, 1, dtype=torch.bfloat16, requires_grad=True)
    (kept,) = export_rows(passing(trunk, handoff), "keys", 0, [keys], [2])
    for number, batch in enumerate(dependents):
        (together,) = import_rows(passing(batch, handoff), "keys", 0, [keys.detach()[:, :, :1].requires_grad_()], [2])
        together.backward(torch.full_like(together, 1.0 if number == 0 else 2.0**-9))
    kept.backward(torch.zeros_like(kept))
    assert keys.grad.dtype == torch.bfloat16
    assert keys.grad.flatten().tolist() == [1.5] * 3


def test_windows_move_whole():
    """After moving a window no tensor of it is left behind, however deep it lies (the meta device stands in)."""
    tree = RolloutTree.from_trajectories(branching(65, vocab=VOCAB))
    window = TreeWindow.from_schedule(branching(65, vocab=VOCAB), cut_schedule(tree, [60, 90], "replay"))
    for batch in window.batches:
        assert batch.conv(4).width and batch.linear.gather.num_rows and batch.linear.output.num_rows  # made on use
    moved = window.to("meta")
    assert "dummy" not in vars(window) and "dummy" not in vars(moved)  # of windows that run none, none is made
    found = tensors_of([*moved.batches, moved.dummy])
    assert len(found) > 80
    assert {tensor.device.type for tensor in found} == {"meta"}
    made = [tables for batch in moved.batches for tables in (batch.linear.gather, batch.linear.output)]  # made anew
    assert {tensor.device.type for tensor in tensors_of(made)} == {"meta"}


@pytest.mark.parametrize("execution", ["replay", "nested", "keep"])
@pytest.mark.parametrize("signs", [(1.0, 1.0), (1.0, -1.0)], ids=["inf or -inf", "inf and -inf"])
def test_overflowing_logits_of_a_trunk_without_loss(execution, signs):
    """A trunk that no loss asks of takes part in its backward by an exact zero, whatever its logits are.

    The head's rows of two tokens are so large in one channel, which is 0 in all hidden states but the trunk's, that
    logits of the trunk, and only those, overflow to inf, and log-probs to inf or NaN.
    """
    model = patch(tiny_model("qwen3_5_text", dtype=torch.float64))
    tree = RolloutTree.from_trajectories(branching(65, vocab=VOCAB))
    window = TreeWindow.from_schedule(branching(65, vocab=VOCAB), cut_schedule(tree, [60, 90], execution))
    coefficients = torch.ones(tree.num_tokens, dtype=torch.float64)
    coefficients[window.batches[0].labels.tree_rows] = 0  # of the trunk's labels, wherever their tokens are
    with torch.no_grad():
        # Not inf, since 0 * inf is NaN.
        model.lm_head.weight[3:5, 0] = 1e300 * torch.tensor(signs, dtype=torch.float64)
    seen = []

    def only_in_the_trunk(norm, inputs, output):
        is_trunk = output.shape[1] == window.batches[0].num_rows
        factor = torch.ones(output.shape[-1], dtype=output.dtype)
        factor[0] = 1e300 if is_trunk else 0.0
        seen.append(is_trunk)
        return output * factor

    model.model.norm.register_forward_hook(only_in_the_trunk)
    run = WindowRun(model, window)
    scores = run.score()
    assert scores.rows["log_prob"][window.batches[0].labels.tree_rows].isnan().any()
    assert scores.rows["log_prob"][coefficients != 0].isfinite().all()
    run.backward(TreeValues(rows={"log_prob": coefficients}), torch.Tensor.backward)
    assert any(seen) and not all(seen)
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), f"{name}: a gradient that is not finite"
