"""What scripts of several processes import: a fork server imports it once, and each process starts from there."""

import gc

import deepspeed
import peft  # noqa: F401
import trl
from transformers.models.bailing_hybrid import modeling_bailing_hybrid  # noqa: F401
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: F401
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe  # noqa: F401

import harts_hf

from . import models, recorded, schedules, texts  # noqa: F401

# Both packages import on first use.
TRAINERS = (
    trl.GRPOTrainer,
    trl.SFTTrainer,
    harts_hf.TreeGRPOTrainer,
    harts_hf.TreePPOTrainer,
    harts_hf.TreeSFTTrainer,
)
# Compiled for two minutes on a new machine; gloo adds up as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Every training collects garbage itself, through all of this, and would copy its pages into each process.
gc.collect()
gc.freeze()
