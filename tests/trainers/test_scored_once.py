"""No row is scored twice on the same weights: what a first step's losses see is what TRL got at generation."""

import pytest
import torch
from support import recorded
from support.models import shallow_model, tiny_model
from support.oracle import float64_everywhere
from support.origins import as_of
from support.ppo_runs import build_trainer
from torch import nn

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.runtime import passes
from harts_hf.trainers.scored_once import ScoredOnce, Weights

# Three microbatches or more; a step on the weights of the generation, then one on others.
CUT = {
    "gradient_checkpointing": True,  # which TRL switches off and on around a generation
    "tree_sharing": "always",
    "tree_max_tokens_per_microbatch": 64,
    "max_steps": 2,
    "num_iterations": 2,
    "learning_rate": 0.1,
}


class Watching(TreeGRPOTrainer):
    """Notes how far the policy's log-probs are from the old ones that its losses compare them with."""

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._tree.is_in_loss:
            self.log_probs = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        difference = (self.log_probs - inputs["old_per_token_logps"]) * inputs["completion_mask"]
        self.differences = [*getattr(self, "differences", []), float(difference.abs().max())]
        return loss


def trained(folder, monkeypatch, *, keeps=True, **options):
    """A trainer after two steps on a float64 model, and the ops that each run of a window had."""
    words = []

    class Spy(passes.WindowRun):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trunks = {trunk for microbatch in self.window.schedule.microbatches for trunk in microbatch.trunks}
            words.append(([op for op in self._ops if op[0] == "S"], trunks, len(self.window.batches)))

    with monkeypatch.context() as changed:
        changed.setattr(passes, "WindowRun", Spy)
        if not keeps:
            changed.setattr(ScoredOnce, "weights", lambda *_: None)
        # TRL's own loss, though a test watches it.
        for name in ("_compute_loss", "_get_per_token_logps_and_entropies"):
            changed.setattr(Watching, name, as_of("trl", getattr(Watching, name)))
        model = shallow_model("qwen3_5_text", dtype=torch.float64, seed=1)
        trainer = Watching(
            model,
            recorded.recorded_reward,
            args=TreeGRPOConfig(**recorded.arguments(folder, **CUT, **options)),
            train_dataset=recorded.dataset(),
            processing_class=recorded.tokenizer(),
            rollout_func=recorded.rollout_func,
        )
        with float64_everywhere(model):
            trainer.train()
    return trainer, words


@pytest.mark.exhaustive
@pytest.mark.parametrize("execution", ["auto", "replay"])
def test_a_first_step_is_not_scored_again(execution, tmp_path, monkeypatch):
    """Its losses see the generation's log-probs to the bit, and only states of trunks are computed before the
    backwards; the second step, on other weights, is scored. Parameters and metrics are those of scoring both."""
    options = {"tree_execution": execution}
    (kept, words), (scored, _) = (
        trained(tmp_path / str(keeps), monkeypatch, keeps=keeps, **options) for keeps in (True, False)
    )
    first, second = words
    assert {index for _, index in first[0]} == (first[1] if execution == "replay" else set())
    assert first[1] and len(second[0]) == second[2] > len(first[1])
    slices = len(kept.differences) // 2
    assert kept.differences[:slices] == [0.0] * slices and min(kept.differences[slices:]) > 1e-3
    logs = [one.state.log_history[:2] for one in (kept, scored)]
    assert [log["tree/scoring_kept"] for log in logs[0]] == [1, 0]
    assert [log["tree/scoring_kept"] for log in logs[1]] == [0, 0]
    # In float64 log-probs computed again differ by rounding alone, and so does what is made of them.
    assert logs[0][0]["tree/logp_recompute_maxdiff"] < 1e-12
    for name, value in kept.model.named_parameters():
        torch.testing.assert_close(value, dict(scored.model.named_parameters())[name], rtol=0, atol=1e-10)
    for one, other in zip(*logs, strict=True):
        for name in ("loss", "entropy", "grad_norm", "clip_ratio/region_mean"):
            assert one[name] == pytest.approx(other[name], abs=1e-6), name


@pytest.mark.parametrize("options", [{"tree_replay_routing": "scoring"}, {"router_aux_loss_coef": 0.1}])
def test_passes_that_a_step_needs_itself(options, tmp_path):
    """Routes that later forwards take, and routers' sums, come from the step's own pass."""
    trainer = Watching(
        tiny_model("qwen3_5_moe_text"),
        recorded.recorded_reward,
        args=TreeGRPOConfig(**recorded.arguments(tmp_path, **CUT, **options)),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
    )
    assert trainer._tree.weights_to_keep(trainer.model) is None
    trainer._tree.routing.mode = "off"
    trainer.args.router_aux_loss_coef = 0
    trainer.aux_loss_enabled = False
    assert trainer._tree.weights_to_keep(trainer.model) is not None


@pytest.mark.exhaustive
def test_ppo_does_not_score_its_first_minibatch_again(tmp_path):
    """Log-probs, entropies and values; what they come to is compared with the loop in test_ppo_equals_the_loop.py."""
    options = {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 3}
    trainer = build_trainer(tmp_path, recorded.rollout_func, tree_max_tokens_per_microbatch=64, **options)
    trainer.train()
    kept = [log["tree/scoring_kept"] for log in trainer.state.log_history if "tree/scoring_kept" in log]
    assert kept == [1, 0, 1]


def test_weights_that_changed():
    """In place, past autograd's counters, by an optimizer step that left few bits other, frozen; a router's bias, an
    adapter's scaling, a norm's epsilon."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    model[0].register_buffer("expert_bias", torch.zeros(4))
    model[0].scaling = {"default": 2.0}

    def in_place():
        with torch.no_grad():
            model[0].bias += 1

    def past_counters():
        model[1].weight.data.neg_()

    weights = Weights.of(model, 7)
    assert weights.are_of(model, 7) and not weights.are_of(model, 8)
    model.eval()
    assert weights.are_of(model, 7)
    for change in (
        in_place,
        past_counters,
        lambda: model[0].requires_grad_(False),
        lambda: model[0].expert_bias.add_(1),
        lambda: model[0].scaling.update(default=1.0),
        lambda: setattr(model[2], "eps", 0.1),
    ):
        weights = Weights.of(model, 7)
        change()
        assert not weights.are_of(model, 7)
