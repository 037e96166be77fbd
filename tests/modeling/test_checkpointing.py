"""Selective activation checkpointing: the same bits as full checkpointing, and no product of a layer twice."""

from collections import Counter

import pytest
import torch
from support.models import VOCAB, tiny_model
from support.oracle import gradients
from support.trees import branching
from torch.utils._python_dispatch import TorchDispatchMode

from harts_hf import PlannerConfig, TreeGRPOConfig, patch
from harts_hf.modeling.checkpointing import keep_products
from harts_hf.runtime import TreeValues, TreeWindow, WindowRun

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback")


class Counting(TorchDispatchMode):
    """Counts the operations that are computed."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[function.name().partition(".")[0].partition("::")[2]] += 1
        return function(*args, **(kwargs or {}))


def products_of(counted):
    """How many products were computed."""
    return sum(counted.found[name] for name in PRODUCTS)


def run(family, kind, execution):
    """Gradients, and how many products the forwards and backwards of a cut window took."""
    model = tiny_model(family, dtype=torch.float64)
    if kind != "off":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    patch(model)
    if kind == "selective":
        keep_products(model)
        # As TRL does around each generation.
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution=execution)
    window = TreeWindow(branching(65, vocab=VOCAB), config)
    coefficients = torch.linspace(-1, 1, window.tree.num_tokens, dtype=torch.float64)
    work = WindowRun(model, window)
    work.score()
    with Counting() as counted:
        work.backward(TreeValues(rows={"log_prob": coefficients}), torch.Tensor.backward)
    return gradients(model), products_of(counted)


@pytest.mark.parametrize(
    ("family", "execution"),
    [("bailing_hybrid", "nested"), ("qwen3_5_text", "replay"), ("qwen3_next", "keep")],
)
def test_the_same_bits_and_fewer_products(family, execution):
    """Of cut windows, whose states cross layers that are computed again."""
    (full, many), (selective, few), (off, fewest) = (
        run(family, kind, execution) for kind in ("full", "selective", "off")
    )
    for name, gradient in full.items():
        assert torch.equal(selective[name], gradient) and torch.equal(off[name], gradient), name
    # Between what no checkpointing computes, and full: the products within kernels on a tree are computed again.
    assert fewest <= few < many


def test_settings():
    """Another kind, or a kind of what is off."""
    arguments = {"output_dir": "unused", "use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match="tree_checkpointing to be one of full, selective, got 'some'"):
        TreeGRPOConfig(**arguments, tree_checkpointing="some")
    with pytest.raises(ValueError, match="gradient_checkpointing=True with tree_checkpointing='selective', got False"):
        TreeGRPOConfig(**arguments, tree_checkpointing="selective", gradient_checkpointing=False)
