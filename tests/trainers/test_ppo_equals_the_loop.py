"""PPO on trees equals PPO on trajectories: SGD leaves the parameters of a plain loop over the stock model."""

import numpy as np
import pytest
import torch
from peft import LoraConfig
from support.episodes import RaggedRollouts, episodes_of
from support.models import shallow_model
from support.ppo_runs import assert_equals_the_loop, assert_same, build_trainer, train
from support.recordings import rows_of_episodes

from harts_hf.rollouts import RecordedRollouts

CUT = {"tree_max_tokens_per_microbatch": 64}


@pytest.mark.essential("samples-cut")
@pytest.mark.parametrize(
    ("options", "at_least"),
    [
        pytest.param({"entropy_coef": 0.02, "gamma": 0.97}, 1, id="chains"),
        pytest.param(CUT | {"episode_end": "sample", "lam": 1.0, "cliprange_value": None}, 3, id="samples-cut"),
        pytest.param(
            {
                "num_iterations": 2,
                "steps_per_generation": 4,
                "max_steps": 5,
                "epsilon": 1e-3,
                "epsilon_high": 2e-3,
                "cliprange_value": 1e-2,
                "learning_rate": 0.3,
                "gradient_checkpointing": True,
            },
            1,
            id="epochs-of-minibatches-clipped",
        ),
        pytest.param(
            {"beta": 0.3, "kl_target": 0.01, "kl_horizon": 20, "max_steps": 3, "bootstrap_truncated": False},
            1,
            id="kl-in-reward-adapted",
        ),
        pytest.param(
            {"beta": 0.3, "kl_in": "loss", "max_steps": 3, "mask_truncated_completions": True}, 1, id="kl-in-loss"
        ),
        pytest.param({"value_warmup_steps": 1, "whiten_advantages": False}, 1, id="warm-up"),
        pytest.param({"num_generations": 1, "tree_sharing": "never"}, 1, id="no-groups-no-sharing"),
    ],
)
def test_equals_the_loop(tmp_path, options, at_least):
    """Episodes of any number of samples, truncated ones among them."""
    trainer = assert_equals_the_loop(tmp_path, **options)
    microbatches = [entry["tree/microbatches"] for entry in trainer.state.log_history if "loss" in entry]
    assert max(microbatches) >= at_least


@pytest.mark.exhaustive
def test_rewards_of_turns_and_cuts_that_are_said(tmp_path):
    """Rewards of turns add to the episode's; one that is said to be whole ends with 0, whatever its last token."""

    def of_turns(episode):
        """By tokens: at the last one of each run of the policy's own."""
        found = []
        for sample in episode.samples:
            mask = [*sample.env_mask, 0]
            found.append([0.1 * t if mask[t] and not mask[t + 1] else 0.0 for t in range(len(sample.env_mask))])
        return found

    def change(output):
        numbers = output["episode"]
        rows = zip(output["env_mask"], strict=True)
        output["turn_rewards"] = []
        for (mask,) in rows:
            ends = np.flatnonzero(np.diff([*mask, 0]) < 0)
            output["turn_rewards"].append((0.1 * ends).tolist())
        output["truncated"] = [number % 2 == 0 for number in range(len(output["recorded_reward"]))]
        assert len(numbers) == len(output["turn_rewards"])

    order = {}

    def source(prompt, count):
        episodes = episodes_of(prompt, count)
        order.update({id(episode): number for number, episode in enumerate(episodes)})
        kept.extend(episodes)
        return episodes

    kept = []
    assert_equals_the_loop(
        tmp_path,
        RaggedRollouts(source=source, change=change),
        loop={"token_rewards": of_turns, "is_truncated": lambda episode: order[id(episode)] % 2 == 0},
    )


@pytest.mark.exhaustive
def test_a_value_model_of_another_family(tmp_path):
    """Values from a model of its own; its gradients are cleared and stepped beside the policy's."""
    critic = shallow_model("bailing_hybrid", dtype=torch.float64, seed=5)
    trainer = assert_equals_the_loop(tmp_path, value_model=critic, entropy_coef=0.01)
    assert not any("critic" in name for name, _ in trainer.model.named_parameters())


@pytest.mark.exhaustive
def test_lora(tmp_path):
    """Adapters and the value head are trained, and nothing else."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "in_proj_qkv"], lora_dropout=0.0)
    assert_equals_the_loop(tmp_path, peft_config=config, learning_rate=0.5, gradient_checkpointing=True)


@pytest.mark.exhaustive
def test_recorded_rollouts_shared_or_not(tmp_path):
    """Two epochs of minibatches leave the same parameters and losses as without sharing."""
    options = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 3, **CUT}
    found = {}
    for sharing in ("never", "always"):
        recording = RecordedRollouts(rows_of_episodes())
        trainer = build_trainer(tmp_path / sharing, recording, tree_sharing=sharing, **options)
        start = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        logs = trainer.state.log_history
        found[sharing] = train(trainer), [entry for entry in logs if "loss" in entry]
    assert_same(found["always"][0], found["never"][0], start)
    for shared, alone in zip(found["always"][1], found["never"][1], strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-9, abs=1e-12)
        assert shared["tree/forward_tokens"] < alone["tree/forward_tokens"]
