"""What a window hands over and where it lies: expanded latents, states on the CPU."""

import pytest
import torch
from support.models import LATENT_FAMILIES, VOCAB, tiny_model
from support.parity import check_run_parity
from support.trees import branching, random_trajectories
from torch.autograd.graph import save_on_cpu

from harts_hf import PlannerConfig, patch, tree_logprobs
from harts_hf.kernels.attention import tree_attention
from harts_hf.runtime import RunOptions, TreeWindow, WindowRun

RUNS = [("replay", True), ("nested", True), ("keep", False)]


def rows():
    """A tree that needs several trunks, some of them read together."""
    return branching(65, vocab=VOCAB) + random_trajectories(3, vocab=VOCAB, count=4)


def planner(execution="replay"):
    """Everything shared, in microbatches of 64 rows."""
    return PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution=execution)


def checkpointed(model):
    """The model with activation checkpointing."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.essential("bailing_hybrid-replay-True")
@pytest.mark.parametrize(("execution", "checkpointing"), RUNS)
@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_expanded_latents(family, execution, checkpointing):
    """Keys and values handed over expanded give the gradients of the unpatched model."""
    model = tiny_model(family, dtype=torch.float64)
    check_run_parity(checkpointed(model) if checkpointing else model, rows(), planner(execution), expand_latents=True)


@pytest.mark.parametrize(("family", "count"), [("bailing_hybrid", 2), ("kimi_linear", 2), ("qwen3_5_text", 2)])
def test_what_is_handed_over(family, count):
    """Compressed: one latent and one rotary key a row; expanded: keys and values of every head; else no difference."""
    model = patch(tiny_model(family))
    window = TreeWindow(rows(), planner())
    shapes = {}
    for expand in (False, True):
        run = WindowRun(model, window, RunOptions(expand_latents=expand))
        run.score()
        trunk = next(trunk for trunk, kind in run.handoff.readers if kind == "keys")
        values = run.handoff.slot(trunk, "keys", 1).values
        assert len(values) == count
        shapes[expand] = [(value.shape[1], value.shape[3]) for value in values]
    config = model.config
    if family in LATENT_FAMILIES:
        heads, head_dim = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        assert shapes[False] == [(1, config.kv_lora_rank), (1, config.qk_rope_head_dim)]
        assert shapes[True] == [(heads, head_dim), (heads, config.v_head_dim)]
    else:
        assert shapes[False] == shapes[True]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "execution", "checkpointing"),
    [("bailing_hybrid", "replay", True), ("bailing_hybrid", "keep", False), ("qwen3_next", "nested", True)],
)
def test_offloaded_states(family, execution, checkpointing):
    """States and their gradients that lie on the CPU between uses; the recomputing forward reads them too."""
    model = tiny_model(family, dtype=torch.float64)
    check_run_parity(checkpointed(model) if checkpointing else model, rows(), planner(execution), offload=True)


def test_deterministic_reaches_attention(monkeypatch):
    """``tree_logprobs(deterministic=True)`` asks every attention of forward and backward for it, and only then."""
    asked = []

    def spy(*args, deterministic, **options):
        asked.append(deterministic)
        return tree_attention(*args, deterministic=deterministic, **options)

    monkeypatch.setattr("harts_hf.modeling.mixers.tree_attention", spy)
    model = tiny_model("qwen3_5_text")
    for deterministic in (True, False):
        asked.clear()
        torch.cat(tree_logprobs(model, rows(), planner(), deterministic=deterministic)).sum().backward()
        assert len(asked) > 2 and set(asked) == {deterministic}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "execution"), [("qwen3_next", "replay"), ("bailing_hybrid", "nested"), ("qwen3_next", "keep")]
)
def test_offloaded_checkpoints(family, execution):
    """What activation checkpointing keeps of a layer lies in copies on the CPU and comes back for the backward."""
    model = checkpointed(tiny_model(family, dtype=torch.float64))
    check_run_parity(model, rows(), planner(execution), context=save_on_cpu)
