"""Losses of a user's own: a subclass of TreeGRPOTrainer trains like that of GRPOTrainer, or is refused."""

import functools

import pytest
import torch
from peft import LoraConfig
from support.trainer_runs import assert_same_training, run_trainer
from trl import GRPOConfig, GRPOTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.trainers import skipping

CUT = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64}


def log_probs_and_entropies(trainer, model, inputs, *, entropies=True):
    """Through TRL's own hook, as its losses do."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    columns = inputs["completion_ids"].shape[1]
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, columns, compute_entropy=entropies)[:2]


def distance_from(trainer, model, inputs, reference):
    """Mean squared difference of the policy's log-probs from others."""
    log_probs, _ = log_probs_and_entropies(trainer, model, inputs)
    return ((log_probs - reference) * inputs["completion_mask"]).square().mean()


class SquaredLogProbs:
    """A penalty whose derivative is a log-prob's value."""

    def _compute_loss(self, model, inputs):
        log_probs, _ = log_probs_and_entropies(self, model, inputs)
        mask = inputs["completion_mask"]
        return super()._compute_loss(model, inputs) + 0.1 * (log_probs**2 * mask).sum() / mask.sum()


class Hinge:
    """A penalty that only unlikely tokens feel, added in the outermost method."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        log_probs, _ = log_probs_and_entropies(self, model, inputs)
        return super().compute_loss(model, inputs) + 0.01 * torch.relu(-3.5 - log_probs).mean()


class Entropies:
    """A term in entropies, which TRL's settings know nothing of."""

    def _compute_loss(self, model, inputs):
        _, entropies = log_probs_and_entropies(self, model, inputs)
        return super()._compute_loss(model, inputs) - 0.1 * (entropies * inputs["completion_mask"]).mean()


class Wrapped:
    """Under the name of TRL's loss: a term for long prompts, of which TRL's own losses read nothing."""

    @functools.wraps(GRPOTrainer._compute_loss)
    def _compute_loss(self, model, inputs):
        log_probs, _ = log_probs_and_entropies(self, model, inputs)
        by_prompt = log_probs * inputs["prompt_mask"].sum(dim=1, keepdim=True)
        return super()._compute_loss(model, inputs) + 0.001 * (by_prompt * inputs["completion_mask"]).mean()


class RunsTheModel:
    """A supervised term: the model itself runs inside the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        return loss + model(input_ids=inputs["prompt_ids"], labels=inputs["prompt_ids"]).loss


class Reference:
    """A pull towards the reference model, which the loss scores itself."""

    def _compute_loss(self, model, inputs):
        with torch.no_grad():
            reference, _ = log_probs_and_entropies(self, self.ref_model, inputs, entropies=False)
        return super()._compute_loss(model, inputs) + distance_from(self, model, inputs, reference)


class ReferenceWithGradients:
    """The same, without saying that no gradients are wanted."""

    def _compute_loss(self, model, inputs):
        reference, _ = log_probs_and_entropies(self, self.ref_model, inputs, entropies=False)
        return super()._compute_loss(model, inputs) + reference.mean()


def pair(loss):
    """The loss on TRL's trainer and on ours."""
    return (type(f"{base.__name__}With{loss.__name__}", (loss, base), {}) for base in (GRPOTrainer, TreeGRPOTrainer))


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", [SquaredLogProbs, Hinge, Entropies, Wrapped])
def test_custom_loss_is_scored_and_equals_trl(loss, tmp_path):
    """The scoring pass comes back for a loss that TRL does not know, and a metric says so."""
    stock, tree = pair(loss)
    expected = run_trainer(stock, GRPOConfig, tmp_path / "stock")
    got = run_trainer(tree, TreeGRPOConfig, tmp_path / "tree", **CUT)
    assert_same_training(expected, got)
    for log in got[1][:-1]:
        assert log["tree/scoring_skipped"] == 0
        assert log["tree/scoring_needed_by/custom_loss"] == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", [SquaredLogProbs, Entropies])
def test_placeholders_show_a_loss_of_values(loss, tmp_path, monkeypatch):
    """A loss that hides from the list of methods gives other coefficients at other placeholders."""
    monkeypatch.setattr(skipping, "has_custom_loss", lambda trainer: False)
    stock, tree = pair(loss)
    expected = run_trainer(stock, GRPOConfig, tmp_path / "stock")
    got = run_trainer(tree, TreeGRPOConfig, tmp_path / "tree", **CUT)
    assert_same_training(expected, got)
    for log in got[1][:-1]:
        assert log["tree/scoring_skipped"] == 0
        assert log["tree/scoring_needed_by/loss_of_log_probs"] == 1


class WithoutAdapter:
    """A pull towards the policy without its adapter, which needs no torch.no_grad(): nothing is trainable then."""

    def _compute_loss(self, model, inputs):
        with model.disable_adapter():
            reference, _ = log_probs_and_entropies(self, model, inputs, entropies=False)
        return super()._compute_loss(model, inputs) + distance_from(self, model, inputs, reference.detach())


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, CUT])
def test_policy_without_its_adapter_inside_the_loss(options, tmp_path):
    """The hook does not answer for a disabled adapter with the log-probs of the enabled one."""
    stock, tree = pair(WithoutAdapter)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "out_proj"], init_lora_weights=False)
    expected = run_trainer(stock, GRPOConfig, tmp_path / "stock", peft_config=lora)
    got = run_trainer(tree, TreeGRPOConfig, tmp_path / "tree", peft_config=lora, **options)
    moved = 0.0
    for name, value in expected[0].items():
        if "lora" in name:
            assert torch.allclose(got[0][name], value, rtol=0, atol=1e-7), name
            moved = max(moved, value.abs().max().item())
    assert moved > 0
    for log, other in zip(expected[1][:-1], got[1][:-1], strict=True):
        assert other["loss"] == pytest.approx(log["loss"], abs=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, CUT])
def test_reference_model_inside_the_loss(options, tmp_path):
    """TRL's hook answers for the model and the rows that it is given, not always for the policy."""
    stock, tree = pair(Reference)
    expected = run_trainer(stock, GRPOConfig, tmp_path / "stock", beta=0.05)
    got = run_trainer(tree, TreeGRPOConfig, tmp_path / "tree", beta=0.05, **options)
    assert_same_training(expected, got)
    _, wrong = pair(ReferenceWithGradients)
    with pytest.raises(ValueError, match="got another model: score under"):
        run_trainer(wrong, TreeGRPOConfig, tmp_path / "wrong", beta=0.05, **options)


@pytest.mark.exhaustive
def test_replaced_method_counts_as_custom(tmp_path):
    """A method replaced on one instance is no longer TRL's."""

    class Replaced(TreeGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.get_high_entropy_mask = lambda *args: None

    log = run_trainer(Replaced, TreeGRPOConfig, tmp_path, **CUT)[1][0]
    assert log["tree/scoring_needed_by/custom_loss"] == 1


@pytest.mark.essential("options1")
@pytest.mark.parametrize("options", [{}, CUT])
def test_loss_that_runs_the_model_is_refused(options, tmp_path):
    """Its gradient by parameters would be lost."""
    _, tree = pair(RunsTheModel)
    with pytest.raises(ValueError, match="also reaches a trainable tensor"):
        run_trainer(tree, TreeGRPOConfig, tmp_path, **options)
