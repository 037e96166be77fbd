"""Which experts a trainer's steps take: those that came with rollouts, or those of the pass of old log-probs; float64.

With a learning rate of 0 every step's log-probs are the old ones, if and only if both took the same experts.
"""

import functools

import numpy as np
import pytest
import torch
from support import recorded
from support.models import tiny_model
from support.trainer_runs import run_trainer

from harts_hf import (
    TreeGRPOConfig,
    TreeGRPOTrainer,
    TreePPOConfig,
    TreePPOTrainer,
    TreeRLOOConfig,
    TreeRLOOTrainer,
    UnsupportedModelError,
)
from harts_hf.modeling import find_routers
from harts_hf.runtime.routes import TokenRoutes
from harts_hf.trainers.generation import _plain
from harts_hf.trainers.routed_experts import RouterShape, read_routed_experts

FAMILY = "bailing_hybrid"  # 3 layers, the first without experts; 8 experts, 2 per token
OPTIONS = {
    "family": FAMILY,
    "make_model": tiny_model,
    "gradient_checkpointing": True,  # layers that are computed again take the same experts
    "learning_rate": 0.0,
    "num_iterations": 2,
    "max_steps": 2,
    "tree_sharing": "always",
    "tree_max_tokens_per_microbatch": 64,
}


def drawn(row, length, layers=3):
    """``[length - 1, layers, 2]`` different experts, as vLLM returns them: all layers, none of the last token."""
    rng = np.random.default_rng([row, length])
    return rng.random((length - 1, layers, 8)).argsort(axis=-1)[..., :2].astype(np.uint8)


def with_routes(prompts, trainer):
    """Recorded rollouts; rows that share tokens come with other experts."""
    output = recorded.rollout_func(prompts, trainer)
    lengths = [len(p) + len(c) for p, c in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
    return {**output, "routed_experts": [drawn(row, length) for row, length in enumerate(lengths)]}


def as_episodes(prompts, trainer):
    """The same, each prompt's rollout an episode of two rows, and none of one prompt."""
    output = with_routes(prompts, trainer)
    rows = [row for row in range(len(prompts)) if row != 1 for _ in range(2)]
    keys = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "routed_experts")
    found = {key: [output[key][row] for row in rows] for key in keys}
    return {**output, **found, "episode": rows}


def flip_after_generation(trainer):
    """Lets routers choose others after the generation."""

    def flip(router, inputs, answer):
        logits, weights, experts = answer
        if trainer._tree.routing._generation is None:
            experts = experts.clone()
            experts[:, 0] = (experts[:, 0] + 1) % 8
        return logits, weights, experts

    for router in find_routers(trainer.model):
        router.register_forward_hook(flip, prepend=True)


class WatchedPPOTrainer(TreePPOTrainer):
    """Its routers choose others after the generation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        flip_after_generation(self)


class WatchedGRPOTrainer(TreeGRPOTrainer):
    """Notes how far each loss's log-probs are from the old ones; its routers choose others after the generation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gaps, self.seen = [], []
        flip_after_generation(self)

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        count = inputs["completion_ids"].shape[1]
        found = self._get_per_token_logps_and_entropies(model, ids, mask, count, compute_entropy=True)[0].detach()
        gap = (found - inputs["old_per_token_logps"]) * inputs["tool_mask"]
        self.gaps.append(gap.abs().max().item())
        self.seen.append((ids, found))
        return super()._compute_loss(model, inputs)


