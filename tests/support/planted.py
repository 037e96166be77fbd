"""Bugs that prefix-sharing trainers have had, each planted by exchanging one function or table.

A plant takes pytest's ``monkeypatch``; what it breaks is undone after the test.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from harts_hf import TreeGRPOTrainer, TreeRLOOTrainer
from harts_hf.batch import AttentionIntervals, LinearTables, TreeBatch
from harts_hf.kernels.conv import torch as conv_torch
from harts_hf.kernels.gather import torch as gather_torch
from harts_hf.kernels.linear_attention import torch as linear_torch
from harts_hf.modeling import Wanted, forwards, patching, routers, routing
from harts_hf.runtime import TreeWindow, job
from harts_hf.runtime.slices import SliceTable
from harts_hf.trainers.rows import PaddedRows


def _wrap(monkeypatch: Any, owner: Any, name: str, wrapper: Any) -> None:
    """``owner.name`` becomes ``wrapper(original, *args, **kwargs)``."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def _after_batch(monkeypatch: Any, change: Any) -> None:
    """Every TreeBatch is built with the fields that ``change(batch)`` gives."""

    def build(original: Any, *args: Any, **kwargs: Any) -> TreeBatch:
        batch = original(*args, **kwargs)
        return dataclasses.replace(batch, **change(batch))

    _wrap(monkeypatch, TreeBatch, "build", build)


# ---- the tables of a microbatch -------------------------------------------------------------------------------------


def sequential_positions(monkeypatch: Any) -> None:
    """Position ids count the rows of the layout instead of the depth in the tree."""

    _after_batch(monkeypatch, lambda batch: {"position_ids": torch.arange(batch.num_rows)[None]})


def one_label_per_row(monkeypatch: Any) -> None:
    """A branching row predicts the first token of its first child only."""

    def change(batch: TreeBatch) -> dict[str, Any]:
        rows = batch.labels.rows
        first = torch.ones_like(rows, dtype=torch.bool)
        first[1:] = rows[1:] != rows[:-1]
        return {"labels": batch.labels.select(first)}

    _after_batch(monkeypatch, change)


def attention_sees_siblings(monkeypatch: Any) -> None:
    """Attention is causal over the rows of the layout: a branch sees the branches before it."""

    def change(batch: TreeBatch) -> dict[str, Any]:
        hi = torch.full_like(batch.attention.hi, batch.num_rows)
        return {"attention": AttentionIntervals(lo=batch.attention.lo, hi=hi)}

    _after_batch(monkeypatch, change)


def conv_over_branches(monkeypatch: Any) -> None:
    """The convolution reads the rows before a row in the layout instead of its ancestors."""

    def conv(original: Any, batch: TreeBatch, width: int) -> Any:
        table = original(batch, width)
        num_rows = table.gather.num_rows  # handed rows stand before the own ones
        rows = torch.arange(num_rows - batch.num_rows, num_rows)[:, None] - torch.arange(width - 1, -1, -1)
        index = torch.where(table.ancestors.cpu() >= 0, rows, -1).clamp_min(-1)
        gather = type(table.gather).build(index.numpy().ravel(), num_rows)
        return type(table)(gather=gather, width=width).to(batch.device)

    _wrap(monkeypatch, TreeBatch, "conv", conv)


def _on_chunks(monkeypatch: Any, change: Any) -> None:
    """``change(chunks)`` in place of the chunk tree that linear tables are built from."""
    original = LinearTables.build.__func__  # type: ignore[attr-defined]
    build = classmethod(lambda cls, chunks, *args, **kwargs: original(cls, change(chunks), *args, **kwargs))
    monkeypatch.setattr(LinearTables, "build", build)


def state_of_the_node_before(monkeypatch: Any) -> None:
    """A chunk starts from the state of the chunk before it in the layout, whatever trajectory that is of."""

    def change(chunks: Any) -> Any:
        nodes = np.arange(chunks.num_nodes)
        return dataclasses.replace(chunks, parent=nodes - 1, level=nodes)

    _on_chunks(monkeypatch, change)


def replay_one_token_short(monkeypatch: Any) -> None:
    """A branch's chunk replays the shared tokens of the chunk but for the first one."""

    def change(chunks: Any) -> Any:
        rows = chunks.rows.copy()
        replays = chunks.owner[rows[:, 0]] != np.arange(chunks.num_nodes)
        rows[replays, 0] = -1
        return dataclasses.replace(chunks, rows=rows)

    _on_chunks(monkeypatch, change)


# ---- the operations -------------------------------------------------------------------------------------------------


def silu_in_bfloat16(monkeypatch: Any) -> None:
    """The convolution is rounded to bfloat16 before SiLU instead of after it."""

    def silu(y: torch.Tensor) -> torch.Tensor:
        return F.silu(y.bfloat16().float() if y.dtype == torch.float32 else y)

    monkeypatch.setattr(conv_torch, "F", SimpleNamespace(silu=silu))


