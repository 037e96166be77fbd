"""Limits that fit into memory: what the memory model predicts of windows that were measured, and what it chooses."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.registry import FAMILIES, STEP_MODELS, VOCAB, WHOLE_SHAPES
from benchmarks.gpu.trees import shape_window, spine
from benchmarks.gpu.whole.peaks import planner, trees
from harts_hf import PlannerConfig, RolloutTree, plan_window
from harts_hf.modeling import handed_sizes, with_handed_bytes
from harts_hf.modeling.memory import peak_of_rows, row_bytes
from harts_hf.planner import DEFAULT_COST
from harts_hf.runtime.budgets import DoesNotFitError, fitting_budget, halved, parse_bytes
from harts_hf.runtime.planning import WindowPlanner

ROOT = Path(__file__).parents[2]
RESULTS, SHAPES = ROOT / "benchmarks" / "results", ROOT / "examples" / "shapes"
# Never too little. Too much by at most so much: what one factor for all families, layouts of trees and versions costs.
MOST_ABOVE = 1.25


def model_of(family, settings):
    """In bfloat16, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.bfloat16)


def bytes_of(model):
    """Weights; gradients are as many."""
    return 2 * sum(parameter.numel() for parameter in model.parameters())


def with_bytes(config, model):
    """Handed bytes are the model's."""
    sizes = handed_sizes(model, torch.bfloat16)
    return PlannerConfig(**{**vars(config), "cost": with_handed_bytes(DEFAULT_COST, sizes)})


@pytest.fixture(scope="module")
def shapes():
    """Groups of miniswe_b_drop."""
    with gzip.open(SHAPES / "miniswe_b_drop.jsonl.gz", "rt") as lines:
        found = [json.loads(line) for line in lines]
    return [RolloutTree.from_shape(one["parent"], one["length"], one["sample_node"]) for one in found]


def test_peaks_of_whole_steps(shapes):
    """Steps of whole models on an H200 with SGD: with and without checkpointing, stock and fused, one part or six."""
    rows = json.loads((RESULTS / "step_h200.json").read_text())["rows"]
    models = {name: model_of(*settings) for name, settings in STEP_MODELS.items()}
    schedules, found = {}, {}
    # Of rows with budget "auto" the record does not say how many rows of graphs were allowed.
    for row in (row for row in rows if row["sharing"] == "always" and row.get("budget") != "auto"):
        model, budget = models[row["model"]], row["max_tokens_per_microbatch"]
        key = row["model"], int(row["workload"].split()[1]), budget
        if key not in schedules:
            config = PlannerConfig(
                max_tokens_per_microbatch=budget, max_graph_tokens=2 * budget, execution="nested", sharing="always"
            )
            schedules[key] = plan_window(shapes[key[1]], with_bytes(config, model))
        assert schedules[key].backward_tokens == row["rows"]
        fused = row["fused_modules"] == "auto"
        bytes_per_row = row_bytes(model, checkpointing=row["checkpointing"], fused=fused)
        states = bytes_of(model)
        predicted = states + peak_of_rows(schedules[key], bytes_per_row, gradients=states)
        found[*key, row["checkpointing"], fused] = predicted / row["peak_memory"]
    assert len(found) >= 13
    assert all(1 <= ratio <= MOST_ABOVE for ratio in found.values()), found


def recorded(op):
    """Rows of a part of whole_h200.json: four layers of real widths, no checkpointing, stock modules."""
    rows = json.loads((RESULTS / "whole_h200.json").read_text())["rows"]
    for row in (row for row in rows if row["op"] == op):
        model = model_of(row["family"], FAMILIES[row["family"]])
        yield row, model, row_bytes(model, checkpointing=False, fused=False)


def test_peaks_of_windows():
    """In replay and nested, above weights and gradients that are there already."""
    forest = {name: RolloutTree.from_trajectories(rows) for name, rows in trees(VOCAB).items()}
    found = {}
    for row, model, bytes_per_row in recorded("memory"):
        for window in row["windows"]:
            key = window["tree"], window["execution"], window["budget"]
            schedule = plan_window(forest[key[0]], with_bytes(planner(*key[1:]), model))
            found[row["family"], *key] = peak_of_rows(schedule, bytes_per_row, gradients=0.0) / window["peak_bytes"]
    assert len(found) == 24
    assert all(1 <= ratio <= MOST_ABOVE for ratio in found.values()), found


def test_peaks_of_each_family():
    """A window that is one microbatch, of few long and of many short branches, which fill up chunks."""
    found = {}
    for row, model, bytes_per_row in recorded("speed"):
        for name, ways in row["shapes"].items():
            tree = RolloutTree.from_trajectories(shape_window(SHAPES, name, WHOLE_SHAPES[name], VOCAB))
            config = PlannerConfig(max_tokens_per_microbatch=32_768, sharing="always", execution="nested")
            states, schedule = bytes_of(model), plan_window(tree, config)
            assert schedule.backward_tokens == ways["tree"]["rows"]
            predicted = states + peak_of_rows(schedule, bytes_per_row, gradients=states)
            found[row["family"], name] = predicted / ways["tree"]["peak_bytes"]
    assert len(found) == 12
    assert all(1 <= ratio <= MOST_ABOVE for ratio in found.values()), found


