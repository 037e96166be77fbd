"""``tree_logprobs`` as a function of parameters: hooks, second derivatives, plans that one process cannot run."""

import pytest
import torch
from support.models import VOCAB, tiny_model
from support.oracle import float64_everywhere, trajectory_log_probs
from support.trees import branching

from harts_hf import PlannerConfig, RolloutTree, plan_window, tree_logprobs
from harts_hf.runtime import TreeWindow


def rows():
    """Ragged, with a fork."""
    return branching(65, vocab=VOCAB)


def planner(execution="replay"):
    """Everything shared, in microbatches of 64 rows."""
    return PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution=execution)


@pytest.mark.essential("nested")
@pytest.mark.parametrize("execution", ["replay", "nested", "keep"])
def test_hooks_of_parameters_fire_once(execution):
    """A hook sees a window's whole gradient, once, however many microbatches there are, and stays registered."""
    model = tiny_model("qwen3_5_text", dtype=torch.float64)
    parameter, seen, accumulated = model.model.layers[1].mlp.down_proj.weight, [], []
    parameter.register_hook(lambda gradient: (seen.append(gradient.clone()), 2 * gradient)[1])
    parameter.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    with float64_everywhere(model):
        sum(trajectory_log_probs(model, row).sum() for row in rows()).backward()
    expected = parameter.grad.clone()
    assert len(seen) == len(accumulated) == 1
    for _ in range(2):
        model.zero_grad()
        seen.clear(), accumulated.clear()
        with float64_everywhere(model):
            torch.cat(tree_logprobs(model, rows(), planner(execution))).sum().backward()
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-11)
        assert len(seen) == len(accumulated) == 1
        torch.testing.assert_close(2 * seen[0], parameter.grad, rtol=0, atol=0)


def test_hooks_stay_where_a_backward_fails():
    """The hooks of parameters are theirs again though the backward ended in an error."""
    model = tiny_model("qwen3_5_text")
    parameter, seen = model.lm_head.weight, []
    parameter.register_hook(seen.append)
    total = torch.cat(tree_logprobs(model, rows(), planner())).sum()
    model.model.norm.weight.data.mul_(1.5)
    with pytest.raises(RuntimeError):
        total.backward()
    assert not seen
    (parameter.sum() * 2).backward()
    assert len(seen) == 1


def test_second_derivatives():
    """A gradient with a graph of its own would lack the derivatives by parameters: an error, not a zero."""
    model = tiny_model("qwen3_5_text")
    total = torch.cat(tree_logprobs(model, rows())).sum()
    with pytest.raises(RuntimeError, match=r"without create_graph.*differentiable once"):
        torch.autograd.grad(total, list(model.parameters()), create_graph=True, allow_unused=True)


@pytest.mark.parametrize("execution", ["replay", "nested", "keep"])
def test_plans_for_several_ranks(execution):
    """One process would run a part of such a plan and give wrong gradients without a word."""
    several = PlannerConfig(world_size=2, max_tokens_per_microbatch=128, execution=execution)
    model = tiny_model("qwen3_5_text")
    with pytest.raises(ValueError, match=r"a plan for one rank \(world_size=1\), got world_size=2"):
        tree_logprobs(model, rows(), several)
    with pytest.raises(ValueError, match="got world_size=2"):
        TreeWindow(rows(), several)
    schedule = plan_window(RolloutTree.from_trajectories(rows()), several)
    with pytest.raises(ValueError, match="got world_size=2"):
        TreeWindow.from_schedule(rows(), schedule)
