"""What the training makes of environments that fail: nothing, and it says how many there were."""

import logging
import zlib

import pytest
import torch
from datasets import Dataset
from support.models import tiny_model

from harts_hf.rollouts import EpisodesFailedError, TreeRolloutCollector, environment_reward
from harts_hf.rollouts.environments.shelf import ShelfEnvironment
from harts_hf.trainers import TreeGRPOConfig, TreeGRPOTrainer

PROMPTS = ["lamp wanted", "book wanted"]
# Parameters in fp32 after a step of SGD that changes them by up to 1.1e-3: other rows in the window change the order
# of sums. Measured 3.0e-8.
PARAMETER_BUDGET = 1e-7


class Flaky(ShelfEnvironment):
    """Fails for one item in the beginning, and else at second turns, by what is said."""

    def reset(self, prompt, *, seed):
        if prompt.startswith("lamp"):
            raise OSError("no lamp today")
        self.turns = 0
        return super().reset(prompt, seed=seed)

    def step(self, action):
        self.turns += 1
        if self.turns == 2 and zlib.crc32(action.encode()) % 3 == 0:
            raise OSError("no step today")
        return super().step(action)


@pytest.fixture
def make_trainer(tmp_path):
    def make(rollout_func, prompts=PROMPTS, rewards=environment_reward, **changes):
        tokenizer = ShelfEnvironment().tokenizer()
        args = TreeGRPOConfig(
            **{
                "output_dir": str(tmp_path),
                "per_device_train_batch_size": 4 * len(prompts),
                "num_generations": 4,
                "max_completion_length": 24,
                "learning_rate": 1e-2,
                "max_steps": 1,
                "use_cpu": True,
                "bf16": False,
                "activation_checkpointing": False,
                "report_to": "none",
                "disable_tqdm": True,
                "save_strategy": "no",
                "shuffle_dataset": False,
                "logging_steps": 1,
                **changes,
            }
        )
        return TreeGRPOTrainer(
            tiny_model("bailing_hybrid", vocab_size=len(tokenizer)),
            rewards,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )

    return make


def collector(environment=Flaky, **options):
    return TreeRolloutCollector(environment, branching=(2, 2), max_turns=3, max_turn_tokens=3, **options)


@pytest.mark.essential("turn-grpo")
@pytest.mark.parametrize(
    ("credit", "loss_type"),
    [
        ("trajectory", "dapo"),
        ("turn", "dapo"),
        ("turn", "grpo"),
        ("branch", "bnpo"),
        ("tree_grpo", "dr_grpo"),
        ("treerl", "cispo"),
    ],
)
def test_failed_episodes_train_nothing(make_trainer, credit, loss_type):
    """A step with failed episodes is the step without them, also where the loss is a mean over rows."""
    collect = collector()
    rows = collect([prompt for prompt in PROMPTS for _ in range(4)], make_trainer(collect))
    assert rows["environment_failed"][:4] == [True] * 4 and rows["environment_reward"][:4] == [None] * 4
    failed = rows["environment_failed"][4:]
    assert 0 < sum(failed) < 4, "the case is not covered"
    for index, mask in enumerate(rows["env_mask"]):
        assert (sum(mask) == 0) == rows["environment_failed"][index]

    def score(environment_failed, **_):  # tells the others apart, alike in both runs
        return [None if is_failed else float(index % 4) for index, is_failed in enumerate(environment_failed)]

    kept = [index for index in range(4) if not failed[index]]
    # Of the second group by itself, and by a rollout function's key for it, the episodes that did not fail.
    without: dict = {
        key: values[4:]
        if key in ("environment_reward", "environment_failed", "truncated")
        else [values[4 + i] for i in kept]
        for key, values in rows.items()
    }
    without |= {"episode": kept, "absent": failed}
    without = {key: values for key, values in without.items() if key not in ("tree", "num_turns")}

    after = {}
    for name, prompts, part in (("with", PROMPTS, rows), ("without", PROMPTS[1:], without)):
        trainer = make_trainer(
            lambda *_, part=part: part, prompts, score, loss_type=loss_type, optim="sgd", tree_credit=credit
        )
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
        after[name] = trainer.model.state_dict()
        assert any(not torch.equal(value, start[name]) for name, value in after[name].items())
        entry = next(entry for entry in trainer.state.log_history if "reward" in entry)
        scored = [value for value in score(rows["environment_failed"])[4:] if value is not None]
        assert entry["reward"] == pytest.approx(sum(scored) / len(scored))
    worst = max(float((value - after["without"][name]).abs().max()) for name, value in after["with"].items())
    assert worst <= PARAMETER_BUDGET


