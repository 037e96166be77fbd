"""What the tree trainers add to TRL: budgets, sharing, credit, metrics, and errors before a step is lost."""

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from support import recorded
from support.models import VOCAB, shallow_model
from support.oracle import float64_everywhere
from support.trainer_runs import assert_same_training, run_trainer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from harts_hf import TreeGMPOConfig, TreeGMPOTrainer, TreeGRPOConfig, TreeGRPOTrainer, UnsupportedModelError
from harts_hf.errors import HartsWarning
from harts_hf.planner import CostModel
from harts_hf.runtime import passes
from harts_hf.trainers.ranks import check_backend
from harts_hf.trainers.weighing import UNITS

METRICS = {
    "sharing_ratio",
    "forward_tokens",
    "backward_tokens",
    "expanded_tokens",
    "unique_tokens",
    "replay_tokens",
    "limits_raised",
    "max_tokens_per_microbatch",
    "out_of_memory",
    "linear_calls",
    "microbatches",
    "oversized_microbatches",
    "logp_recompute_maxdiff",
    "planning_seconds",
    "scoring_seconds",
    "scoring_skipped",
    "scoring_kept",
    "backward_seconds",
}


def tree_run(folder, **options):
    """A run of TreeGRPOTrainer."""
    return run_trainer(TreeGRPOTrainer, TreeGRPOConfig, folder, **options)


@pytest.mark.essential("auto")
@pytest.mark.parametrize("execution", ["auto", "replay", "nested", "keep"])
def test_cut_trees_train_the_same(execution, tmp_path):
    """Windows of several microbatches compute every token once and train as stock does, in every execution."""
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock")
    options = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64, "tree_execution": execution}
    cut = tree_run(tmp_path / "cut", **options)
    assert_same_training(stock, cut)
    for log in cut[1][:-1]:
        assert log["tree/microbatches"] > 1
        unique = log["tree/expanded_tokens"] / log["tree/sharing_ratio"]
        assert log["tree/backward_tokens"] == pytest.approx(unique)
        assert log["tree/scoring_skipped"] == (execution in ("auto", "nested"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_iterations": 2}, "old_per_token_logps"),
        ({"beta": 0.1}, "ref_per_token_logps"),
        ({"entropy_coef": 0.05}, "entropy_bonus"),
        ({"top_entropy_quantile": 0.6}, "top_entropy_quantile"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold"),
    ],
)
def test_scoring_is_skipped_only_where_exact(options, field, tmp_path):
    """Each setting that makes coefficients depend on values brings the scoring pass back, and a metric names it."""
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    cut = tree_run(tmp_path / "cut", tree_sharing="always", tree_max_tokens_per_microbatch=64, **options)
    assert_same_training(stock, cut)
    for number, log in enumerate(cut[1][:-1]):
        is_known = field == "old_per_token_logps" and number % 2 == 0  # scored at generation, on the same weights
        assert log["tree/scoring_skipped"] == log["tree/scoring_kept"] == is_known
        assert log.get(f"tree/scoring_needed_by/{field}", 0) == (not is_known)


@pytest.mark.exhaustive
def test_no_sharing_trains_the_same(tmp_path):
    """Every trajectory on rows of its own is the same training."""
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock")
    apart = tree_run(tmp_path / "apart", tree_sharing="never")
    assert_same_training(stock, apart)
    for log in apart[1][:-1]:
        assert log["tree/forward_tokens"] == log["tree/expanded_tokens"]


def test_metrics(tmp_path):
    """Every metric of ours stands beside TRL's in each log."""
    _, logs, _ = tree_run(tmp_path, tree_sharing="always")
    for log in logs[:-1]:
        assert {name.removeprefix("tree/") for name in log if name.startswith("tree/")} == METRICS
        assert all(np.isfinite(log[f"tree/{name}"]) for name in METRICS)


def test_turn_credit_reaches_the_loss(tmp_path):
    """With tree_credit="turn" the batch holds (B, T) advantages: equal along a turn, 0 on the environment's tokens."""
    seen = []

    class Spy(TreeGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            seen.append(super()._generate_and_score_completions(inputs))
            return seen[-1]

    run_trainer(Spy, TreeGRPOConfig, tmp_path, tree_credit="turn", max_steps=1)
    batch = seen[0]
    assert batch["advantages"].shape == batch["completion_ids"].shape
    own = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert not batch["advantages"][~own].any()
    assert len(batch["advantages"][own].unique()) > recorded.NUM_GENERATIONS // 2
    for row, mask in zip(batch["advantages"], own, strict=True):
        starts = (mask & ~mask.roll(1)).nonzero().flatten().tolist()
        for start in starts:
            stop = start + int((~mask[start:]).int().argmax()) if (~mask[start:]).any() else len(mask)
            assert (row[start:stop] == row[start]).all()


def test_all_rows_masked(tmp_path):
    """A batch whose completions are all truncated and masked takes a step of zero gradients, like stock TRL."""

    def never_ends(prompts, trainer):
        output = recorded.rollout_func(prompts, trainer)
        for row in output["completion_ids"]:
            row[-1] = 5
        return output

    options = {"mask_truncated_completions": True, "rollout_func": never_ends, "max_steps": 1}
    parameters, logs, _ = tree_run(tmp_path, **options)
    start = dict(shallow_model("qwen3_5_text", dtype=torch.float64, seed=1).named_parameters())
    assert logs[0]["grad_norm"] == 0
    assert all(torch.equal(value, start[name]) for name, value in parameters.items())


def broken(change):
    """A rollout function whose output ``change`` breaks."""

    def rollout_func(prompts, trainer):
        output = recorded.rollout_func(prompts, trainer)
        change(output)
        return output

    return rollout_func


def set_item(key, row, value):
    """Replaces one row of a column."""

    def change(output):
        output[key] = list(output[key])
        output[key][row] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: [out[key].pop() for key in out], "8 rows for 8 prompts.*got 7"),
        (lambda out: out.pop("logprobs"), "got no logprobs"),
        (set_item("completion_ids", 1, []), r"completion_ids\[1\] to hold at least one token"),
        (set_item("prompt_ids", 2, []), r"prompt_ids\[2\] to hold at least one token"),
        (set_item("completion_ids", 0, [3, VOCAB]), rf"\[0, {VOCAB}\) in completion_ids\[0\], got {VOCAB}"),
        (set_item("env_mask", 3, [1]), r"env_mask\[3\] to have \d+ entries.*got 1"),
        (set_item("logprobs", 3, [0.0]), r"logprobs\[3\] to have \d+ entries.*got 1"),
        (lambda out: out["logprobs"][0].__setitem__(0, float("-inf")), r"finite numbers in logprobs\[0\], got -inf"),
        (lambda out: out["env_mask"][0].__setitem__(0, 2), r"0 or 1 in env_mask\[0\], got 2"),
        (
            lambda out: out.update(advantages=[[float("nan")] * len(row) for row in out["completion_ids"]]),
            r"finite numbers in advantages\[0\]",
        ),
        (lambda out: out.update(advantages=[[0.0]] * 8), r"advantages\[0\] to have \d+ entries"),
    ],
    ids=[
        "rows",
        "missing-key",
        "empty-completion",
        "empty-prompt",
        "vocabulary",
        "mask-length",
        "logprob-length",
        "infinite-logprob",
        "mask-value",
        "nan-advantage",
        "advantage-length",
    ],
)
def test_broken_rollouts(change, message, tmp_path):
    """A rollout function's mistakes are named before any step is taken."""
    with pytest.raises(ValueError, match=message):
        tree_run(tmp_path, rollout_func=broken(change))


