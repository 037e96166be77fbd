"""The same with LoRA adapters; what is saved is the adapter.

pip install -e ".[peft]"
python examples/lora.py path/to/a/hybrid/model
"""

import sys

import torch
from arguments import arguments
from datasets import Dataset
from digit import Digit

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts import TreeRolloutCollector, environment_reward

try:
    from peft import LoraConfig
except ModuleNotFoundError:
    sys.exit('adapters need PEFT: in the clone, pip install -e ".[peft]"')

(model_name,) = arguments("MODEL")
args = TreeGRPOConfig(
    output_dir="outputs/lora",
    num_generations=8,
    per_device_train_batch_size=8,
    max_completion_length=128,
    learning_rate=1e-3,
    max_steps=2,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
trainer = TreeGRPOTrainer(
    model=model_name,
    reward_funcs=environment_reward,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": ["Guess my number."] * 4}),
    rollout_func=TreeRolloutCollector(Digit, branching=(4, 2), max_turns=3, max_turn_tokens=8, chat=True),
    # No dropout: a token is computed twice, and once for many trajectories.
    peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()
