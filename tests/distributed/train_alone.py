"""Run by a launcher that was asked for two processes, of which each is alone.

    LAUNCHER train_alone.py FOLDER {trainer,command}...

"trainer" builds a trainer and prints its warning, "command" is `harts train` with two processes.
"""

import os
import sys
import warnings
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without a GPU and use_cpu=True, torchrun's processes do not find one another

from support import recorded
from support.models import tiny_model

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.cli.main import main
from harts_hf.errors import HartsWarning

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_grpo.yaml"
folder, wanted = Path(sys.argv[1]), sys.argv[2:]
warnings.simplefilter("always", HartsWarning)
if "trainer" in wanted:
    TreeGRPOTrainer(
        tiny_model("qwen3_5_text"),
        recorded.recorded_reward,
        args=TreeGRPOConfig(**recorded.arguments(folder, use_cpu=False)),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
    )
if "command" in wanted:
    sys.exit(main(["train", str(RECIPE), "--num_processes", "2", "--max_steps", "1", "--output_dir", str(folder)]))
