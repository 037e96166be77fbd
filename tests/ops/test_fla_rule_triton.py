"""The GPU path's rules as a whole, under Triton's interpreter with FLA's stages written out, against the reference."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from support import fla_stages

from harts_hf.batch import LinearTables
from harts_hf.kernels.linear_attention import reference
from harts_hf.planner.chunks import build_chunk_tree
from harts_hf.tree import RolloutTree

CHUNK, HEADS, DIM = 16, 2, 16


def forked_tables(aligned: bool) -> LinearTables:
    """A prefix of 21 (or 16) tokens with ragged branches, one of which forks again, and a tree beside it."""
    lengths = [CHUNK if aligned else CHUNK + 5, 16, 3, 20, 1, 7, 18]
    tree = RolloutTree.from_shape([-1, 0, 0, 0, 1, 1, -1], lengths, [2, 3, 4, 5, 6])
    return LinearTables.build(build_chunk_tree(tree.parent, tree.depth, CHUNK), np.arange(tree.num_tokens))


def rule_inputs(tables: LinearTables, kimi: bool) -> list[torch.Tensor]:
    rows, value_heads = tables.num_rows, HEADS if kimi else 2 * HEADS
    gate = torch.randn(rows, value_heads, *([DIM] if kimi else []))
    return [
        torch.randn(rows, HEADS, DIM),
        torch.randn(rows, HEADS, DIM),
        torch.randn(rows, value_heads, DIM),
        -torch.nn.functional.softplus(gate) * 0.3,
        torch.rand(rows, value_heads),
    ]


def run(rule: Any, inputs: list[torch.Tensor], tables: LinearTables, exports: torch.Tensor, weights: Any) -> Any:
    """Output, exported states and the gradient of every input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    *rows, initial = leaves
    output, states = rule(
        *rows, tables, initial_states=initial, export_nodes=exports, scale=DIM**-0.5, use_qk_l2norm=True
    )
    loss = (output * weights[0]).sum() + (states * weights[1]).sum()
    return [output.detach(), states.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kimi", "aligned"), [(False, False), (True, True)])
def test_rules_equal_the_reference_in_one_group_and_in_many(
    kimi: bool, aligned: bool, monkeypatch: pytest.MonkeyPatch
):
    """Outputs, states and all gradients; splitting into groups changes no bit. fp32 sums of at most 40 terms: 1e-5."""
    ours = fla_stages.install(monkeypatch)
    name = "kimi_delta_rule" if kimi else "gated_delta_rule"
    tables = forked_tables(aligned)
    starts = tables.initial.clone()
    starts[(tables.parent < 0).nonzero()[-1]] = 0  # the second tree starts from a boundary state
    tables = LinearTables(**{**vars(tables), "initial": starts})
    inputs = rule_inputs(tables, kimi)
    inputs.append(torch.randn(1, inputs[2].shape[1], DIM, DIM))
    exports = torch.tensor([1, tables.num_nodes - 1])
    weights = torch.randn_like(inputs[2]), torch.randn(2, *inputs[-1].shape[1:])
    whole = run(getattr(ours, name), inputs, tables, exports, weights)
    monkeypatch.setattr("harts_hf.kernels.linear_attention.fla_tables.default_group_size", lambda *_: 4)
    again = LinearTables(**vars(tables))  # the packed form is kept per object
    split = run(getattr(ours, name), inputs, again, exports, weights)
    wanted = run(getattr(reference, name), inputs, tables, exports, weights)
    first = tables.gather.index[0]
    wanted[5][first] = whole[5][first]  # checked below
    for one, other, want in zip(whole, split, wanted, strict=True):
        assert torch.equal(one, other)
        error = (one - want).norm() / want.norm()
        assert error < 1e-5, error
    assert (whole[5][first] == 0).all()
