"""What a step does outside forwards and backwards: losses on the CPU, and nothing expensive for each slice."""

import pytest
import torch
import transformers
from accelerate import Accelerator
from support import recorded
from support.device_tags import DEVICE, is_tagged, pretended_gpu
from support.models import tiny_model
from trl.trainer.base_trainer import _BaseTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.trainers import policy

CUT = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64, "max_steps": 1}


def trained(tmp_path, kind=TreeGRPOTrainer, **options):
    """A trainer after one step, and its log."""
    trainer = kind(
        tiny_model("qwen3_5_text"),
        recorded.recorded_reward,
        args=TreeGRPOConfig(**recorded.arguments(tmp_path, **CUT, **options)),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
    )
    trainer.train()
    log = trainer.state.log_history[0]
    return trainer, {name: value for name, value in log.items() if "time" not in name and "seconds" not in name}


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU that a trainer takes for its own."""
    monkeypatch.setattr(Accelerator, "device", property(lambda self: DEVICE))
    arguments = transformers.TrainingArguments
    monkeypatch.setattr(arguments, "device", property(lambda self: self._setup_devices and DEVICE))
    monkeypatch.setattr(_BaseTrainer, "_send_telemetry", lambda *_: None)  # asks for the GPU's name
    with pretended_gpu(monkeypatch):
        yield


class Watching(TreeGRPOTrainer):
    """Notes where the tensors of each loss's batch are."""

    places: set

    def _prepare_inputs(self, generation_batch):
        self.places = getattr(self, "places", set())
        return super()._prepare_inputs(generation_batch)

    def compute_loss(self, model, inputs, *args, **kwargs):
        """TRL's; its module says so, since a loss of a user's own stays where the model is."""
        self.places |= {is_tagged(value) for value in inputs.values() if isinstance(value, torch.Tensor)}
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("execution", ["nested", "replay"])
def test_losses_run_on_the_cpu(execution, monkeypatch, tmp_path):
    """TRL's loss gets batches on the CPU, also where the tree is scored first; larger batches and losses of one's own
    stay on the GPU; parameters, losses and metrics are the same, bit by bit, as the pretended GPU computes as the CPU
    does."""
    found = {}
    for place, most, module in (("cpu", 2**20, "trl"), ("large", 0, "trl"), ("own", 2**20, "mine")):
        monkeypatch.setattr(policy, "MOST_ON_CPU", most)
        monkeypatch.setattr(Watching.compute_loss, "__module__", module)
        trainer, log = trained(tmp_path / place, Watching, tree_execution=execution)
        assert trainer.places == {place != "cpu"}
        assert log.pop("tree/scoring_needed_by/custom_loss", 0) == (place == "own")
        found[place] = ([parameter.detach().clone() for parameter in trainer.model.parameters()], log)
    assert all(map(torch.equal, found["cpu"][0], found["large"][0]))
    assert found["cpu"][1] == found["large"][1]


@pytest.mark.parametrize("accumulation", [2, 4])
def test_wrappers_are_looked_through_once_a_step(accumulation, monkeypatch, tmp_path):
    """However many slices a step has: Accelerate takes milliseconds for it."""
    calls = []
    unwrap = Accelerator.unwrap_model

    def counted(self, model, *args, **kwargs):
        if trainer_runs:
            calls.append(model)
        return unwrap(self, model, *args, **kwargs)

    trainer_runs: list[bool] = []
    step = policy.TreePolicy.step

    def watched(self, *args, **kwargs):
        trainer_runs.append(True)
        try:
            return step(self, *args, **kwargs)
        finally:
            trainer_runs.clear()

    monkeypatch.setattr(Accelerator, "unwrap_model", counted)
    monkeypatch.setattr(policy.TreePolicy, "step", watched)
    trained(tmp_path, gradient_accumulation_steps=accumulation)
    assert len(calls) == 2