def train(tmp_path, mode, rollout_func=with_routes, **options):
    """The trainer, and the logs of its steps."""
    options = {**OPTIONS, "tree_replay_routing": mode, **options}
    _, logs, trainer = run_trainer(WatchedGRPOTrainer, TreeGRPOConfig, tmp_path, rollout_func=rollout_func, **options)
    assert len(trainer.gaps) >= 4
    return trainer, logs[:-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By mode, the trainer and its logs; trained once."""
    return functools.cache(lambda mode, **options: train(tmp_path_factory.mktemp("run"), mode, **options))


@pytest.mark.essential("engine")
@pytest.mark.parametrize("mode", ["off", "scoring", "engine"])
def test_steps_take_the_experts_of_the_old_log_probs(trained, mode):
    """Without replay they differ; flips are counted against whoever chose first."""
    trainer, logs = trained(mode)
    if mode == "off":
        assert max(trainer.gaps) > 1e-3  # the first step after a generation finds those very log-probs
        assert not any("rout" in name and "entropy" not in name for name in logs[0])
        return
    assert max(trainer.gaps) < 1e-10  # of log-probs near -4
    for log in logs:
        assert log["tree/logp_recompute_maxdiff"] < 1e-10
        if mode == "scoring":
            assert 0.3 < log["tree/routing_flips"] <= 0.5 and "tree/engine_routing_flips" not in log
        else:
            assert 0.6 < log["tree/engine_routing_flips"] < 0.9  # drawn at random, 2 of 8
            assert log["tree/engine_routes_missing"] == 0  # of a rollout's last token nothing depends


@pytest.mark.exhaustive
def test_the_engines_experts_are_taken(trained):
    """Log-probs are others than on the trainer's own; tokens that came with other experts are computed apart."""
    own, engine, logs = trained("scoring")[0], *trained("engine")
    assert (own.seen[0][1] - engine.seen[0][1]).abs().max() > 1e-3
    apart, split = trained("engine", tree_split_on_routes=True)
    assert max(apart.gaps) < 1e-10
    assert split[0]["tree/engine_routes_differing"] == 0 and logs[0]["tree/engine_routes_differing"] > 50
    assert logs[1]["tree/engine_routes_differing"] == 0  # the same rollouts again
    assert split[0]["tree/unique_tokens"] > 1.3 * logs[0]["tree/unique_tokens"]
    assert split[0]["tree/expanded_tokens"] == logs[0]["tree/expanded_tokens"]


@pytest.mark.exhaustive
def test_routes_of_episodes(tmp_path):
    """They stay with their rows while TRL shuffles and splits episodes; an episode without a row has none."""
    trainer, logs = train(tmp_path, "engine", rollout_func=as_episodes)
    assert max(trainer.gaps) < 1e-10
    assert 0 < logs[0]["tree/engine_routes_missing"] < 0.01


@pytest.mark.essential("dealt-engine")
@pytest.mark.parametrize("mode", ["scoring", "engine"])
@pytest.mark.parametrize(("minibatches", "epochs"), [(2, 2), (1, 1)], ids=["dealt", "at-once"])
def test_minibatches_of_ppo(tmp_path, mode, minibatches, epochs):
    """All epochs' minibatches of dealt trees take the experts of the pass of old log-probs and values.

    With one minibatch and epoch TRL asks for no old log-probs: the trainer scores the batch itself.
    """
    options = {**OPTIONS, "gradient_accumulation_steps": 1, "max_steps": minibatches * epochs, "beta": 0.0}
    options |= {"steps_per_generation": minibatches, "num_iterations": epochs, "router_aux_loss_coef": 0.0}
    options |= {"tree_replay_routing": mode, "rollout_func": with_routes}
    _, logs, _ = run_trainer(WatchedPPOTrainer, TreePPOConfig, tmp_path, **options)
    divergences = [log["approx_kl"] for log in logs[:-1]]
    assert len(divergences) == minibatches * epochs
    assert max(divergences) < 1e-14  # of log-probs that differ by 1e-8
    assert all(abs(log["ratio"] - 1) < 1e-8 and log["tree/logp_recompute_maxdiff"] < 1e-10 for log in logs[:-1])
    name = "tree/routing_flips" if mode == "scoring" else "tree/engine_routing_flips"
    assert all(log[name] > 0.3 for log in logs[:-1])


def test_read_routed_experts():
    """Arrays, lists, pieces that rows share; layers with a router are picked; checkpoints keep them."""
    shape = RouterShape.of(tiny_model(FAMILY))
    assert (shape.layers, shape.num_layers, shape.num_experts, shape.top_k) == ((1, 2), 3, 8, 2)
    first, second = drawn(0, 6), torch.from_numpy(drawn(1, 4)[:, 1:].astype(np.int16))
    found = read_routed_experts([[first, second], first.tolist(), None, [first], []], [8, 5, 9, 9, 2], shape)
    expected = np.sort(first[:, 1:], axis=-1)
    assert found[2] is None and found[4] is None
    for routes in (found[0], found[1], found[3]):
        assert np.array_equal(routes.of(np.arange(5)).numpy(), expected)
    assert np.array_equal(found[0].of(np.array([5, 7])).numpy(), np.sort(second.numpy(), axis=-1)[[0, 2]])
    assert np.array_equal(found[0].places()[:5], found[3].places())
    assert len(set(found[0].places().tolist()) & set(found[1].places().tolist())) == 0
    kept = _plain([None if one is None else one.plain() for one in found], "routes")
    again = [None if one is None else TokenRoutes.from_plain(one) for one in kept]
    assert torch.equal(again[0].of(np.arange(8)), found[0].of(np.arange(8)))
    # Of one array of all rows, each row is a new view, which may have the id of one let go.
    rows = np.stack([drawn(row, 5, 2) for row in range(64)])
    for row, one in enumerate(read_routed_experts(rows, [5] * 64, shape)):
        assert np.array_equal(one.of(np.arange(4)).numpy(), np.sort(rows[row], axis=-1)), row
    unknown = np.full((1, 2, 2), -1)
    assert read_routed_experts([unknown], [1], shape)[0].hashes().tolist() == [0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            np.zeros((2, 4, 2), int),
            r"routed_experts\[0\] .* \[tokens, 2 or 3 layers, 2 experts\], got int64 \[2, 4, 2\]",
        ),
        (np.zeros((2, 2, 2)), r"integers .*got float64"),
        (torch.zeros(2, 2, 2, dtype=torch.bfloat16), r"integers .*got float64"),
        ([[[0, 1], [0]]], r"expected routed_experts\[0\] to be an array, or lists of the same lengths"),
        (np.full((1, 2, 2), 8) - [0, 1], r"experts in \[0, 8\).*got 8"),
        (np.full((1, 2, 2), 2**64 - 1, np.uint64), r"experts in \[0, 8\).*got 18446744073709551615"),
        (np.zeros((1, 2, 2), int), r"2 different experts.*got \[0, 0\] for token 0 in layer 1"),
        (np.array([[[0, 1], [-1, 1]]]), r"2 different experts.*got \[-1, 1\] for token 0 in layer 2"),
        (drawn(0, 9), r"at most 5 tokens .*got 8"),
    ],
)
def test_bad_routes(value, said):
    """What is not of the model is named before a step is lost."""
    with pytest.raises(ValueError, match=said):
        read_routed_experts([value], [5], RouterShape.of(tiny_model(FAMILY)))
    with pytest.raises(ValueError, match="2 entries, one per row, got 1"):
        read_routed_experts([value], [5, 5], RouterShape.of(tiny_model(FAMILY)))


