"""Configurations: TRL's, with the tree options as flat fields, so that YAML and the command line reach them."""

from dataclasses import dataclass, field
from typing import Any, cast

from trl import GRPOConfig, RLOOConfig

from harts_hf.planner import CostModel, PlannerConfig
from harts_hf.planner.config import ExecutionChoice, Sharing
from harts_hf.rollouts.credit import TREE_CREDITS
from harts_hf.rollouts.engines.vllm_probe import DEFAULT_MAX_GAP
from harts_hf.rollouts.engines.vllm_server import ServerOptions
from harts_hf.runtime.placing import PLACEMENTS
from harts_hf.trainers.router_loss import SCOPES

CREDITS = ("trajectory", *TREE_CREDITS)
EPISODE_WEIGHTS = ("sample", "episode")
LATENTS = ("compressed", "expanded")
FUSED_MODULES = ("auto", "off")


@dataclass
class TreeOptions:
    r"""
    Options of tree training, shared by all tree trainers.

    Parameters:
        tree_max_tokens_per_microbatch (`int`, *optional*, defaults to `16384`):
            Rows (unique tokens) that one forward may take.
        tree_sharing (`str`, *optional*, defaults to `"auto"`):
            `"always"` computes shared tokens once wherever they fit together, `"never"` runs every trajectory by
            itself, `"auto"` takes what is estimated to be faster.
        tree_execution (`str`, *optional*, defaults to `"auto"`):
            Order of forwards and backwards of a tree that is cut: `"replay"` scores everything, then runs each
            microbatch forward and backward; `"nested"` keeps the graphs of open trunks; `"keep"` keeps all graphs.
            `"auto"` is `"nested"` without a scoring pass where that is exact, `"replay"` elsewhere; with several
            processes, `"replay"` also where it is estimated to be faster.
        tree_placement (`str`, *optional*, defaults to `"auto"`):
            With several processes, whose rows a process computes. `"global"`: the trajectories of all of them make
            one forest, and the planner says which process computes which part of it; `"local"`: each computes its
            own trajectories; `"auto"`: what is estimated to be faster (`"global"` with `tree_sharing="always"`).
        tree_max_graph_tokens (`int`, *optional*):
            Rows whose graphs may be alive at once. No limit if unset, except that `tree_execution="auto"` keeps at
            most two microbatches. A window that cannot keep this limit, or the next one, runs with the smallest that
            it can keep: a warning says so, and the metric `tree/limits_raised`.
        tree_max_handoff_bytes (`int`, *optional*):
            Bytes of states handed between microbatches that may be alive at once, their gradients included.
        tree_cost (`str`, *optional*):
            File that `harts bench --fit-cost` wrote for the model on this machine, whose times are used. Without one,
            they are those of Ling-3.0-tiny on an H200. Bytes are always the trained model's own.
        tree_offload_handoff (`bool`, *optional*, defaults to `False`):
            Whether handed states lie on the CPU between uses.
        tree_handoff_latents (`str`, *optional*, defaults to `"compressed"`):
            What multi-head latent attention hands over: `"compressed"` latents, which each dependent expands again,
            or `"expanded"` keys and values, which take more memory and less work.
        tree_deterministic (`bool`, *optional*, defaults to `False`):
            Whether attention on GPUs has to give the same bits in every run. FlashAttention-4's backward does not on
            Hopper; FlexAttention, which is slower, does.
        tree_aux_scope (`str`, *optional*, defaults to `"slice"`):
            Over which tokens the router's auxiliary loss (`router_aux_loss_coef`) takes its means: `"slice"`, those of
            a micro-step of one process, as TRL has it; `"global"`, those of the optimizer step on all processes.
        tree_expert_bias_update_speed (`float`, *optional*, defaults to `0.0`):
            Of routers with a bias (`bailing_hybrid`, `kimi_linear`), by how much the bias of each expert is moved up
            or down after an optimizer step in which it had less or more to do than the mean of its layer. `0` leaves
            the bias as it is.
        tree_replay_routing (`bool`, *optional*, defaults to `False`):
            Whether the forward of each backward takes the experts that the scoring pass chose, at weights computed
            anew, so that rounding flips none between the two.
        tree_fused_modules (`str`, *optional*, defaults to `"auto"`):
            `"auto"` runs norms, gates and experts on a GPU as single operations (of the same results but for
            rounding), `"off"` as Transformers has them.
    """

    tree_max_tokens_per_microbatch: int = field(
        default=16384, metadata={"help": "Rows (unique tokens) that one forward may take."}
    )
    tree_sharing: str = field(
        default="auto",
        metadata={
            "help": "Whether shared tokens are computed once: 'always', 'never' or 'auto' (what is estimated faster).",
            "choices": ["auto", "always", "never"],
        },
    )

    tree_execution: str = field(
        default="auto",
        metadata={
            "help": "Order of forwards and backwards of a tree that is cut: 'replay', 'nested', 'keep', or 'auto' "
            "('nested' without a scoring pass where that is exact, 'replay' elsewhere).",
            "choices": ["auto", "replay", "nested", "keep"],
        },
    )
    tree_placement: str = field(
        default="auto",
        metadata={
            "help": "With several processes, whether they share one forest of all their trajectories ('global'), each "
            "computes its own ('local'), or what is estimated to be faster ('auto').",
            "choices": list(PLACEMENTS),
        },
    )
    tree_max_graph_tokens: int | None = field(
        default=None, metadata={"help": "Rows whose graphs may be alive at once; no limit if unset."}
    )
    tree_max_handoff_bytes: int | None = field(
        default=None, metadata={"help": "Bytes of states handed between microbatches that may be alive at once."}
    )
    tree_cost: str | None = field(
        default=None,
        metadata={"help": "File that `harts bench --fit-cost` wrote for the model on this machine."},
    )
    tree_offload_handoff: bool = field(
        default=False, metadata={"help": "Whether states handed between microbatches lie on the CPU between uses."}
    )
    tree_handoff_latents: str = field(
        default="compressed",
        metadata={
            "help": "What multi-head latent attention hands over: 'compressed' latents, which each dependent expands "
            "again, or 'expanded' keys and values (more memory, less work).",
            "choices": list(LATENTS),
        },
    )
    tree_deterministic: bool = field(
        default=False,
        metadata={
            "help": "Whether attention on GPUs has to give the same bits in every run (FlexAttention instead of the "
            "faster FlashAttention-4)."
        },
    )
    tree_aux_scope: str = field(
        default="slice",
        metadata={
            "help": "Over which tokens the router's auxiliary loss takes its means: a micro-step's on one process "
            "('slice', as in TRL), or the optimizer step's on all ('global').",
            "choices": list(SCOPES),
        },
    )
    tree_expert_bias_update_speed: float = field(
        default=0.0,
        metadata={
            "help": "By how much the bias of each expert moves after an optimizer step, towards equal load; 0: not."
        },
    )
    tree_replay_routing: bool = field(
        default=False,
        metadata={"help": "Whether the forward of each backward takes the experts that the scoring pass chose."},
    )
    tree_fused_modules: str = field(
        default="auto",
        metadata={
            "help": "Whether norms, gates and experts run as single operations: 'auto' (on a GPU) or 'off'.",
            "choices": list(FUSED_MODULES),
        },
    )

    def __post_init__(self) -> None:
        # TRL turns checkpointing on by the name that Transformers has given up, and Transformers would say so to users
        # who named neither. What they set themselves is theirs to hear about.
        options: Any = self
        if options.activation_checkpointing is None and options.gradient_checkpointing is True:
            options.activation_checkpointing = True
        super().__post_init__()  # type: ignore[misc]

    def check_tree_options(self) -> None:
        """Raises ValueError for options that cannot work, before anything is sampled."""
        temperature = getattr(self, "temperature", 1.0)
        if not temperature > 0:
            raise ValueError(f"expected a temperature above 0, got {temperature}")
        if self.tree_fused_modules not in FUSED_MODULES:
            raise ValueError(
                f"expected tree_fused_modules to be one of {', '.join(FUSED_MODULES)}, got {self.tree_fused_modules!r}"
            )
        if not 0 <= self.tree_expert_bias_update_speed < float("inf"):
            raise ValueError(
                "expected tree_expert_bias_update_speed to be a finite number of at least 0, got "
                f"{self.tree_expert_bias_update_speed}"
            )
        if self.tree_aux_scope not in SCOPES:
            raise ValueError(f"expected tree_aux_scope to be one of {', '.join(SCOPES)}, got {self.tree_aux_scope!r}")
        if self.tree_placement not in PLACEMENTS:
            raise ValueError(
                f"expected tree_placement to be one of {', '.join(PLACEMENTS)}, got {self.tree_placement!r}"
            )
        self.planner_config()

    def planner_config(self) -> PlannerConfig:
        """The planner's settings.

        Raises:
            ValueError: an option that no plan can meet.
        """
        if self.tree_handoff_latents not in LATENTS:
            raise ValueError(
                f"expected tree_handoff_latents to be one of {', '.join(LATENTS)}, got {self.tree_handoff_latents!r}"
            )
        return PlannerConfig(
            max_tokens_per_microbatch=self.tree_max_tokens_per_microbatch,
            max_graph_tokens=self.tree_max_graph_tokens,
            max_handoff_bytes=self.tree_max_handoff_bytes,
            sharing=cast(Sharing, self.tree_sharing),
            execution=cast(ExecutionChoice, self.tree_execution),
            cost=None if self.tree_cost is None else CostModel.load(self.tree_cost),
        )


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
        self.server_options()
        if self.tree_episode_weight not in EPISODE_WEIGHTS:
            raise ValueError(
                f"expected tree_episode_weight to be one of {', '.join(EPISODE_WEIGHTS)}, "
                f"got {self.tree_episode_weight!r}"
            )


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
        if self.tree_credit not in CREDITS:
            raise ValueError(f"expected tree_credit to be one of {', '.join(CREDITS)}, got {self.tree_credit!r}")
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
