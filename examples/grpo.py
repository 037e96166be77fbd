"""GRPO on rollouts of your own: a `rollout_func` whose agent rewrites its history between turns.

python examples/grpo.py path/to/a/hybrid/model
"""

import torch
from arguments import arguments
from datasets import Dataset

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts.engines import TurnRequest
from harts_hf.rollouts.engines.opening import open_engine

(model_name,) = arguments("MODEL")

QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "<|im_end|>\n<|im_start|>user\nShorter, please.<|im_end|>\n<|im_start|>assistant\n"


def rollout_func(prompts, trainer):
    """Two turns per prompt. The second is asked without the first one's beginning, as agents do that drop thoughts."""
    encode = lambda text: trainer.processing_class(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    rows = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "episode": []}
    with open_engine(trainer) as engine:

        def sample(histories):
            seeds = torch.randint(2**31, (len(histories),)).tolist()
            asked = [
                engine.submit(TurnRequest(history=tuple(history), max_tokens=24, seed=seed))
                for history, seed in zip(histories, seeds, strict=True)
            ]
            engine.run(lambda: all(future.done() for future in asked))
            return [future.result()[0] for future in asked]

        histories = [encode(QUESTION.format(prompt)) for prompt in prompts]
        for _ in range(2):
            turns = sample(histories)
            for number, (history, turn) in enumerate(zip(histories, turns, strict=True)):
                rows["prompt_ids"].append(list(history))
                rows["completion_ids"].append(list(turn.token_ids))
                rows["logprobs"].append(list(turn.logprobs))
                rows["episode"].append(number)  # rows of one rollout share its reward
            histories = [h + list(t.token_ids[8:]) + encode(AGAIN) for h, t in zip(histories, turns, strict=True)]
    order = sorted(range(len(rows["episode"])), key=rows["episode"].__getitem__)  # an episode's rows stand together
    return {key: [values[i] for i in order] for key, values in rows.items()}


def reward(completions, **columns):
    """The part of the last answer that is lower-case letters."""
    return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in completions]


args = TreeGRPOConfig(
    output_dir="outputs/grpo",
    num_generations=4,
    per_device_train_batch_size=8,
    max_completion_length=64,
    learning_rate=1e-3,
    max_steps=3,
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
trainer = TreeGRPOTrainer(
    model=model_name,
    reward_funcs=reward,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": ["Name a colour.", "Name a fruit.", "Name a river."]}),
    rollout_func=rollout_func,
)
trainer.train()
