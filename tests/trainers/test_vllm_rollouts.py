"""A trainer with use_vllm over a server: one sync a step, its importance weights see the engine's log-probs.

vLLM itself is not needed: TRL's object that synchronises weights is replaced by one that copies them to the server.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.grpo_trainer
from support import recorded
from support.fake_vllm import FakeVLLM
from support.models import tiny_model

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts.engines import TurnRequest
from harts_hf.rollouts.engines.vllm_probe import LogProbGapError
from harts_hf.rollouts.engines.vllm_server import VLLMServerEngine

STEPS = 3


class CopyingSync:
    """What a trainer uses of TRL's ``VLLMGeneration``; copies the policy's weights to the fake server."""

    server: FakeVLLM
    steps: list
    arrives: bool

    def __init__(self, *, model, **_):
        self._model = model
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)

    def sync_weights(self):
        self.steps.append(len(self.steps))
        if self.arrives:
            self.server.model.load_state_dict(self._model.state_dict())

    def generate(self, *_, **__):
        raise AssertionError("gathers over processes: not for turns")


@pytest.fixture
def server(monkeypatch):
    with FakeVLLM(
        tiny_model("qwen3_5_text", seed=1).eval(), tokenizer=recorded.tokenizer(), max_model_len=40
    ) as server:
        # Not the policy's weights: without a sync nothing fits.
        server.model = tiny_model("qwen3_5_text", seed=2).eval()
        sync = type("Sync", (CopyingSync,), {"server": server, "steps": [], "arrives": True})
        server.sync = sync
        monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", sync)
        yield server


def rollouts(prompts, trainer):
    """Two turns, of which the second ones fork off the same first one; ragged."""
    group = trainer.num_generations
    output = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    with VLLMServerEngine.from_trainer(trainer) as engine:
        for number, prompt in enumerate(prompts[::group]):
            history = tuple(recorded.rollouts_of(prompt)["prompt_ids"][0][:9])
            (first,) = engine.submit(TurnRequest(history=history, max_tokens=4 + number, seed=number)).result()
            fork = TurnRequest(history=history + first.token_ids, max_tokens=5, seed=number, count=group)
            for second in engine.submit(fork).result():
                output["prompt_ids"].append(list(history))
                output["completion_ids"].append([*first.token_ids, *second.token_ids])
                output["logprobs"].append([*first.logprobs, *second.logprobs])
        trainer.seen.append((trainer.state.global_step, engine.probe_gap))
    return output


def make_trainer(server, folder, **options):
    """A tree trainer whose turns come from the server; SGD moves the weights by much."""
    arguments = recorded.arguments(folder, max_steps=STEPS, **options)
    trainer = TreeGRPOTrainer(
        copy.deepcopy(tiny_model("qwen3_5_text", seed=1)),
        lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=TreeGRPOConfig(**arguments, use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=rollouts,
    )
    trainer.seen = []
    return trainer


@pytest.mark.exhaustive
def test_one_sync_a_step_and_ratios_of_one(server, tmp_path):
    """The server's log-probs are the policy's of that step: importance ratios are 1, though the weights move."""
    trainer = make_trainer(server, tmp_path, learning_rate=0.5)
    start = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert len(server.sync.steps) == STEPS
    assert [step for step, _ in trainer.seen] == list(range(STEPS))
    moved = max(float((value - start[name]).abs().max()) for name, value in trainer.model.state_dict().items())
    assert moved > 1e-2
    logs = [log for log in trainer.state.log_history if "sampling/importance_sampling_ratio/mean" in log]
    assert len(logs) == STEPS
    for log, (_, gap) in zip(logs, trainer.seen, strict=True):
        # fp32: a tree's log-probs against a row's; the largest seen was 3e-6.
        assert log["sampling/sampling_logp_difference/max"] < 2e-5 and gap < 2e-5
        assert log["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-3)
        assert log["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-3)


@pytest.mark.exhaustive
def test_a_sync_that_does_not_arrive_stops_the_run(server, tmp_path):
    """Before the step's first turn is sampled, and before the update."""
    server.sync.arrives = False
    trainer = make_trainer(server, tmp_path)
    start = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(LogProbGapError, match="to have the trainer's weights at step 0"):
        trainer.train()
    assert len(server.sync.steps) == 1 and not trainer.seen
    assert all(torch.equal(value, start[name]) for name, value in trainer.model.state_dict().items())
