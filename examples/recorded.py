"""GRPO on rollouts that exist already: nothing is sampled (docs/recorded.md).

    python examples/recorded.py path/to/a/hybrid/model examples/traces.jsonl task

The last word is the key of the rows that says which task each is of; without it rows say so by `group`.
"""

import torch
from arguments import arguments
from transformers import AutoTokenizer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts import RecordedRollouts, recorded_reward

model, traces, *key = arguments("MODEL ROLLOUTS [GROUP_KEY]")
tokenizer = AutoTokenizer.from_pretrained(model)
recorded = RecordedRollouts(traces, tokenizer=tokenizer, group_key=key[0] if key else None, logprobs="rescored")
print("rollouts of each group:", recorded.group_sizes)
args = TreeGRPOConfig(
    output_dir="outputs/recorded",
    num_generations=recorded.num_generations,
    per_device_train_batch_size=recorded.num_generations,
    max_completion_length=recorded.max_completion_length,
    learning_rate=1e-3,
    num_train_epochs=1,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
trainer = TreeGRPOTrainer(
    model, recorded_reward, args, train_dataset=recorded.dataset(), processing_class=tokenizer, rollout_func=recorded
)
trainer.train()
