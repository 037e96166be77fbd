"""Bytes of handed rows and states: what the configuration says is what is kept, to the byte."""

import pytest
import torch
from support.models import FAMILIES, VOCAB, tiny_model
from support.trees import branching

from harts_hf import patch
from harts_hf.batch import HANDED_KINDS
from harts_hf.modeling.sizes import handed_sizes, with_handed_bytes
from harts_hf.planner import CostModel, PlannerConfig
from harts_hf.runtime import RunOptions, TreeValues, TreeWindow, WindowRun


def kept(run, what):
    """Bytes and rows of ``values`` or ``gradients`` that are kept, by kind."""
    sizes, rows = dict.fromkeys(HANDED_KINDS, 0), dict.fromkeys(HANDED_KINDS, 0)
    layers = {}
    for (trunk, kind, layer), slot in run.handoff._slots.items():
        tensors = getattr(slot, what)
        sizes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if tensors:
            layers.setdefault((trunk, kind), []).append((layer, tensors[0].shape[slot.dims[0]]))
    for (_, kind), found in layers.items():
        rows[kind] += found[0][1]
    return sizes, rows


@pytest.mark.essential("bailing_hybrid-False-dtype0", "qwen3_5_text-True-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("expand_latents", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_what_is_kept(family, expand_latents, dtype):
    """Values after the scoring pass and gradients when the last dependent has run, of every kind."""
    model = patch(tiny_model(family, dtype=dtype))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = parameter.float()  # as models are trained
    planner = PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution="replay")
    window = TreeWindow(branching(150, vocab=VOCAB), planner)
    run = WindowRun(model, window, RunOptions(expand_latents=expand_latents))
    scores = run.score()
    sizes = handed_sizes(model, dtype, expand_latents=expand_latents)
    values, rows = kept(run, "values")
    assert min(rows.values()) > 0
    assert values == {kind: count * sizes.values[kind] for kind, count in rows.items()}
    seen = []

    def backward(scalar):
        seen.append(kept(run, "gradients"))
        scalar.backward()

    run.backward(TreeValues(rows={"log_prob": torch.ones_like(scores.rows["log_prob"])}), backward)
    most = max(seen, key=lambda one: sum(one[0].values()))
    assert most[0] == {kind: count * sizes.gradients[kind] for kind, count in most[1].items()}
    assert most[0]["keys"] > 0 and most[0]["states"] > 0


def test_head_dim_left_out():
    """Olmo's published configurations name no head dim: it is the hidden size over the heads, as for the model."""
    model = tiny_model("olmo_hybrid", omit=("head_dim",))
    assert not hasattr(model.config, "head_dim")
    attention = next(m for m in model.modules() if type(m).__name__ == "OlmoHybridAttention")
    assert handed_sizes(model, torch.float32).values["keys"] == 2 * 2 * attention.head_dim * 4  # heads, bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family):
    """bfloat16 autocast over float32 weights, as is the default in TRL: no kind takes more than is counted."""
    model = patch(tiny_model(family))
    planner = PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution="replay")
    window = TreeWindow(branching(150, vocab=VOCAB), planner)
    run = WindowRun(model, window, RunOptions(context=lambda: torch.autocast("cpu", torch.bfloat16)))
    run.score()
    sizes = handed_sizes(model, torch.bfloat16, keys_dtype=torch.float32)
    values, rows = kept(run, "values")
    for kind, count in rows.items():
        counted = count * sizes.values[kind]
        assert counted / 2 <= values[kind] <= counted, kind


def test_cost_model_of_sizes():
    """A row's and a boundary's bytes are values and gradients together, half a chunk replayed."""
    sizes = handed_sizes(tiny_model("qwen3_5_text"), torch.bfloat16)
    cost = with_handed_bytes(CostModel(), sizes)
    assert cost.handoff_bytes_per_row == 2 * 2 * 16 * (2 + 4)
    assert cost.gradient_part_of_row == 4 / 6
    states, conv = 2 * 4 * 8 * 12, 2 * (2 * 2 * 8 + 4 * 12)
    expected = states * 8 + 31.5 * ((conv + 2 * 4) * 6 + 2 * 4 * 8) + 3 * conv * 6
    assert cost.handoff_bytes_per_state == pytest.approx(expected)
    assert cost.forward == CostModel().forward
