"""docs/losses.md: its code runs, and its loss and gradients are those of trajectories one by one."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.models import VOCAB, tiny_model
from support.oracle import float64_everywhere

DOCUMENT = Path(__file__).parents[2] / "docs" / "losses.md"


def draw_pairs(rng):
    """Ragged pairs: two of one prompt, one whose answers part late."""
    words = lambda low, high: rng.integers(3, VOCAB, int(rng.integers(low, high))).tolist()  # noqa: E731
    prompt, other = words(70, 90), words(5, 9)
    common = words(10, 20)
    return [
        (prompt, words(3, 20), words(3, 20)),
        (prompt, words(1, 5), words(30, 40)),
        (other, common + words(2, 4), common + words(5, 9)),
    ]


def expanded_loss(model, reference, pairs, beta):
    """The same from a forward per answer of unpatched models."""

    def log_prob(of, prompt, answer):
        ids = torch.tensor([prompt + answer])
        found = of(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
        return found[len(prompt) - 1 :].sum()

    margins = []
    for prompt, chosen, rejected in pairs:
        with torch.no_grad():
            before = log_prob(reference, prompt, chosen) - log_prob(reference, prompt, rejected)
        margins.append(log_prob(model, prompt, chosen) - log_prob(model, prompt, rejected) - before)
    return -F.logsigmoid(beta * torch.stack(margins)).mean()


@pytest.mark.exhaustive
def test_dpo():
    """In one microbatch's window and in several; measured 1e-13 of the largest gradient."""
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S).group(1)
    pairs = draw_pairs(np.random.default_rng(0))
    model, reference = (tiny_model("bailing_hybrid", dtype=torch.float64, seed=seed) for seed in (1, 2))
    stock, stock_reference = copy.deepcopy(model), copy.deepcopy(reference)
    with float64_everywhere(model):
        expected = expanded_loss(stock, stock_reference, pairs, beta=0.1)
        expected.backward()
        for limit in (16384, 64):
            model.zero_grad()
            names = {"model": model, "reference": reference, "pairs": pairs}
            exec(code.replace("16384", str(limit)), names)
            torch.testing.assert_close(names["loss"].detach(), expected.detach(), rtol=1e-10, atol=1e-12)
            largest = max(p.grad.abs().max() for p in stock.parameters() if p.grad is not None)
            for (name, mine), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
                if theirs.grad is not None:
                    assert (mine.grad - theirs.grad).abs().max() <= 1e-9 * largest, name
