"""A loss of one's own: DPO (Rafailov et al. 2023, equation 7) in a plain PyTorch loop.

    python examples/own_loss.py path/to/a/hybrid/model

`tree_logprobs` computes what prompts and answers share once, forward and backward (docs/losses.md).
"""

import copy

import torch
import torch.nn.functional as F
from arguments import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

from harts_hf import PlannerConfig, tree_logprobs

(model_name,) = arguments("MODEL")

tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name)
reference = copy.deepcopy(model).requires_grad_(False)
planner = PlannerConfig(max_tokens_per_microbatch=16384)
pairs = [
    ("Name a colour.", "Blue.", "Well, let me think about all the colours that there are."),
    ("Name a colour.", "Green.", "There are too many."),
    ("Name a fruit.", "A pear.", "A pear, which is a fruit that grows on pear trees."),
]

encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
prompts = [encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n") for prompt, _, _ in pairs]
rows = [prompt + encode(text) for prompt, (_, *texts) in zip(prompts, pairs, strict=True) for text in texts]
starts = [len(prompt) - 1 for prompt in prompts for _ in range(2)]  # entry i of a row's log-probs is of token i + 1


def answers(log_probs):
    """Summed log-probs of the answers: `[pairs, 2]`."""
    return torch.stack([row[start:].sum() for row, start in zip(log_probs, starts, strict=True)]).view(-1, 2)


with torch.no_grad():
    before = answers(tree_logprobs(reference, rows, planner))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    margins = (answers(tree_logprobs(model, rows, planner)) - before).diff(dim=1).squeeze(1)
    loss = -F.logsigmoid(-0.1 * margins).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