def gather_gradient_in_bfloat16(monkeypatch: Any) -> None:
    """Gradients of a row that is read many times are rounded to the dtype of the rows after each addition."""

    def sum_positions(original: Any, grad: torch.Tensor, table: Any) -> torch.Tensor:
        total = grad.new_zeros(table.num_rows, *grad.shape[1:])
        for position, row in enumerate(table.index.tolist()):
            total[row] += grad[position]
        return total

    _wrap(monkeypatch, gather_torch, "sum_positions", sum_positions)


def states_in_bfloat16(monkeypatch: Any) -> None:
    """States that one call leaves for another are rounded to bfloat16."""

    def rule(original: Any, *args: Any, **kwargs: Any) -> Any:
        output, states = original(*args, **kwargs)
        return output, states.bfloat16().to(states.dtype)

    _wrap(monkeypatch, linear_torch, "gated_delta_rule", rule)


def state_before_the_first_token(monkeypatch: Any) -> None:
    """Trajectories start from a state that is not zero, so the first token's gate gets a gradient."""

    def rule(original: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, tables: Any, **kwargs: Any) -> Any:
        tables = dataclasses.replace(tables, initial=torch.where(tables.parent < 0, 0, -1))
        kwargs["initial_states"] = torch.full((1, v.shape[1], q.shape[2], v.shape[2]), 0.1)
        return original(q, k, v, g, beta, tables, **kwargs)

    _wrap(monkeypatch, linear_torch, "gated_delta_rule", rule)


def class_name_trap(monkeypatch: Any) -> None:
    """Mixers named ``...LinearAttention`` are taken for linear ones: kimi_linear's full attention stays unpatched."""

    def find(original: Any, model: Any, family: Any) -> Any:
        return [pair for pair in original(model, family) if not type(pair[0]).__name__.endswith("LinearAttention")]

    _wrap(monkeypatch, patching, "_find_mixers", find)


# ---- scoring and the loss -------------------------------------------------------------------------------------------


def temperature_ignored(monkeypatch: Any) -> None:
    """Log-probs are those of temperature 1."""

    def constructor(original: Any, wanted: Wanted, *args: Any, **kwargs: Any) -> None:
        original(wanted, *args, **{**kwargs, "temperature": 1.0})

    _wrap(monkeypatch, Wanted, "__init__", constructor)


