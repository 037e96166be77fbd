"""Run by a launcher that was asked for two processes: builds a trainer in which each process is alone."""

import os
import sys
import warnings
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without a GPU and use_cpu=True, torchrun's processes do not find one another

from support import recorded
from support.models import tiny_model

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.errors import HartsWarning

warnings.simplefilter("error", HartsWarning)
TreeGRPOTrainer(
    tiny_model("qwen3_5_text"),
    recorded.recorded_reward,
    args=TreeGRPOConfig(**recorded.arguments(Path(sys.argv[1]), use_cpu=False)),
    train_dataset=recorded.dataset(),
    processing_class=recorded.tokenizer(),
    rollout_func=recorded.rollout_func,
)
