"""Configurations: TRL's, with the tree options as flat fields, so that YAML and the command line reach them."""

from dataclasses import dataclass, field

from trl import GRPOConfig, RLOOConfig

from harts_hf.rollouts.credit import TREE_CREDITS
from harts_hf.rollouts.engines.vllm_probe import DEFAULT_MAX_GAP
from harts_hf.rollouts.engines.vllm_server import ServerOptions
from harts_hf.trainers.field_checks import check_fields, number, one_of
from harts_hf.trainers.tree_options import TreeOptions

CREDITS = ("trajectory", *TREE_CREDITS)
EPISODE_WEIGHTS = ("sample", "episode")
_OF_ROLLOUTS = {
    "tree_episode_weight": one_of(EPISODE_WEIGHTS),
    "tree_max_logprob_gap": number(above=True).or_none(),
    "tree_server_timeout": number(above=True),
}


@dataclass
class RolloutOptions:
    r"""
    Options of trainers whose rollouts come from a `rollout_func`.

    Parameters:
        tree_episode_weight (`str`, *optional*, defaults to `"sample"`):
            How samples count in the objective. `"sample"`: each is a sequence of its own, so the loss is TRL's on the
            same rows, and a token of a loss that averages over tokens weighs the same however an agent's requests
            fork. `"episode"`: each episode is one sequence, whose samples share its weight (`1 / samples` each: all of
            a sample's derivatives and its part of the logged loss are multiplied by it, the KL and entropy terms
            too), so that a rollout does not weigh more for having forked more often. Means over tokens (`bnpo`,
            `dapo`, `cispo`, `vespo`) are then over weighted tokens.
        tree_max_logprob_gap (`float`, *optional*, defaults to `0.1`):
            With a vLLM server, the mean difference in nats between its log-probs and the trainer's, measured after
            each synchronisation of weights, above which the run is stopped. Unset it (`null`) not to measure.
        tree_server_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds for which a turn of a vLLM server is waited for before it is asked for again.
    """

    tree_episode_weight: str = field(
        default="sample",
        metadata={
            "help": "How the samples of an episode count in the objective: each as a sequence ('sample'), or together "
            "as one ('episode').",
            "choices": list(EPISODE_WEIGHTS),
        },
    )

    tree_max_logprob_gap: float | None = field(
        default=DEFAULT_MAX_GAP,
        metadata={
            "help": "Mean difference in nats between a vLLM server's log-probs and the trainer's above which the run "
            "is stopped; null not to measure it."
        },
    )
    tree_server_timeout: float = field(
        default=600.0, metadata={"help": "Seconds for which a turn of a vLLM server is waited for."}
    )

    def server_options(self) -> ServerOptions:
        """How a vLLM server is asked.

        Raises:
            ValueError: numbers outside their ranges.
        """
        return ServerOptions(timeout=self.tree_server_timeout, max_logprob_gap=self.tree_max_logprob_gap)

    def check_rollout_options(self) -> None:
        """Raises ValueError for options that cannot work, before anything is sampled."""
        check_fields(self, _OF_ROLLOUTS)
        self.server_options()


@dataclass
class TreeGRPOConfig(RolloutOptions, TreeOptions, GRPOConfig):
    r"""
    Configuration class for the [`TreeGRPOTrainer`]: every parameter of [`GRPOConfig`], those of [`TreeOptions`]
    and [`RolloutOptions`], and:

    Parameters:
        tree_credit (`str`, *optional*, defaults to `"trajectory"`):
            `"trajectory"` gives every token of a trajectory its group-relative advantage, as TRL does; the others give
            each turn of the policy an advantage of its own from the rewards below it in the tree: `"turn"` against the
            history that it continues, `"branch"` against its siblings at the fork, `"treerl"` and `"tree_grpo"` as
            those papers have it (docs/forks.md).
    """

    tree_credit: str = field(
        default="trajectory",
        metadata={
            "help": "'trajectory': one group-relative advantage per trajectory, as TRL has it. 'turn', 'branch', "
            "'treerl', 'tree_grpo': from the rewards below each turn of the policy in the tree.",
            "choices": list(CREDITS),
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_tree_options()
        self.check_rollout_options()
        check_fields(self, {"tree_credit": one_of(CREDITS)})
        if self.tree_credit != "trajectory" and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"expected multi_objective_aggregation='sum_then_normalize' with tree_credit={self.tree_credit!r} "
                "(rewards are summed before they are compared below each turn), got "
                f"{self.multi_objective_aggregation!r}"
            )


@dataclass
class TreeRLOOConfig(TreeOptions, RLOOConfig):
    r"""
    Configuration class for the [`TreeRLOOTrainer`]: every parameter of [`RLOOConfig`] and those of [`TreeOptions`].
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_tree_options()
