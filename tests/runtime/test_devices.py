"""Windows on a GPU, as far as a machine without one can tell: nothing stays on the CPU, or is made there."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle

import pytest
import torch
import transformers
from accelerate import Accelerator
from support import recorded
from support.device_tags import DEVICE, DeviceMismatchError, is_tagged, pretended_gpu, tensors_of
from support.models import FAMILIES, VOCAB, shallow_model, tiny_model
from support.ranks import OtherRankHas
from support.trees import branching
from trl.trainer.base_trainer import _BaseTrainer

from harts_hf import PlannerConfig, TreeGRPOConfig, TreeGRPOTrainer, patch, tree_logprobs
from harts_hf.kernels.attention.flash_blocks import block_lists
from harts_hf.kernels.attention.flex import block_mask
from harts_hf.kernels.linear_attention.fla_tables import packed_chains
from harts_hf.modeling import LABEL_VALUES
from harts_hf.runtime import RunOptions, TreeValues, TreeWindow, WindowRun

OPTIONS = [
    ("replay", {"options": RunOptions(offload=True, expand_latents=True)}),
    ("keep", {}),
    ("nested", {"options": RunOptions(offload=True)}),
    ("replay", {"ranks": OtherRankHas(6)}),
    ("keep", {"options": RunOptions(offload=True)}),
    ("nested", {}),
]
# Each family with some of them, and each of them with some family.
RUNS = [(family, *options) for family, options in zip(FAMILIES, cycle(OPTIONS), strict=False)]


@pytest.fixture
def gpu(monkeypatch):
    """The pretended GPU."""
    with pretended_gpu(monkeypatch) as waits:
        yield waits


def planner(execution="replay"):
    """Everything shared, in microbatches of 64 rows."""
    return PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution=execution)


def window(execution="replay"):
    """A window of trunks inside trunks."""
    return TreeWindow(branching(65, vocab=VOCAB), planner(execution))


def run_backward(run, *, scored=False):
    """Scores if that has not been done, then the backward of a random sum of log-probs and entropies."""
    num_rows = run.window.tree.num_tokens
    if not scored:
        run.score(LABEL_VALUES)
    log_probs, entropy = torch.randn(2, num_rows, device=DEVICE)
    run.backward(TreeValues(rows={"log_prob": log_probs, "entropy": entropy}), torch.Tensor.backward)


@pytest.mark.essential("bailing_hybrid-replay-options0")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("family", "execution", "options"), RUNS)
def test_windows(family, execution, options):
    """No operation of a window's forwards and backwards mixes devices, and gradients are on the model's."""
    model = patch(tiny_model(family).to(DEVICE))
    run_backward(WindowRun(model, window(execution).to(DEVICE), **options))
    assert all(is_tagged(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("execution", ["keep", "nested", "replay"])
def test_waits_for_a_gpu(execution, gpu):
    """A window is waited for once for its masks and once for its guard, and each backward once for the head's rows;
    forwards are not. (Backends of the CPU do not count, nor do experts.)"""
    model = patch(tiny_model("qwen3_5_text").to(DEVICE))
    run = WindowRun(model, window(execution).to(DEVICE))
    assert len(run.window.batches) >= 4
    run.score(LABEL_VALUES)
    assert waits_of(gpu) == 0
    run_backward(run, scored=True)
    assert waits_of(gpu) == 2 + len(run.window.batches)


def waits_of(gpu):
    """Those that are not a portable kernel's."""
    return sum(n for place, n in gpu.places.items() if not place.startswith("kernels/") or "logprobs" in place)


@pytest.mark.usefixtures("gpu")
def test_a_table_on_the_cpu_is_noticed():
    """The pretended GPU refuses what a real one did: rows handed over by indices that stayed behind."""
    model, moved = patch(tiny_model("qwen3_5_text").to(DEVICE)), window().to(DEVICE)
    moved.batches = [
        replace(batch, imports={kind: table.to("cpu") for kind, table in batch.imports.items()})
        for batch in moved.batches
    ]
    with pytest.raises(DeviceMismatchError, match="tensors on the CPU"):
        run_backward(WindowRun(model, moved))


@pytest.mark.usefixtures("gpu")
def test_tables_move_whole():
    """Every tensor of a microbatch moves, and what GPU kernels derive from it is made where it is."""
    moved = window().to(DEVICE)
    for batch in moved.batches:
        exports = batch.exports.get("states", torch.zeros(0, dtype=torch.int64, device=DEVICE))
        derived = [
            batch.conv(4),
            block_lists(batch.attention, batch.num_rows, (128, 64), by_key=True),
            block_mask(batch.attention, batch.num_rows).as_tuple(),
            packed_chains(batch.linear, exports, int(batch.linear.initial.max()) + 1),
        ]
        tensors = tensors_of([batch, derived])
        assert len(tensors) > 50
        assert all(map(is_tagged, tensors))


# Without a scoring pass; with one through TRL's hook for old log-probs, which the first step keeps.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("execution", "iterations"), [("nested", 1), ("replay", 2)])
def test_trainer(execution, iterations, monkeypatch, tmp_path):
    """A training step of TreeGRPOTrainer on per-turn advantages, with handed states on the CPU between uses."""
    monkeypatch.setattr(Accelerator, "device", property(lambda self: DEVICE))
    arguments = transformers.TrainingArguments
    monkeypatch.setattr(arguments, "device", property(lambda self: self._setup_devices and DEVICE))
    monkeypatch.setattr(_BaseTrainer, "_send_telemetry", lambda *_: None)  # asks for the GPU's name
    options = {
        "tree_execution": execution,
        "tree_offload_handoff": True,
        "tree_credit": "turn",
        "max_steps": iterations,
    }
    cut = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64, "num_iterations": iterations}
    with pretended_gpu(monkeypatch):
        trainer = TreeGRPOTrainer(
            shallow_model("qwen3_5_text"),
            recorded.recorded_reward,
            args=TreeGRPOConfig(**recorded.arguments(tmp_path, **options, **cut)),
            train_dataset=recorded.dataset(),
            processing_class=recorded.tokenizer(),
            rollout_func=recorded.rollout_func,
        )
        trainer.train()
        assert all(map(is_tagged, trainer.model.parameters()))
    *logs, _ = trainer.state.log_history
    assert [log["tree/scoring_kept"] for log in logs] == {1: [0], 2: [1, 0]}[iterations]
    assert [log["tree/scoring_skipped"] for log in logs] == [1, 0][:iterations]
    assert logs[0]["tree/microbatches"] > 3


@pytest.mark.parametrize("execution", ["replay", "nested"])
def test_autocast_around_the_call(execution):
    """A backward outside the autocast region of tree_logprobs runs its forwards as the call did, in a dtype that is
    not the default."""
    model = tiny_model("qwen3_5_text")
    gradients = []
    for last in (nullcontext(), torch.autocast("cpu", dtype=torch.float16)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            log_probs = tree_logprobs(model, branching(65, vocab=VOCAB), planner(execution))
        with last:
            torch.cat(log_probs).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.usefixtures("gpu")
def test_forwards_run_on_the_current_gpu(monkeypatch):
    """Every forward makes its own GPU the current one, on which Triton launches."""
    entered = []

    @contextmanager
    def device_of(tensor):
        entered.append(tensor.device)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    run = WindowRun(patch(tiny_model("qwen3_5_text").to(DEVICE)), window().to(DEVICE), mode="score")
    run.score()
    assert entered == [DEVICE] * len(run.window.batches)
