"""GRPO on an environment that forks, on one process or on several.

    python examples/two_processes.py path/to/a/hybrid/model
    torchrun --nproc_per_node 2 examples/two_processes.py path/to/a/hybrid/model

All processes' trajectories of a step make one forest, which the planner divides (docs/ranks.md).
"""

import torch
from arguments import arguments
from datasets import Dataset
from digit import Digit

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts import TreeRolloutCollector, environment_reward

(model_name,) = arguments("MODEL")

args = TreeGRPOConfig(
    output_dir="outputs/two_processes",
    num_generations=8,
    per_device_train_batch_size=8,
    max_completion_length=128,
    learning_rate=1e-3,
    max_steps=2,
    logging_steps=1,
    tree_credit="turn",
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
trainer = TreeGRPOTrainer(
    model=model_name,
    reward_funcs=environment_reward,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": ["Guess my number."] * 4}),
    rollout_func=TreeRolloutCollector(Digit, branching=(4, 2), max_turns=3, max_turn_tokens=8, chat=True),
)
trainer.train()
trainer.save_model()
