"""Configuration of PPO on rollout trees."""

from dataclasses import dataclass, field, fields

from trl import GRPOConfig

from harts_hf.trainers.config import RolloutOptions
from harts_hf.trainers.field_checks import FLAG, NUMBERS, check_fields, integer, number, one_of
from harts_hf.trainers.tree_options import TreeOptions

KL_PLACES = ("reward", "loss")
EPISODE_ENDS = ("chain", "sample")
# Of GRPOConfig what PPO's steps and objective read, and all of its own.
_KINDS = {
    "num_generations": integer(1),
    "num_generations_eval": integer(1).or_none(),
    "num_iterations": integer(1),
    "steps_per_generation": integer(1).or_none(),
    "generation_batch_size": integer(1).or_none(),
    "epsilon": number(above=True),
    "epsilon_high": number(above=True).or_none(),
    "beta": number(),
    "entropy_coef": number(),
    "reward_weights": NUMBERS.or_none(),
    "use_bias_correction_kl": FLAG,
    "mask_truncated_completions": FLAG,
    "gamma": number(high=1),
    "lam": number(high=1),
    "cliprange_value": number(above=True).or_none(),
    "vf_coef": number(),
    "value_learning_rate": number(above=True).or_none(),
    "whiten_advantages": FLAG,
    "kl_in": one_of(KL_PLACES),
    "kl_target": number(above=True).or_none(),
    "kl_horizon": integer(1),
    "value_warmup_steps": integer(0),
    "value_head_in_fp32": FLAG,
    "bootstrap_truncated": FLAG,
    "episode_end": one_of(EPISODE_ENDS),
}
# What PPO's objective has no place for: of GRPOConfig, RolloutOptions and Trainer; of routers, whose statistics count
# every token, where PPO computes none after a row's last trained one.
_WITHOUT_MEANING = (
    "loss_type",
    "delta",
    "importance_sampling_level",
    "multi_objective_aggregation",
    "scale_rewards",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "off_policy_mask_threshold",
    "tree_episode_weight",
    "tree_aux_scope",
    "tree_expert_bias_update_speed",
    "label_smoothing_factor",
)


class _One(int):
    """The number 1 that GRPOConfig's check of groups lets pass."""

    def __lt__(self, other: int) -> bool:
        return False