def test_unknown_log_probs_are_legal(tmp_path):
    """TRL takes None for a log-prob that the sampler does not know."""

    def change(out):
        out["logprobs"][0][0] = None
        out["logprobs"][1][0] = float("nan")

    assert len(tree_run(tmp_path, rollout_func=broken(change))[1]) > 1


@pytest.mark.exhaustive
def test_slices_of_an_unfinished_step_are_dropped(tmp_path):
    """A training that is stopped inside an accumulation leaves nothing to the next one, as in TRL."""

    class StopsInside(TrainerCallback):
        def __init__(self):
            self.stop = True

        def on_substep_end(self, args, state, control, **kwargs):
            control.should_training_stop, self.stop = self.stop, False

    def twice(trainer_class, config_class, folder):
        options = {"gradient_accumulation_steps": 2, "max_steps": 1, "callbacks": [StopsInside()]}
        trainer = run_trainer(trainer_class, config_class, folder, **options)[2]
        with float64_everywhere(trainer.model):
            trainer.train()
        return dict(trainer.model.named_parameters()), trainer.state.log_history, trainer

    stock = twice(GRPOTrainer, GRPOConfig, tmp_path / "stock")
    tree = twice(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree")
    assert_same_training(stock, tree)


def test_reward_without_end(tmp_path):
    """An infinite reward would become huge finite advantages in TRL."""
    with pytest.raises(ValueError, match="finite rewards, got inf from function 0 in row 0"):
        tree_run(tmp_path, rollout_func=broken(set_item("recorded_reward", 0, float("inf"))))


def test_token_advantages_need_a_loss_that_knows_them(tmp_path):
    """GMPO's loss has one advantage per trajectory."""
    with pytest.raises(ValueError, match="TreeGMPOTrainer knows none per token"):
        run_trainer(TreeGMPOTrainer, TreeGMPOConfig, tmp_path, rollout_func=recorded.rollout_func_with_advantages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree_max_tokens_per_microbatch": 63}, "max_tokens_per_microbatch of at least 64"),
        ({"tree_max_graph_tokens": 0}, "max_graph_tokens of at least 64 .*, got 0"),
        ({"tree_sharing": "sometimes"}, "sharing to be one of auto, always, never"),
        ({"tree_credit": "token"}, "tree_credit to be one of trajectory, turn"),
        (
            {"tree_credit": "turn", "multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation='sum_then_normalize' with tree_credit='turn'",
        ),
        # Of TRL's, which makes a data set without rows of these two, and ends,
        ({"num_iterations": 0}, "num_iterations to be an integer of at least 1, got 0"),
        ({"max_completion_length": None}, "max_completion_length to be an integer of at least 1, got None"),
        ({"steps_per_generation": 0}, "steps_per_generation to be an integer of at least 1, got 0"),
        # divides by this,
        ({"num_generations": 0}, "num_generations to be an integer of at least 1, got 0"),
        # and finds out after its first rollouts, or never.
        ({"scale_rewards": "groups"}, "scale_rewards to be one of group, batch, none, got 'groups'"),
        ({"epsilon": float("nan")}, "epsilon to be a finite number of at least 0, got nan"),
        ({"top_entropy_quantile": 2}, r"top_entropy_quantile to be a number in \[0, 1\], got 2"),
    ],
)
def test_bad_options(options, message, tmp_path):
    """Options are checked when the configuration is made."""
    with pytest.raises(ValueError, match=message):
        TreeGRPOConfig(**recorded.arguments(tmp_path, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
        ({"torch_compile": True}, "torch_compile"),
        ({"optim": "adalomo"}, "optim=OptimizerNames.ADALOMO"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["mlp"]}, "GALORE_ADAMW_LAYERWISE"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"ddp_static_graph": True}, "ddp_static_graph=True"),
        ({"loss_type": "dapoo"}, "expected loss_type to be one of grpo, .*, got 'dapoo'"),
        ({"importance_sampling_level": "turn"}, "importance_sampling_level to be one of token, sequence, got 'turn'"),
    ],
)
def test_refused_arguments(options, message, tmp_path):
    """Settings that the tree step or TRL's loss would get wrong are refused before anything is sampled."""

    def rollouts(prompts, trainer):
        raise AssertionError("expected no rollouts")

    with pytest.raises(UnsupportedModelError, match=message):
        tree_run(tmp_path, rollout_func=rollouts, **options)