def test_failures_are_counted_and_said_once(make_trainer, caplog):
    """In the trainer's log, and each kind once with its traceback."""
    collect = collector()
    trainer = make_trainer(collect, max_steps=2)
    with caplog.at_level(logging.WARNING, "harts_hf"):
        trainer.train()
    said = [record.getMessage() for record in caplog.records if "an environment failed" in record.getMessage()]
    assert len(said) == 1 and "no lamp today" in said[0] and "in reset" in said[0]
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(entries) == 2
    for entry in entries:
        assert 0.5 <= entry["environment/failed"] < 1
        assert entry["environment/failed/raised"] == 8 * entry["environment/failed"]
        assert entry["environment/failed/timeout"] == entry["environment/cut_observations"] == 0


def test_failures_with_a_reward_are_trained(make_trainer):
    """Those that sampled something; the others still have none."""
    collect = collector(failed_reward=-1.0)
    rows = collect([prompt for prompt in PROMPTS for _ in range(4)], make_trainer(collect))
    for index, is_failed in enumerate(rows["environment_failed"]):
        if is_failed:
            assert rows["environment_reward"][index] == (None if index < 4 else -1.0)
            assert (sum(rows["env_mask"][index]) > 0) == (index >= 4)
    with pytest.raises(ValueError, match="expected failed_reward to be a finite number"):
        collector(failed_reward=float("nan"))


def test_if_all_fail_the_run_ends(make_trainer):
    """There is nothing to learn, and a traceback that says where it happened."""
    collect = collector()
    with pytest.raises(
        EpisodesFailedError, match=r"got 4 failures of 4 episodes \(4 raised\).*no lamp today"
    ) as error:
        make_trainer(collect, PROMPTS[:1]).train()
    assert isinstance(error.value.__cause__, OSError)


class Short(ShelfEnvironment):
    def step(self, action):
        return super().step(action)._replace(observation="lamp " * 100)


def test_conversations_without_room_are_counted(make_trainer):
    """They end as TRL's do, and a run in which all do is not silent."""
    collect = collector(Short)
    collect([PROMPTS[0]] * 4, make_trainer(collect))
    assert collect.last_metrics["environment/out_of_room"] > 0
    assert collect.last_metrics["environment/failed"] == 0
    collect = collector(Short, max_observation_characters=20)
    collect([PROMPTS[0]] * 4, make_trainer(collect))
    assert collect.last_metrics["environment/cut_observations"] > 0


def test_the_rows_of_the_data_set_reach_the_environment(make_trainer):
    """All columns in this package's trainers; the prompt alone where somebody calls the collector otherwise."""
    seen = []

    class Rows(ShelfEnvironment):
        def begin(self, row, *, seed):
            seen.append(dict(row))
            return super().begin(row, seed=seed)

    collect = collector(Rows)
    trainer = make_trainer(collect, PROMPTS)
    trainer.train_dataset = trainer.train_dataset.add_column("shelf", [7, 8])
    trainer.train()
    assert seen == [{"prompt": PROMPTS[0], "shelf": 7}, {"prompt": PROMPTS[1], "shelf": 8}]
    collect([PROMPTS[0]] * 4, trainer)
    assert seen[-1] == {"prompt": PROMPTS[0]}
