"""GRPO on an agent that talks to a URL: two turns with OpenAI's client, and a reward.

    pip install -e ".[agents]"
    python examples/agent_by_url.py path/to/a/hybrid/model

The agent is any function that takes a task and an endpoint (docs/agents.md): it never sees the trainer.
"""

import sys

import torch
from arguments import arguments
from datasets import Dataset

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer

try:
    import openai

    from harts_hf.rollouts import AgentRolloutCollector, agent_reward
except ImportError as error:
    sys.exit(f'agents by URL need an extra: in the clone, pip install -e ".[agents]" ({error})')

(model_name,) = arguments("MODEL")


def agent(task, *, base_url, api_key):
    """Asks, asks again for a shorter answer, and scores that one: shorter is better."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": task}]
    for follow_up in ("Shorter, please.", None):
        message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages.append(message.to_dict())
        if follow_up:
            messages.append({"role": "user", "content": follow_up})
    return 1 / (1 + len(message.content or ""))


args = TreeGRPOConfig(
    output_dir="outputs/agent_by_url",
    num_generations=4,
    per_device_train_batch_size=8,
    max_completion_length=160,
    learning_rate=1e-3,
    max_steps=2,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
trainer = TreeGRPOTrainer(
    model=model_name,
    reward_funcs=agent_reward,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": ["Name a colour.", "Name a fruit."]}),
    rollout_func=AgentRolloutCollector(agent, max_turns=2, max_turn_tokens=24, timeout=120),
)
trainer.train()