@dataclass
class TreePPOConfig(RolloutOptions, TreeOptions, GRPOConfig):
    r"""
    Configuration class for the [`TreePPOTrainer`]: parameters of [`GRPOConfig`], of [`TreeOptions`] and of
    [`RolloutOptions`], and those below. Names are TRL's where it has them: `num_iterations` epochs over a generation
    batch, each in `steps_per_generation / gradient_accumulation_steps` minibatches of whole trees; `epsilon` (and
    `epsilon_high`) clip the policy's ratio; `beta` is the coefficient of the KL divergence from the reference model
    (0: none); `entropy_coef` weighs an entropy bonus; a KL in the loss is multiplied by the ratio unless
    `use_bias_correction_kl=False`. `gamma`, `lam`, `vf_coef` and `cliprange_value` are named as in TRL's former
    `PPOConfig`. `num_generations` may be 1.

    Parameters:
        num_generations (`int`, *optional*, defaults to `1`):
            Rollouts of a prompt. No group is needed; rollouts of one prompt share what they have in common.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per trained token.
        lam (`float`, *optional*, defaults to `0.95`):
            Lambda of generalised advantage estimation.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            A value counts as moved by at most this from the one after the rollouts. Unset it (`null`) not to clip.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss.
        value_learning_rate (`float`, *optional*):
            Learning rate of the value head, or of the value model; the policy's `learning_rate` if unset. Adam moves
            a value by up to the rate times the sum of its hidden state's entries in each step, whatever `vf_coef` is.
        whiten_advantages (`bool`, *optional*, defaults to `True`):
            Whether advantages are brought to mean 0 and variance 1 over all trained tokens of all processes.
        kl_in (`str`, *optional*, defaults to `"reward"`):
            Where the KL divergence from the reference counts: `"reward"` takes `beta * (log p - log p_ref)` of each
            token from its reward, `"loss"` adds TRL's estimator to the loss.
        kl_target (`float`, *optional*):
            KL divergence per episode, in nats, that `beta` is adapted to, beginning with its given value.
        kl_horizon (`int`, *optional*, defaults to `10000`):
            Episodes over which `beta` is adapted; larger is slower.
        value_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps at the beginning that train values alone. A value head on the policy's backbone is then
            trained by itself (a weight decay other than 0 still acts on the policy); a value model is trained as ever.
        value_head_in_fp32 (`bool`, *optional*, defaults to `True`):
            Whether the value head's parameters are kept in float32 (DeepSpeed's `bf16` rounds all parameters).
        bootstrap_truncated (`bool`, *optional*, defaults to `True`):
            Whether the value of the last state stands for what an episode that was cut would have earned further on
            (Pardo et al., "Time Limits in Reinforcement Learning", arXiv 1712.00378). `False` takes a cut for an
            end, as where limits are a part of the task; with `gamma=1` and most episodes cut, values that are
            trained on one another need not settle.
        episode_end (`str`, *optional*, defaults to `"chain"`):
            How several samples of an episode follow one another: `"chain"` in order, the last one ending with the
            reward; `"sample"` each by itself, ending with what the episode earned after it.
    """

    num_generations: int | None = field(
        default=1, metadata={"help": "Rollouts of a prompt. No group is needed: 1 is as good."}
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount per trained token."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalised advantage estimation."})
    cliprange_value: float | None = field(
        default=0.2,
        metadata={"help": "A value counts as moved by at most this from that after the rollouts; null: no clipping."},
    )
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    value_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the value head or value model; learning_rate if unset."}
    )
    whiten_advantages: bool = field(
        default=True,
        metadata={"help": "Whether advantages get mean 0 and variance 1 over all trained tokens of all processes."},
    )
    kl_in: str = field(
        default="reward",
        metadata={
            "help": "Where the KL divergence from the reference model counts: 'reward' or 'loss'.",
            "choices": list(KL_PLACES),
        },
    )
    kl_target: float | None = field(
        default=None,
        metadata={"help": "KL divergence per episode, in nats, that beta is adapted to; null: fixed beta."},
    )
    kl_horizon: int = field(default=10000, metadata={"help": "Episodes over which beta is adapted."})
    value_warmup_steps: int = field(
        default=0, metadata={"help": "Optimizer steps at the beginning that train values alone."}
    )
    value_head_in_fp32: bool = field(
        default=True, metadata={"help": "Whether the value head's parameters are kept in float32."}
    )
    bootstrap_truncated: bool = field(
        default=True,
        metadata={
            "help": "Whether the value of its last state stands for what an episode that was cut would have earned "
            "further on; false takes a cut for an end."
        },
    )
    episode_end: str = field(
        default="chain",
        metadata={
            "help": "How several samples of an episode follow one another: 'chain' in order, the last one ending with "
            "the reward; 'sample' each by itself, ending with what the episode earned after it.",
            "choices": list(EPISODE_ENDS),
        },
    )

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)  # before TRL divides by some of them
        if self.num_generations == 1:
            self.num_generations = _One(1)
        super().__post_init__()
        assert self.num_generations is not None
        self.num_generations = int(self.num_generations)
        self.check_tree_options()
        self.check_rollout_options()
        if self.kl_target is not None and self.beta == 0:
            raise ValueError("expected beta above 0, from which kl_target adapts it, got 0 (no reference model)")
        self._check_minibatches()
        for name, default in ((f.name, f.default) for f in fields(self) if f.name in _WITHOUT_MEANING):
            if getattr(self, name) != default:
                raise ValueError(
                    f"expected {name} to be left at {default!r} (it has no meaning for PPO), got "
                    f"{getattr(self, name)!r}"
                )

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps of an epoch over a generation batch."""
        assert self.steps_per_generation is not None
        return self.steps_per_generation // self.gradient_accumulation_steps

    def _check_minibatches(self) -> None:
        assert self.steps_per_generation is not None
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise ValueError(
                "expected steps_per_generation to be a multiple of gradient_accumulation_steps "
                f"({self.gradient_accumulation_steps}), so that a generation batch has whole minibatches, got "
                f"{self.steps_per_generation}"
            )
        trees = self._most_trees()
        if trees < self.num_minibatches:
            raise ValueError(
                f"expected steps_per_generation / gradient_accumulation_steps of at most {trees}, the trees (prompts) "
                f"that a process has of a generation batch ({self._rollouts_of_a_process} rollouts, "
                f"num_generations={self.num_generations} of each prompt), got {self.num_minibatches} minibatches of "
                "whole trees, of which some would be empty: lower steps_per_generation or num_generations, or raise "
                "per_device_train_batch_size"
            )

    @property
    def _rollouts_of_a_process(self) -> int:
        assert self.steps_per_generation is not None
        return self.per_device_train_batch_size * self.steps_per_generation

    def _most_trees(self) -> int:
        """Of a generation batch, the trees of the process that has most; one whose rollouts are on two is on both."""
        assert self.num_generations is not None
        count, size = self._rollouts_of_a_process, self.num_generations
        starts = range(0, count * self.world_size, count)
        return max((start + count - 1) // size - start // size + 1 for start in starts)
