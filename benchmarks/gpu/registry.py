"""What the GPU benchmarks measure: operations, the trees that they run on, and whole models. Facts alone."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

SEED = 0

# ---- trees ----------------------------------------------------------------------------------------------------------

SHAPES = (
    "miniswe_b_drop",
    "tot_game24",
    "vmcts_dafny_bst",
    "nemo_qwen3think_b_drop",
)  # files of real rollouts' shapes
SHAPE_ROWS = 32768  # unique tokens taken of a shape file, at least; 16,384 is the package's default of a microbatch
FRACTIONS = {"0": 0.0, "1/4": 0.25, "3/4": 0.75, "15/16": 0.9375}
# TRL's layouts: the kind, the rollouts' length, and the part of it that all of a group share.
LAYOUTS = {
    f"{kind}-{length // 1024}K-{label}": (kind, length, fraction)
    for length in (16384, 32768, 65536)
    for kind in ("prompt", "nested")
    for label, fraction in FRACTIONS.items()
    if kind == "prompt" or fraction
}
FIRST_LAYOUTS = (*SHAPES, "prompt-16K-0", "nested-16K-15/16")  # what is timed first, should time be short
PREDICTED_LAYOUTS = (*SHAPES, "prompt-16K-3/4", "nested-16K-15/16")
LINEAR_LAYOUTS = tuple(dict.fromkeys([*FIRST_LAYOUTS, *LAYOUTS]))

# ---- linear attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LinearKind:
    """A linear-attention layer of a model.

    Attributes:
        kimi: KDA, whose gate is per channel; else GDN, a gate per head.
        hidden: width of the layer's input.
        heads: of queries and keys.
        value_heads: of values.
        low_rank: KDA with low-rank projections and a softplus gate; else full rank and a gate bounded by -5.
        dim: of a head.
    """

    kimi: bool
    hidden: int
    heads: int
    value_heads: int
    low_rank: bool = False
    dim: int = 128

    @property
    def small(self) -> "LinearKind":
        """For parity checks."""
        return replace(self, hidden=256, heads=8 if self.kimi else 4, value_heads=8)


LINEAR_KINDS = {
    "gdn-16/32": LinearKind(kimi=False, hidden=2048, heads=16, value_heads=32),  # Qwen3.5
    "kda-32": LinearKind(kimi=True, hidden=2304, heads=32, value_heads=32, low_rank=True),  # Kimi Linear
    "kda-16": LinearKind(kimi=True, hidden=1536, heads=16, value_heads=16),  # Bailing hybrid: Ling-tiny
}
# Checks of the rules (every input gradient), of the state kernels, of small layers (every parameter gradient; kda-16
# again with more seeds), and of what has to be equal bit by bit.
LINEAR_CHECKS = ("gdn", "kda", "one-token", "states", "layers", "kda-16", "exact")

# ---- attention ------------------------------------------------------------------------------------------------------


class HeadDims(NamedTuple):
    """Head dims of queries and keys, of values; query heads, key heads: as the supported models have them."""

    qk: int
    v: int
    heads: int
    key_heads: int


HEAD_DIMS = {"256": HeadDims(256, 256, 16, 2), "128": HeadDims(128, 128, 32, 4), "192/128": HeadDims(192, 128, 32, 32)}
FLEX_DTYPES = ("bfloat16", "float32")
Tiles = tuple[tuple[int, int], tuple[int, int]]
# Other ways to call FlashAttention-4, by head dims: tiles (forward, backward), or None where they are the package's.
FLASH_VARIANTS: dict[str, dict[str, Tiles | None]] = {
    "unpacked": {"128": None, "256": None},  # its forward puts the query heads of a key head into one tile otherwise
    "narrow": {"256": ((128, 64), (64, 48))},
    "sparse-tiles": {"256": ((128, 80), (64, 64))},  # of the backward, which it keeps for block lists: flash_config.py
    "coarse": {"128": ((128, 128), (128, 128))},
}

# ---- whole models: real widths and head dims, few layers, few experts, a small vocabulary --------------------------

VOCAB = 32768
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_SIGMOID_MOE = {"num_local_experts": 16, "num_experts_per_tok": 4}
_QWEN = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_SOFTMAX_MOE = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.0,
}  # fmt: skip
# In the order in which they are run, should time be short.
FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_COMMON, **_MLA, **_SIGMOID_MOE,
        "hidden_size": 1536, "intermediate_size": 4096, "moe_intermediate_size": 512, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 1,
    },
    "qwen3_5_text": {**_COMMON, **_QWEN, "intermediate_size": 6144},
    "kimi_linear": {
        **_COMMON, **_MLA, **_SIGMOID_MOE,
        "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
        "num_attention_heads": 32, "num_key_value_heads": 32, "linear_num_heads": 32, "linear_head_dim": 128,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "qwen3_5_moe_text": {**_COMMON, **_QWEN, **_SOFTMAX_MOE},
    "qwen3_next": {**_COMMON, **_QWEN, **_SOFTMAX_MOE, "intermediate_size": 5632},
    "olmo_hybrid": {
        **_COMMON,
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_allow_neg_eigval": True,
    },
}  # fmt: skip
# Of dry runs, where a family has such a width. Narrow ones keep heads and their dims, which kernels are compiled for.
NARROW = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 32}
TINY = {
    **NARROW, "hidden_size": 32, "shared_expert_intermediate_size": 16,
    "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    "linear_num_heads": 2, "linear_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
# Of whole models, where they have so many experts.
DRY_EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}

WHOLE_SHAPES = {"miniswe_b_drop": 16384, "tot_game24": 16384}  # unique tokens, at least
# Stages of a family, each a process of its own, and their parts, each a result file of its own.
WHOLE_PARTS = {
    "check": ("verify", "train"),
    "float32": ("verify_float32",),
    "repeat": ("repeat",),
    "time": ("speed", "memory", "cost"),
}
# Parts that need not be run for every family; the others are.
_ONLY = {
    "memory": ("bailing_hybrid", "qwen3_5_text"),
    "cost": ("bailing_hybrid", "qwen3_5_text"),
    "repeat": ("qwen3_5_text", "olmo_hybrid"),  # dense: what Transformers' experts do is not ours
    "verify_float32": ("bailing_hybrid", "qwen3_5_text"),  # attention at 192/128 and 256 without FA4
}
# Where FLA's configurations for heads of 128 in bf16 do not fit the GPU.
OTHER_CONFIGURATIONS = {
    *(("olmo_hybrid", stage) for stage in WHOLE_PARTS),
    *((family, "float32") for family in _ONLY["verify_float32"]),
}


def parts_of(family: str, stage: str) -> list[str]:
    """Parts of a stage that are run for a family."""
    return [part for part in WHOLE_PARTS[stage] if family in _ONLY.get(part, (family,))]


# ---- whole optimizer steps: whole models, a real trainer ------------------------------------------------------------

PERIOD_OF_4 = ["linear_attention"] * 3 + ["full_attention"]
_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
# A family and its configuration, whole.
STEP_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ling-3.0-tiny": ("bailing_hybrid", {
        **_TOKENS, **_MLA, "vocab_size": 157184, "hidden_size": 1536, "intermediate_size": 4608,
        "num_hidden_layers": 24, "layer_types": PERIOD_OF_4 * 6, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 128, "q_lora_rank": 256, "num_local_experts": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "moe_intermediate_size": 512, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "tie_word_embeddings": False,
    }),
    "qwen3.5-4b": ("qwen3_5_text", {
        **_TOKENS, "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "layer_types": PERIOD_OF_4 * 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": True,
    }),
}  # fmt: skip


class StepRow(NamedTuple):
    """One optimizer step on a group of ``miniswe_b_drop``.

    ``budget``: tree_max_tokens_per_microbatch, a number or "auto". ``slow``: one timed step. ``old``: TRL scores old
    log-probs in each step, and the step's own scoring pass is left out ("kept") or run all the same ("again").
    ``together``: one batch has all rows, not one.
    """

    group: int
    sharing: str
    checkpointing: bool
    budget: int | str = 16384
    slow: bool = False
    old: str = ""
    together: bool = False


RUNS = ("score", "backward", "backward_unscored")  # of WindowRun: all of a step's forwards and backwards
STEP_WORKLOAD = "miniswe_b_drop"
STEP_ROWS = {
    "0": StepRow(0, "always", True),
    "0-kept": StepRow(0, "always", False, 10240),
    "0-whole": StepRow(0, "always", True, 32768),
    "0-whole-kept": StepRow(0, "always", False, 32768),
    "1": StepRow(1, "always", True),
    "1-whole": StepRow(1, "always", True, 32768),
    "13": StepRow(13, "always", True, slow=True),
    "13-whole": StepRow(13, "always", True, 98304, slow=True),
    "0-auto": StepRow(0, "always", True, "auto"),
    "1-auto": StepRow(1, "always", True, "auto"),
    "13-auto": StepRow(13, "always", True, "auto", slow=True),
    "0-never": StepRow(0, "never", True, slow=True),
    **{
        f"{group}-together": StepRow(group, "always", True, "auto", slow=group == 13, together=True)
        for group in (0, 1, 13)
    },
    **{
        f"{group}-old-{old}": StepRow(group, "always", True, slow=group == 13, old=old)
        for group in (1, 13)
        for old in ("kept", "again")
    },
}


# ---- memory of windows: (rows of a spine, budget, execution, activation checkpointing) ------------------------------

MemoryCase = tuple[int, int, str, bool]
MEMORY_CASES: dict[str, tuple[MemoryCase, ...]] = {
    "ling-3.0-tiny": (
        (30000, 33000, "replay", True), (30000, 16384, "nested", True), (30000, 8192, "nested", True),
        (10000, 11000, "replay", False), (10000, 5000, "nested", False), (5000, 5500, "replay", False),
        (65536, 72089, "replay", True),
    ),
    "qwen3.5-4b": (
        (30000, 33000, "replay", True), (30000, 16384, "nested", True), (30000, 8192, "nested", True),
        (8000, 8800, "replay", False), (8000, 4000, "nested", False), (4000, 4400, "replay", False),
    ),
}  # fmt: skip
MEMORY_CASES_OF_FAMILIES: tuple[MemoryCase, ...] = (
    (12000, 13200, "replay", False), (12000, 4096, "nested", False),
    (12000, 13200, "replay", True), (12000, 4096, "nested", True),
)  # fmt: skip
MEMORY_VARIANTS = ("bailing_hybrid:float32", "bailing_hybrid:stock", "qwen3_5_text:float32")
