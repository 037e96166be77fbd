"""PPO with a value head on the policy's backbone: no groups are needed (docs/ppo.md).

python examples/ppo.py path/to/a/hybrid/model
"""

import torch
from arguments import arguments
from datasets import Dataset
from digit import Digit

from harts_hf import TreePPOConfig, TreePPOTrainer
from harts_hf.rollouts import TreeRolloutCollector, environment_reward

(model_name,) = arguments("MODEL")

args = TreePPOConfig(
    output_dir="outputs/ppo",
    num_generations=4,
    per_device_train_batch_size=8,
    steps_per_generation=2,  # 16 rollouts are sampled at a time,
    gradient_accumulation_steps=1,  # for two minibatches of 8,
    num_iterations=2,  # in two epochs
    max_completion_length=128,
    learning_rate=1e-3,
    value_learning_rate=1e-3,
    max_steps=4,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
trainer = TreePPOTrainer(
    model=model_name,
    reward_funcs=environment_reward,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": ["Guess my number."] * 4}),
    rollout_func=TreeRolloutCollector(Digit, branching=(2, 2), max_turns=3, max_turn_tokens=8, chat=True),
)
trainer.train()
trainer.save_model()