def test_refused_before_the_first_step(tmp_path):
    """What PyTorch and TRL would say in a backward and after sampling, Transformers after minutes of asking a hub."""
    offload = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
    questions = Dataset.from_dict({"question": ["a"] * recorded.NUM_PROMPTS})

    def rollouts(prompts, trainer):
        raise AssertionError("expected no rollouts")

    with pytest.raises(ValueError, match="expected a GPU for offload=True"):
        tree_run(tmp_path, rollout_func=rollouts, **offload)
    with pytest.raises(ValueError, match="expected a train_dataset with the column prompt, got question"):
        tree_run(tmp_path, rollout_func=rollouts, dataset=questions)
    with pytest.raises(
        ValueError, match="expected model to be a model's folder or name, got 'no/such': no such folder"
    ):
        TreeGRPOTrainer("no/such", recorded.recorded_reward, TreeGRPOConfig(**recorded.arguments(tmp_path)))


def test_rates_that_are_no_numbers(tmp_path):
    """Of the optimizer, which would make NaN of every weight, when the trainer is made."""
    with pytest.raises(ValueError, match="learning_rate to be a finite number of at least 0, got nan"):
        tree_run(tmp_path, learning_rate=float("nan"))


def test_loss_types_are_those_of_trl():
    """Each that TRL's loss compares with, and no other."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    compared = re.findall(r'loss_type (?:==|in) (\[[^]]*\]|"\w+")', source)
    assert set(UNITS) == set(re.findall(r'"(\w+)"', " ".join(compared)))


def test_loss_types_of_ones_own(tmp_path):
    """A loss that replaces TRL's may have other types."""

    class Mine(TreeGRPOTrainer):
        def _compute_loss(self, model, inputs):
            assert self.args.loss_type == "mine"
            self.args.loss_type = self.loss_type = "grpo"
            try:
                return super()._compute_loss(model, inputs)
            finally:
                self.args.loss_type = self.loss_type = "mine"

    run_trainer(Mine, TreeGRPOConfig, tmp_path, loss_type="mine", max_steps=1)


