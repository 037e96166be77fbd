"""The options of all tree trainers, as flat fields of their configurations."""

import math
from dataclasses import dataclass, field
from typing import Any, cast

from harts_hf.planner import CostModel, PlannerConfig
from harts_hf.planner.config import ExecutionChoice, Sharing
from harts_hf.runtime.budgets import Budget
from harts_hf.runtime.placing import PLACEMENTS
from harts_hf.trainers.field_checks import FLAG, FRACTION, PATH, check_fields, integer, number, one_of
from harts_hf.trainers.router_loss import SCOPES
from harts_hf.trainers.routing_replay import REPLAYS

LATENTS = ("compressed", "expanded")
FUSED_MODULES = ("auto", "off")
# Of a limit: what fits into the device's memory.
AUTO = "auto"
# Fields of Transformers and TRL, where a configuration has them. Those that TRL divides by, before it does:
_OF_STEPS = {
    "per_device_train_batch_size": integer(1),
    "gradient_accumulation_steps": integer(1),
    "num_generations": integer(1),
}
# Those with which a training would find out after its first rollouts, or never: of 0 iterations, or steps per
# generation, TRL makes a data set without rows and ends; NaN in the loss or the optimizer is in every weight.
_OF_TRAINING = {
    "max_completion_length": integer(1),
    "num_iterations": integer(1),
    "steps_per_generation": integer(1),
    "temperature": number(above=True),
    "beta": number(),
    "epsilon": number(),
    "epsilon_high": number().or_none(),
    "delta": number(above=True).or_none(),
    "entropy_coef": number(-math.inf),
    "router_aux_loss_coef": number().or_none(),
    "top_entropy_quantile": number(high=1),
    "off_policy_mask_threshold": number(-math.inf).or_none(),
    "sapo_temperature_neg": number(above=True),
    "sapo_temperature_pos": number(above=True),
    "scale_rewards": one_of(("group", "batch", "none")),
}
_OF_OPTIMIZERS = {
    "learning_rate": number(),
    "weight_decay": number(),
    "adam_epsilon": number(),
    "adam_beta1": FRACTION,
    "adam_beta2": FRACTION,
    "max_grad_norm": number(-math.inf).or_none(),
}
# Fields of TreeOptions, but for the limits, and what the planner checks.
_OF_TREES = {
    "tree_cost": PATH.or_none(),
    "tree_offload_handoff": FLAG,
    "tree_handoff_latents": one_of(LATENTS),
    "tree_deterministic": FLAG,
    "tree_placement": one_of(PLACEMENTS),
    "tree_aux_scope": one_of(SCOPES),
    "tree_expert_bias_update_speed": number(),
    "tree_replay_routing": one_of(REPLAYS),
    "tree_split_on_routes": FLAG,
    "tree_fused_modules": one_of(FUSED_MODULES),
}


