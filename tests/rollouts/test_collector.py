"""The collector against TRL's rollout_func contract."""

import functools

import pytest
import torch
from datasets import Dataset
from support.models import tiny_model

from harts_hf.rollouts.checks import check_rollouts
from harts_hf.rollouts.collector import TreeRolloutCollector, environment_reward
from harts_hf.rollouts.environments.failures import EpisodesFailedError
from harts_hf.rollouts.environments.shelf import ShelfEnvironment
from harts_hf.rollouts.files import read_rollouts
from harts_hf.rollouts.forks import NoForks
from harts_hf.trainers import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.tree import RolloutTree

PROMPTS = ShelfEnvironment().prompts()
# fp32 log-probs of cached decoding against one forward per trajectory; measured 9.5e-7 here, on log-probs near -3.
LOGPROB_BUDGET = 1e-5


def collector(branching=(2, 2), **kwargs):
    return TreeRolloutCollector(ShelfEnvironment, branching=branching, max_turns=3, max_turn_tokens=2, **kwargs)


@pytest.fixture
def make_trainer(tmp_path):
    """Builds a trainer with a tiny hybrid policy; ``rollout_func`` and arguments can be changed."""

    def make(rollout_func, **changes):
        tokenizer = ShelfEnvironment().tokenizer()
        model = tiny_model("bailing_hybrid", vocab_size=len(tokenizer))
        args = TreeGRPOConfig(
            **{
                "output_dir": str(tmp_path),
                "per_device_train_batch_size": 8,
                "num_generations": 4,
                "max_completion_length": 24,
                "max_steps": 2,
                "use_cpu": True,
                "bf16": False,
                "activation_checkpointing": False,
                "report_to": "none",
                "disable_tqdm": True,
                "save_strategy": "no",
                "logging_steps": 1,
                **changes,
            }
        )
        return TreeGRPOTrainer(
            model,
            environment_reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )

    return make


def test_rows_follow_the_prompts_and_pass_the_checks(make_trainer):
    """As many rows as prompts, in their order, shared as branching implies, rewards and masks in place."""
    collect = collector()
    trainer = make_trainer(collect)
    prompts = [prompt for prompt in PROMPTS[:3] for _ in range(4)]
    rows = collect(prompts, trainer)
    check_rollouts(rows, 12, vocab_size=trainer.model.config.vocab_size)
    tokenizer = trainer.processing_class
    assert [tokenizer.decode(ids) for ids in rows["prompt_ids"]] == prompts
    assert rows["tree"] == [tree for tree in range(3) for _ in range(4)]
    assert len(rows["environment_reward"]) == len(rows["num_turns"]) == 12
    for start in (0, 4, 8):
        pairs = zip(rows["prompt_ids"][start : start + 4], rows["completion_ids"][start : start + 4], strict=True)
        assert RolloutTree.from_trajectories([prompt + completion for prompt, completion in pairs]).sharing_ratio > 1.2
    # Shared tokens are sampled once, and the last token of a conversation need not be read.
    expanded = sum(map(len, rows["prompt_ids"])) + sum(map(len, rows["completion_ids"]))
    assert collect.last_sampling_tokens < expanded
    assert environment_reward(environment_reward=rows["environment_reward"], prompts=prompts) == [
        rollout.reward for rollout in collect.last_rollouts
    ]


def test_training_steps_run_with_sharing_and_turn_credit(make_trainer):
    """Two steps through the trainer: TRL accepts the rows, and the tree metrics see the sharing."""
    trainer = make_trainer(collector(), tree_credit="turn", tree_sharing="always")
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == 2
    for entry in logs:
        assert entry["tree/sharing_ratio"] > 1.2
        assert entry["tree/forward_tokens"] < entry["tree/expanded_tokens"]


def test_routes_of_the_engine_are_replayed(make_trainer):
    """They come with every row, shared as the tokens are, cover all tokens that are read, and reach the step."""
    collect = collector()
    trainer = make_trainer(collect, tree_replay_routing="engine", tree_sharing="always", max_steps=1)
    rows = collect([prompt for prompt in PROMPTS[:2] for _ in range(4)], trainer)
    check_rollouts(rows, 8, vocab_size=trainer.model.config.vocab_size)
    seen = set()
    for prompt, completion, routes in zip(
        rows["prompt_ids"], rows["completion_ids"], rows["routed_experts"], strict=True
    ):
        missing = len(prompt) + len(completion) - sum(map(len, routes))
        assert 1 <= missing < 12 and all(one.shape[1:] == (2, 2) for one in routes)  # an answer that nobody reads
        seen |= {id(one) for one in routes}
    assert len(seen) < sum(map(len, rows["routed_experts"]))
    trainer.train()
    log = trainer.state.log_history[0]
    # fp32: decoding rounds otherwise than a forward on a tree. None of 3,000 choices flipped here.
    assert log["tree/engine_routing_flips"] < 0.01
    assert log["tree/engine_routes_missing"] == log["tree/engine_routes_differing"] == 0


def test_recorded_logprobs_are_the_models(make_trainer):
    """Log-probs recorded while sampling equal those of one forward of the whole conversation."""
    collect = collector()
    trainer = make_trainer(collect)
    collect([prompt for prompt in PROMPTS[:3] for _ in range(4)], trainer)
    worst = 0.0
    for rollout in collect.last_rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            logprobs = trainer.model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0]
        sampled = torch.tensor(rollout.env_mask, dtype=torch.bool)
        worst = max(worst, float((expected - torch.tensor(rollout.logprobs))[sampled].abs().max()))
    assert worst < LOGPROB_BUDGET