def test_deepspeed_in_one_process_is_refused():
    """Its engine would step after every microbatch, where Accelerate marks no micro-steps."""
    one = SimpleNamespace(num_processes=1, distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(UnsupportedModelError, match="DeepSpeed with several processes, got one"):
        check_backend(one)


def test_without_an_auxiliary_loss(tmp_path):
    """A MoE model whose auxiliary loss is switched off (on: test_router_loss.py)."""
    options = {"family": "qwen3_next", "router_aux_loss_coef": 0.0, "max_steps": 1}
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    tree = tree_run(tmp_path / "tree", tree_sharing="always", **options)
    assert_same_training(stock, tree, family="qwen3_next")


def test_plain_trl_configuration_is_refused(tmp_path):
    """A GRPOConfig lacks the tree options."""
    with pytest.raises(ValueError, match="args to be a TreeGRPOConfig, got GRPOConfig"):
        run_trainer(TreeGRPOTrainer, GRPOConfig, tmp_path)


def test_limits_reach_the_planner(tmp_path):
    """Every tree option that is a limit of the plan is the planner's limit."""
    config = TreeGRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        tree_max_tokens_per_microbatch=100,
        tree_max_graph_tokens=200,
        tree_max_handoff_bytes=300,
        tree_sharing="always",
        tree_execution="nested",
    ).planner_config()
    limits = (config.max_tokens_per_microbatch, config.max_graph_tokens, config.max_handoff_bytes)
    assert limits == (100, 200, 300)
    assert (config.sharing, config.execution) == ("always", "nested")


def test_cost_model_reaches_the_planner(tmp_path):
    """Times are a fitted file's or the default ones; bytes are the model's."""
    times = replace(CostModel().forward, calls=7.0)
    CostModel(forward=times, handoff_bytes_per_row=7.0, source="a test").save(tmp_path / "cost.json")
    given = tree_run(tmp_path / "given", max_steps=1, tree_cost=str(tmp_path / "cost.json"))[2]
    own = tree_run(tmp_path / "own", max_steps=1)[2]
    for trainer, forward in ((given, times), (own, CostModel().forward)):
        cost = trainer._tree.planner.config.cost
        assert cost.forward == forward
        # One layer, keys and values of two heads, float64, and as many gradients.
        assert cost.handoff_bytes_per_row == 1 * 2 * 2 * 16 * (8 + 8)
    with pytest.raises(ValueError, match="expected a cost model that harts bench --fit-cost wrote"):
        TreeGRPOConfig(**recorded.arguments(tmp_path, tree_cost=str(tmp_path / "none.json")))


@pytest.mark.exhaustive
def test_limits_that_a_window_cannot_keep(tmp_path):
    """The window runs with the smallest limit that works, and says so; a training is not lost in its middle."""
    options = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64}
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock")
    with pytest.warns(HartsWarning, match="no schedule keeps within max_handoff_bytes=1;.*this window runs with that"):
        tree = tree_run(tmp_path / "tree", **options, tree_max_handoff_bytes=1)
    assert_same_training(stock, tree)
    assert all(log["tree/limits_raised"] == 1 for log in tree[1][:-1])


def test_unknown_latents(tmp_path):
    """What an MLA hands over is one of two things."""
    with pytest.raises(ValueError, match="tree_handoff_latents to be one of compressed, expanded, got 'both'"):
        TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, tree_handoff_latents="both")


def test_handoff_options_reach_the_run(tmp_path, monkeypatch):
    """Latents, offloading and deterministic attention as the configuration says."""
    seen = []

    class Spy(passes.WindowRun):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            seen.append((self.handoff.expand_latents, self.handoff.offload, self.options.deterministic))

    monkeypatch.setattr(passes, "WindowRun", Spy)
    tree_run(tmp_path / "default", max_steps=1)
    assert set(seen) == {(False, False, False)}
    seen.clear()
    options = {"tree_handoff_latents": "expanded", "tree_offload_handoff": True, "tree_deterministic": True}
    tree_run(tmp_path / "other", max_steps=1, **options)
    assert set(seen) == {(True, True, True)}


def test_turn_credit_on_several_ranks():
    """TRL gathers rewards of all ranks; a rank's turns see its own part, and groups across ranks are refused."""
    trainer = object.__new__(TreeGRPOTrainer)
    trainer.scale_rewards = "group"
    trainer.args = type("Args", (), {"tree_credit": "turn"})()
    trainer.accelerator = type("Rank", (), {"process_index": 1})()
    rewards = torch.arange(8.0)
    assert trainer._local(rewards, 8, 4).tolist() == rewards.tolist()
    assert trainer._local(rewards, 4, 4).tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"tree_credit=.turn. .*4 rows a rank for groups of 8"):
        trainer._local(rewards, 4, 8)
    trainer.scale_rewards = "batch"
    with pytest.raises(ValueError, match="scale_rewards='batch'"):
        trainer._local(rewards, 4, 4)