@dataclass
class TreeOptions:
    r"""
    Options of tree training, shared by all tree trainers.

    Parameters:
        tree_max_tokens_per_microbatch (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            Rows (unique tokens) that one forward may take. `"auto"`: on a GPU as many as are predicted to fit into its
            free memory, at most 131,072, the same on all processes; elsewhere 16,384. It is found before the first
            step and is the metric `tree/max_tokens_per_microbatch`; set that number to have the same plans on a
            machine with other memory. Where memory runs out in a step, whatever the number, it is halved (or the
            rows of the largest microbatch are, where those are fewer) and the step begun again, once: a warning says
            so, and the metric `tree/out_of_memory`.
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
        tree_max_graph_tokens (`int` or `"auto"`, *optional*):
            Rows whose graphs may be alive at once; `"auto"`: as many as fit. If unset, what fits where
            `tree_max_tokens_per_microbatch` is `"auto"`, else no limit, except that `tree_execution="auto"` keeps at
            most two microbatches. A window that cannot keep this limit, or the next one, runs with the smallest that
            it can keep: a warning says so, and the metric `tree/limits_raised`.
        tree_max_handoff_bytes (`int` or `"auto"`, *optional*):
            Bytes of states handed between microbatches that may be alive at once, their gradients included; `"auto"`:
            a quarter of what is left for rows. No limit if unset, as they are small beside graphs, and a limit that a
            window meets has prefixes computed again.
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
        tree_replay_routing (`str` or `bool`, *optional*, defaults to `"off"`):
            Which experts the forward of each backward takes, at weights computed anew, so that rounding flips none:
            `"scoring"` (or `True`), those of the pass that computed old log-probs, or of the step's scoring pass;
            `"engine"`, those of the engine that sampled the rollouts; `"off"` (or `False`), its own.
        tree_split_on_routes (`bool`, *optional*, defaults to `False`):
            Whether tokens that came with different experts in different requests are computed apart, each with its
            own, instead of together with those of the first. Needs `tree_replay_routing="engine"`.
        tree_fused_modules (`str`, *optional*, defaults to `"auto"`):
            `"auto"` runs norms, gates and experts on a GPU as single operations (of the same results but for
            rounding), `"off"` as Transformers has them.
    """

    # Its None is refused; with it, Transformers' parser reads the command line's value as a text and not as an int.
    tree_max_tokens_per_microbatch: int | str | None = field(
        default=AUTO,
        metadata={"help": "Rows (unique tokens) that one forward may take; 'auto': what fits into the GPU's memory."},
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
    tree_max_graph_tokens: int | str | None = field(
        default=None,
        metadata={"help": "Rows whose graphs may be alive at once, or 'auto'; if unset, as the microbatch's limit."},
    )
    tree_max_handoff_bytes: int | str | None = field(
        default=None,
        metadata={
            "help": "Bytes of states handed between microbatches that may be alive at once, or 'auto'; no limit if "
            "unset."
        },
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
    tree_replay_routing: str = field(
        default="off",
        metadata={
            "help": "Which experts the forward of each backward takes: those of the scoring pass, or of the engine.",
            "choices": list(REPLAYS),
        },
    )
    tree_split_on_routes: bool = field(
        default=False,
        metadata={"help": "Whether tokens that came with different experts are computed apart."},
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
        check_fields(self, _OF_STEPS)
        if options.activation_checkpointing is None and options.gradient_checkpointing is True:
            options.activation_checkpointing = True
        super().__post_init__()  # type: ignore[misc]

    def check_tree_options(self) -> None:
        """Raises ValueError for options that cannot work, before anything is sampled."""
        for name in ("tree_max_tokens_per_microbatch", "tree_max_graph_tokens", "tree_max_handoff_bytes"):
            setattr(self, name, _limit(name, getattr(self, name), optional=name != "tree_max_tokens_per_microbatch"))
        if isinstance(self.tree_replay_routing, bool) or self.tree_replay_routing is None:
            self.tree_replay_routing = "scoring" if self.tree_replay_routing else "off"
        check_fields(self, _OF_TREES)
        check_fields(self, _OF_TRAINING)
        if self.tree_split_on_routes and self.tree_replay_routing != "engine":
            raise ValueError(
                "expected tree_replay_routing='engine' with tree_split_on_routes=True, got "
                f"{self.tree_replay_routing!r}"
            )
        self.planner_config()

    @property
    def asks_for_memory(self) -> bool:
        """Whether a limit is what fits into memory."""
        return AUTO in (self.tree_max_tokens_per_microbatch, self.tree_max_graph_tokens, self.tree_max_handoff_bytes)

    def limits(self, fits: Budget) -> dict[str, Any]:
        """The fields of a planner's configuration that these options say.

        Args:
            fits: what stands for "auto".
        """
        rows: Any = self.tree_max_tokens_per_microbatch
        graph: Any = self.tree_max_graph_tokens
        handed: Any = self.tree_max_handoff_bytes
        if graph == AUTO or (graph is None and rows == AUTO):
            graph = fits.max_graph_tokens
        if handed == AUTO:  # not if unset: see docs/planner.md
            handed = fits.max_handoff_bytes
        if rows == AUTO:
            rows = fits.max_tokens if graph is None else min(fits.max_tokens, graph)
        return {"max_tokens_per_microbatch": rows, "max_graph_tokens": graph, "max_handoff_bytes": handed}

    def planner_config(self) -> PlannerConfig:
        """The planner's settings; for "auto", those of a device whose memory is not known.

        Raises:
            ValueError: an option that no plan can meet.
        """
        return PlannerConfig(
            **self.limits(Budget()),
            sharing=cast(Sharing, self.tree_sharing),
            execution=cast(ExecutionChoice, self.tree_execution),
            cost=None if self.tree_cost is None else CostModel.load(self.tree_cost),
        )


def check_optimizer(arguments: Any) -> None:
    """Raises ValueError for numbers with which an optimizer makes nothing of the weights, or NaN.

    Not when the configuration is made, so that a dry run says what else is refused.
    """
    check_fields(arguments, _OF_OPTIMIZERS)


def _limit(name: str, value: Any, *, optional: bool) -> int | str | None:
    """A limit, also one that the command line has as a text."""
    if value == AUTO or (value is None and optional):
        return cast("str | None", value)
    text = value.strip().replace("_", "") if isinstance(value, str) else ""
    if text.isdecimal():
        return int(text)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected {name} to be an integer or {AUTO!r}, got {value!r}")
    return value