def test_equal_seeds_collect_equal_rollouts(make_trainer):
    """Rollouts depend on the trainer's seed, step and rank; repeated calls in a step differ from one another."""
    prompts = [PROMPTS[0]] * 4
    first, second = collector(), collector()
    trainer = make_trainer(first)
    rows = first(prompts, trainer)
    torch.rand(5)
    assert second(prompts, trainer) == rows
    assert second(prompts, trainer) != rows
    trainer.state.global_step = 1
    assert collector()(prompts, trainer) != rows
    assert collector()(prompts, make_trainer(first, seed=7)) != rows


def test_branching_need_not_multiply_to_num_generations(make_trainer):
    """Each prompt gets its rows all the same; no two branches of the first fork differ by more than one."""
    for branching in ((3, 2), (2, 1), (5,)):
        collect = collector(branching=branching)
        rows = collect([PROMPTS[0]] * 4 + [PROMPTS[1]] * 4, make_trainer(collect))
        assert rows["tree"] == [0] * 4 + [1] * 4
        first = [rollout.path[0] for rollout in collect.last_rollouts[:4]]
        assert first == {(3, 2): [0, 0, 1, 2], (2, 1): [0, 1, 2, 3], (5,): [0, 1, 2, 3]}[branching]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([PROMPTS[0]] * 6, "whole groups of 4 prompts on each process, got 6 prompts"),
        ([], "whole groups of 4 prompts on each process, got 0 prompts"),
        ([PROMPTS[0]] * 3 + [PROMPTS[1]] * 5, r"expected prompt 3 to repeat prompt 0 \(groups of 4\)"),
    ],
)
def test_prompts_must_come_in_groups(make_trainer, prompts, message):
    """A tree needs its whole group on one process."""
    collect = collector()
    with pytest.raises(ValueError, match=message):
        collect(prompts, make_trainer(collect))


def test_evaluation_samples_independent_conversations(make_trainer):
    """In evaluation each prompt gets ``num_generations_eval`` conversations that fork before the first turn only."""
    collect = collector()
    trainer = make_trainer(collect, num_generations_eval=3, per_device_eval_batch_size=6, eval_strategy="no")
    trainer.model.eval()
    rows = collect([PROMPTS[0]] * 3 + [PROMPTS[1]] * 3, trainer)
    assert len(rows["completion_ids"]) == 6
    assert [rollout.path for rollout in collect.last_rollouts] == [(0,), (1,), (2,)] * 2


def test_a_fork_policy_is_an_object():
    """The name that a recipe has for one is refused, and it is said what was expected."""
    with pytest.raises(ValueError, match=r"expected fork_policy to be .* got the text 'entropy'"):
        TreeRolloutCollector(ShelfEnvironment, fork_policy="entropy", max_turns=3, max_turn_tokens=2)


def test_another_fork_policy(make_trainer):
    """Instead of branching, any policy; not both, and not neither."""
    collect = TreeRolloutCollector(ShelfEnvironment, fork_policy=NoForks(), max_turns=3, max_turn_tokens=2)
    rows = collect([PROMPTS[0]] * 4, make_trainer(collect))
    assert [rollout.path for rollout in collect.last_rollouts] == [(0,), (1,), (2,), (3,)]
    assert len(rows["completion_ids"]) == 4
    for given in ({}, {"branching": (4,), "fork_policy": NoForks()}, {"fork_turns": (1,), "fork_policy": NoForks()}):
        with pytest.raises(ValueError, match=r"expected either branching \(and fork_turns\) or fork_policy, got"):
            TreeRolloutCollector(ShelfEnvironment, **given, max_turns=3, max_turn_tokens=2)


def test_limits_are_checked_when_it_is_made():
    """A collector that could not sample anything is not made."""
    with pytest.raises(ValueError, match=r"ascending fork turns in \[0, max_turns = 3\), got \[0, 3\]"):
        collector(fork_turns=(0, 3))


def test_a_rollout_function_with_the_wrong_rows_loses_no_step(make_trainer):
    """The trainer checks what any rollout function returns before it uses it."""

    def too_many(prompts, trainer):
        rows = collector()(prompts, trainer)
        return {key: values + values[:1] for key, values in rows.items()}

    trainer = make_trainer(too_many)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"expected rollout_func to return 8 rows for 8 prompts .* got 9"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_factories_may_carry_settings(make_trainer):
    """Anything that makes an environment will do."""
    collect = TreeRolloutCollector(
        functools.partial(ShelfEnvironment, num_items=1), branching=(4,), max_turns=2, max_turn_tokens=2
    )
    message = r"got 4 failures of 4 episodes \(4 raised\); the first: ValueError: expected a prompt such as 'lamp"
    with pytest.raises(EpisodesFailedError, match=message):
        collect(["book wanted"] * 4, make_trainer(collect))


class Fragile(ShelfEnvironment):
    """Is interrupted when the third of all twins is closed."""

    closed = 0

    def close(self):
        Fragile.closed += 1
        if Fragile.closed == 3:
            raise KeyboardInterrupt


def test_what_was_collected_before_a_failure_lies_on_disk(make_trainer, tmp_path):
    """As a rollout file that the package reads, named by the exception."""
    collect = TreeRolloutCollector(Fragile, branching=(2, 2), max_turns=3, max_turn_tokens=2)
    trainer = make_trainer(collect)
    with pytest.raises(KeyboardInterrupt) as failure:
        collect([prompt for prompt in PROMPTS for _ in range(4)], trainer)
    path = tmp_path / "salvaged" / "step0-rank0.jsonl"
    assert any(str(path) in note for note in failure.value.__notes__)
    rollouts = [rollout for group in read_rollouts(path) for rollout in group.rollouts]
    assert 0 < len(rollouts) < 4 * len(PROMPTS)
    assert all(rollout.reward is not None and sum(rollout.loss_mask) > 0 for rollout in rollouts)