def later_labels_scored_as_the_first(monkeypatch: Any) -> None:
    """Where a graph is built a row has one label: its other labels get the gradient of the first."""

    def score(original: Any, hidden: Any, weight: Any, bias: Any, rows: Any, labels: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            first = torch.ones_like(rows, dtype=torch.bool)
            first[1:] = rows[1:] != rows[:-1]
            labels = labels[first][first.long().cumsum(0) - 1]
        return original(hidden, weight, bias, rows, labels, **kwargs)

    _wrap(monkeypatch, forwards, "token_logprobs", score)


def _on_coefficients(monkeypatch: Any, change: Any) -> None:
    """``change(coefficients by name)`` in place of the coefficients of entropies."""

    def loss_and_coefficients(original: Any, *args: Any) -> Any:
        loss, found = original(*args)
        return loss, dataclasses.replace(found, rows={**found.rows, "entropy": change(found.rows)})

    _wrap(monkeypatch, job.Job, "loss_and_coefficients", loss_and_coefficients)


def entropy_of_clipped_tokens_dropped(monkeypatch: Any) -> None:
    """A label whose log-prob has no gradient is skipped, though its entropy has one."""

    _on_coefficients(monkeypatch, lambda found: found["entropy"] * (found["log_prob"] != 0))


def router_counts_of_one(monkeypatch: Any) -> None:
    """A shared token counts once in the router's auxiliary loss, however many trajectories pass through it."""

    def counts(original: Any, table: Any, tree: Any, microbatch: Any) -> torch.Tensor:
        return original(table, tree, microbatch).clamp(max=1)

    _wrap(monkeypatch, SliceTable, "counts", counts)


def router_counts_of_one_in_sums(monkeypatch: Any) -> None:
    """The same where all trajectories are one slice."""
    over_layers = routers._over_layers

    def counted(logits: Any, harts: Any, of: Any) -> torch.Tensor:
        counts = SimpleNamespace(slice_counts=harts.slice_counts.clamp(max=1))
        return over_layers(logits, counts, of)

    monkeypatch.setattr(routers, "_over_layers", counted)


def load_of_unique_tokens(monkeypatch: Any) -> None:
    """A shared token counts once in the load of the experts, and so in the update of their bias."""

    def load(original: Any, experts: torch.Tensor, counts: torch.Tensor, num_experts: int) -> torch.Tensor:
        return original(experts, counts.clamp(max=1), num_experts)

    _wrap(monkeypatch, routing, "expert_load", load)


def entropy_dropped(monkeypatch: Any) -> None:
    """The gradient of the entropy bonus never reaches the model."""

    _on_coefficients(monkeypatch, lambda found: torch.zeros_like(found["entropy"]))


def last_trajectory_wins(monkeypatch: Any) -> None:
    """The gradient of a shared token is that of its last trajectory instead of the sum over all."""

    def collect(original: Any, gradients: Any, indices: Any, num_rows: int) -> torch.Tensor:
        total = torch.zeros(num_rows, dtype=torch.float64)
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is not None:
                for row, values in zip(torch.from_numpy(index), gradient.double(), strict=True):
                    total[row[row >= 0]] = values[row >= 0]
        return total

    _wrap(monkeypatch, job, "collect", collect)


def duplicates_counted_once(monkeypatch: Any) -> None:
    """A trajectory that equals an earlier one of its slice adds no gradient."""

    def collect(original: Any, gradients: Any, indices: Any, num_rows: int) -> Any:
        kept = []
        for index in indices:
            _, first = np.unique(index, axis=0, return_index=True)
            one = np.full_like(index, -1)
            one[first] = index[first]
            kept.append(one)
        return original(gradients, kept, num_rows)

    _wrap(monkeypatch, job, "collect", collect)


def _on_plan(monkeypatch: Any, change: Any) -> None:
    """``change(window, index)`` in place of each slice's index of tree rows."""

    def constructor(original: Any, self: Any, *, indices: Any, window: TreeWindow, **rest: Any) -> None:
        changed = [{name: change(window, one) for name, one in index.items()} for index in indices]
        original(self, indices=changed, window=window, **rest)

    _wrap(monkeypatch, job.Job, "__init__", constructor)


def interior_ends_lost(monkeypatch: Any) -> None:
    """Trajectories are read off the leaves of the tree, so one that ends inside another has no loss."""

    def change(window: TreeWindow, index: np.ndarray) -> np.ndarray:
        ends_inside = window.tree.num_children[index.max(axis=1)] > 0
        return np.where(ends_inside[:, None], -1, index)

    _on_plan(monkeypatch, change)


def stale_indices(monkeypatch: Any) -> None:
    """The rows of a batch are in another order than when the tree was built."""
    _on_plan(monkeypatch, lambda window, index: np.roll(index, 1, axis=0))


def padding_in_the_tree(monkeypatch: Any) -> None:
    """The padding before a prompt enters the tree as tokens."""

    def tokens(original: Any, rows: PaddedRows, row: int) -> np.ndarray:
        last = np.flatnonzero(rows.completion_mask[row])[-1]
        return np.concatenate([rows.prompt_ids[row], rows.completion_ids[row][: last + 1]])

    _wrap(monkeypatch, PaddedRows, "tokens", tokens)


def normaliser_of_unique_tokens(monkeypatch: Any) -> None:
    """The loss is divided by the number of unique tokens instead of the trajectories' tokens."""

    def constructor(original: Any, self: Any, *, slices: Any, indices: Any, **rest: Any) -> None:
        found = [index["log_prob"] for index in indices]
        unique = len(np.unique(np.concatenate([index[index >= 0] for index in found])))
        total = sum(int((index >= 0).sum()) for index in found)
        for one in slices:
            one.batch["num_items_in_batch"] = one.batch["num_items_in_batch"] * unique / total
        original(self, slices=slices, indices=indices, **rest)

    _wrap(monkeypatch, job.Job, "__init__", constructor)


def loss_not_divided_for_accumulation(monkeypatch: Any) -> None:
    """RLOO's loss counts as divided by the accumulation steps already."""
    monkeypatch.setattr(TreeRLOOTrainer, "loss_is_scaled_for_ga", True)


def nominal_accumulation_steps(monkeypatch: Any) -> None:
    """The last, shorter optimizer step of an epoch is normalised by the nominal number of accumulation steps."""
    steps = property(lambda self: self.args.gradient_accumulation_steps, lambda self, value: None)
    monkeypatch.setattr(TreeGRPOTrainer, "current_gradient_accumulation_steps", steps, raising=False)


def old_log_probs_of_another_path(monkeypatch: Any) -> None:
    """Old log-probs come from a forward of lower precision than the one that is trained."""

    def score(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        log_probs, entropies, aux = original(self, *args, **kwargs)
        if not self._tree.is_in_loss:
            log_probs = log_probs.bfloat16().to(log_probs.dtype)
        return log_probs, entropies, aux

    _wrap(monkeypatch, TreeGRPOTrainer, "_get_per_token_logps_and_entropies", score)


def nothing_is_shared(monkeypatch: Any) -> None:
    """The plan silently runs every trajectory by itself: right results, nothing gained."""

    def constructor(original: Any, self: Any, trajectories: Any, planner: Any = None, **kwargs: Any) -> None:
        original(self, trajectories, dataclasses.replace(planner, sharing="never"), **kwargs)

    _wrap(monkeypatch, TreeWindow, "__init__", constructor)