@pytest.mark.exhaustive
def test_peaks_of_all_families():
    """Windows that the model was not fitted to: fused and stock, bfloat16, and float32 weights under autocast."""
    found = {}
    for row in json.loads((RESULTS / "memory_h200.json").read_text())["rows"]:
        name, _, variant = row["model"].partition(":")
        model = model_of(*STEP_MODELS.get(name, (name, FAMILIES.get(name))))
        if variant == "float32":
            model = model.float()
        limits = {"max_graph_tokens": 2 * row["budget"]} if row["execution"] == "nested" else {}
        config = PlannerConfig(
            max_tokens_per_microbatch=row["budget"], sharing="always", execution=row["execution"], **limits
        )
        schedule = plan_window(spine(row["spine"]), config)
        assert len(schedule.microbatches) == row["microbatches"]
        assert schedule.backward_tokens == row["rows"]
        bytes_per_row = row_bytes(
            model, dtype=torch.bfloat16, checkpointing=row["checkpointing"], fused=variant != "stock"
        )
        states = sum(p.numel() * p.element_size() for p in model.parameters())
        predicted = states + peak_of_rows(schedule, bytes_per_row, gradients=states)
        found[row["model"], row["execution"], row["budget"], row["checkpointing"]] = predicted / row["peak"]
        # In models of a few GB, one constant for all is half a GB too much.
        assert row["peak"] <= predicted <= MOST_ABOVE * row["peak"] + 6e8, found
    assert len(found) == 39


@pytest.fixture(scope="module")
def model():
    """Ling-3.0-tiny's widths in four layers."""
    return model_of("bailing_hybrid", FAMILIES["bailing_hybrid"])


@pytest.fixture(scope="module")
def rows(model):
    """Of the model, without checkpointing."""
    return row_bytes(model, checkpointing=False, fused=True)


def test_windows_within_a_budget_take_no_more_than_was_there(model, rows, shapes):
    """Cut or whole, scored first or not, with a limit of handed bytes or without: these are counted too high."""
    for room in (4e9, 8e9, 24e9):
        budget = fitting_budget(rows, room)
        for tree, skips, handed in product(shapes[:2], (True, False), (None, budget.max_handoff_bytes)):
            config = PlannerConfig(
                max_tokens_per_microbatch=budget.max_tokens,
                max_graph_tokens=budget.max_graph_tokens,
                max_handoff_bytes=handed,
            )
            planned = WindowPlanner(config=with_bytes(config, model))
            chosen = planned.with_execution_chosen(can_skip_scoring=skips, num_rows=tree.num_tokens)
            schedule = chosen(tree).schedule
            assert schedule.config == chosen.config  # no limit was raised
            assert schedule.forward_tokens < 2 * tree.num_tokens  # nor is anything computed again and again
            assert peak_of_rows(schedule, rows, gradients=5e8) <= 5e8 + room + budget.max_handoff_bytes / 2
            whole = tree.num_tokens <= budget.max_tokens
            assert whole == (len(schedule.microbatches) == 1)


def test_budgets(rows):
    """Rows grow with memory in steps of a fifth at most, up to a limit; too little is an error that names what is."""
    found = [fitting_budget(rows, 8e8 * 1.02**step) for step in range(300)]
    numbers = [one.max_tokens for one in found]
    assert numbers == sorted(numbers) and numbers[-1] == 131_072 and len(set(numbers)) < 45
    for before, after in pairwise(sorted(set(numbers))):
        assert after % 64 == 0 and after <= max(before + 64, 1.25 * before)
    assert fitting_budget(rows, 1e9, offload=True).max_handoff_bytes is None
    # No tensor of a linear layer has 2**31 elements, whatever memory there is.
    assert rows.state_elements == 16 * 128 * 128
    for heads, most in ((16, 131_072), (32, 131_072), (64, 98_304), (128, 49_152)):
        state = heads * 128 * 128
        found = fitting_budget(replace(rows, state_elements=state), 1e13).max_tokens
        assert found == most and 1.25 * found / 64 * state < 2**31
    with pytest.raises(DoesNotFitError, match=r"expected at least [\d.]+ [GM]B beside.*got 100\.00 MB: take activ"):
        fitting_budget(rows, 1e8)


@pytest.mark.parametrize(
    ("skips", "num_rows", "limits", "expected"),
    [
        (True, 1000, (1024, 1024), ("nested", 1024, 1024)),  # one microbatch
        (True, 1025, (1024, 1024), ("nested", 512, 1024)),  # the graphs of a trunk and a dependent
        (True, 5000, (1024, None), ("nested", 1024, 2048)),
        (True, 5000, (1024, 4096), ("nested", 1024, 4096)),
        (False, 5000, (1024, 1024), ("replay", 1024, 1024)),  # one graph at a time
    ],
)
def test_chosen_executions(skips, num_rows, limits, expected):
    """What one microbatch may take is divided where several graphs are alive."""
    config = PlannerConfig(max_tokens_per_microbatch=limits[0], max_graph_tokens=limits[1])
    chosen = WindowPlanner(config=config).with_execution_chosen(can_skip_scoring=skips, num_rows=num_rows).config
    assert (chosen.execution, chosen.max_tokens_per_microbatch, chosen.max_graph_tokens) == expected


def test_halves():
    """All limits of rows, down to a chunk."""
    config = PlannerConfig(max_tokens_per_microbatch=100, max_graph_tokens=300, max_linear_rows=120)
    half = halved(config)
    assert (half.max_tokens_per_microbatch, half.max_graph_tokens, half.max_linear_rows) == (64, 150, 64)
    assert halved(half) is None


def test_sizes():
    """As people write them."""
    assert [parse_bytes("memory", text) for text in ("141GB", "80GiB", "80 gib", "1.41e+11", "512M", "5B", ".5k")] == [
        141e9, 80 * 2**30, 80 * 2**30, 1.41e11, 512e6, 5, 500,
    ]  # fmt: skip
    for text in ("", "GB", "-1GB", "0", "1.2.3GB", "80 bytes", "1e999", "1e308T", "5I", "5IB", "0.5", "1e+", "1_0G"):
        with pytest.raises(ValueError, match="expected memory to be a size such as 141GB"):
            parse_bytes("memory", text)
