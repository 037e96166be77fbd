"""Lockstep decoding: the cache against a forward of the whole conversation, and what the sampler draws."""

from types import SimpleNamespace

import pytest
import torch
from support.models import FAMILIES, VOCAB, tiny_model
from transformers import DynamicCache

from harts_hf.rollouts.decoding import LockstepDecoder, TokenSampler

# Measured over the six families: at most 1.6e-6 on logits of size 2 (fp32, cached and chunked rules round apart).
BUDGET = 1e-5


def draws(count, generator):
    return torch.randint(2, VOCAB, (count,), generator=generator).tolist()


@torch.no_grad()
def next_logits(model, tokens):
    """The logits after one conversation alone, without cache and padding."""
    return model(input_ids=torch.tensor([tokens])).logits[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_forked_and_cached_logits_are_those_of_each_conversation_alone(family):
    """Left padding, forks, drops and reordering change no logit beyond rounding."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    rows = [draws(length, generator) for length in (1, 5, 9, 70)]
    decoder = LockstepDecoder(model, pad_token_id=0)
    logits = decoder.prefill(rows)
    assert decoder.num_forward_tokens == 85
    parents_of_steps = [[0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5], [5, 0, 1, 1]]
    for parents in [None, *parents_of_steps]:
        if parents is not None:
            tokens = draws(len(parents), generator)
            rows = [[*rows[parent], token] for parent, token in zip(parents, tokens, strict=True)]
            logits = decoder.feed(tokens, parents)
        assert logits.dtype == torch.float32
        for row, tokens in zip(logits, rows, strict=True):
            assert (row - next_logits(model, tokens)).abs().max() < BUDGET
    assert decoder.num_forward_tokens == 85 + 6 + 6 + 4


@pytest.mark.parametrize("family", ["bailing_hybrid", "qwen3_5_text"])
def test_padding_inside_a_continued_segment_would_leak(family):
    """Why decoding goes token by token: padding between real tokens changes the states (transformers 47086)."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    first, second = draws(6, generator), draws(2, generator)
    cache = DynamicCache(config=model.config)
    mask = torch.tensor([[1] * 6 + [0, 0] + [1, 1]])
    with torch.no_grad():
        model(input_ids=torch.tensor([first]), cache=cache, use_cache=True)
        positions = torch.tensor([[0, 0, 6, 7]])
        ids = torch.tensor([[0, 0, *second]])
        leaked = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache).logits[0, -1]
    assert (leaked - next_logits(model, first + second)).abs().max() > 1000 * BUDGET


def settings(**changes):
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
    return SimpleNamespace(**{**defaults, **changes})


def sampler(seed=0, **changes):
    return TokenSampler(settings(**changes), seed=seed, device=torch.device("cpu"))


def test_reported_logprobs_are_tempered_and_uncut():
    """The log-prob is the loss's: after the temperature, before top-k and top-p."""
    logits = torch.randn(200, 11)
    for cut in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}):
        tokens, logprobs = sampler(temperature=0.7, **cut).draw(logits)
        expected = (logits / 0.7).log_softmax(-1)[torch.arange(200), tokens]
        torch.testing.assert_close(torch.tensor(logprobs), expected)


@pytest.mark.parametrize(("cut", "largest_rank"), [({"top_k": 3}, 2), ({"top_p": 1e-6}, 0), ({"min_p": 1.0}, 0)])
def test_cuts_keep_unlikely_tokens_out(cut, largest_rank):
    """Top-k, top-p and min-p restrict what is drawn."""
    logits = torch.randn(500, 11)
    tokens, _ = sampler(**cut).draw(logits)
    ranks = logits.argsort(-1, descending=True).argsort(-1)[torch.arange(500), tokens]
    assert ranks.max() == largest_rank


def test_draws_follow_the_distribution_and_the_seed():
    """Frequencies are the softmax's; equal seeds draw equally, whatever the global generator does."""
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20000, 1)
    tokens, _ = sampler(seed=3).draw(logits)
    frequencies = torch.tensor(tokens).bincount(minlength=3) / 20000
    # Three standard deviations of a frequency near 0.67 in 20,000 draws are 0.01.
    assert (frequencies - logits[0].softmax(0)).abs().max() < 0.01
    torch.rand(1)
    assert sampler(seed=3).draw(logits)[0] == tokens
    assert sampler(seed=4).draw(logits)[0] != tokens


def test_a_repetition_penalty_is_refused():
    """It depends on the tokens before, which the sampler does not see."""
    with pytest.raises(ValueError, match=r"expected repetition_penalty 1\.0 for tree rollouts, got 1\.2"):
        sampler(repetition_penalty=1.2)