def test_refusals(tmp_path):
    """Options that contradict one another; trainers, models and rollouts that have no routes."""
    for given, mode in ((True, "scoring"), (False, "off"), (None, "off"), ("engine", "engine")):
        assert (
            TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, tree_replay_routing=given).tree_replay_routing
            == mode
        )
    with pytest.raises(ValueError, match="tree_replay_routing to be one of off, scoring, engine, got 'vllm'"):
        TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, tree_replay_routing="vllm")
    with pytest.raises(ValueError, match="'engine' with tree_split_on_routes=True, got 'scoring'"):
        TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, tree_replay_routing=True, tree_split_on_routes=True)
    engine = {"family": FAMILY, "tree_replay_routing": "engine", "max_steps": 1}
    with pytest.raises(UnsupportedModelError, match="mixture of experts with tree_replay_routing='engine'"):
        run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **{**engine, "family": "qwen3_5_text"})
    engine["beta"] = 0.0
    with pytest.raises(UnsupportedModelError, match="takes an engine's routes, got TreeRLOOTrainer"):
        run_trainer(TreeRLOOTrainer, TreeRLOOConfig, tmp_path, rollout_func=None, **engine)
    with pytest.raises(UnsupportedModelError, match=r"rollout_func that returns 'routed_experts'"):
        run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, rollout_func=None, **engine)
    with pytest.raises(ValueError, match=r"'routed_experts' from the rollout function .*got none"):
        run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **engine)
