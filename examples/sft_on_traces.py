"""Supervised training on what agents wrote: the turns of the best traces, each with the history before it.

    python examples/sft_on_traces.py path/to/a/hybrid/model examples/traces.jsonl task

Turns of a conversation share their history, which is computed once (docs/sft.md). Any file that `harts plan` reads
will do.
The last word is the key of its rows that says which task each is of; without it rows say so by `group`.
"""

import torch
from arguments import arguments
from transformers import AutoTokenizer

from harts_hf import TreeSFTConfig, TreeSFTTrainer
from harts_hf.rollouts import supervised_dataset

model, traces, *key = arguments("MODEL ROLLOUTS [GROUP_KEY]")
tokenizer = AutoTokenizer.from_pretrained(model)
rows = supervised_dataset(
    traces,
    tokenizer=tokenizer,
    group_key=key[0] if key else None,
    weight=lambda reward, rewards: reward == max(rewards),
)
print(f"{len(rows)} rows of {len(set(rows['group']))} groups")
args = TreeSFTConfig(
    output_dir="outputs/sft_on_traces",
    max_length=None,
    per_device_train_batch_size=len(rows),
    learning_rate=1e-3,
    max_steps=3,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
trainer = TreeSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
