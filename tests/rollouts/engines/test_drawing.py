"""What is drawn, with which probability it is said to be, and stop texts against decoding everything."""

import random

import pytest
import torch
from support.byte_tokens import byte_tokenizer

from harts_hf.rollouts.engines import SamplingSettings, TurnRequest
from harts_hf.rollouts.engines.drawing import TokenDrawer
from harts_hf.rollouts.engines.turns import StopFinder, Turn


def grid(count):
    """Numbers that fill (0, 1) evenly: what they draw are the frequencies themselves."""
    return [(index + 0.5) / count for index in range(count)]


@pytest.mark.parametrize(
    "cut",
    [{}, {"top_k": 3}, {"top_k": 99}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_logprobs_say(cut):
    """Frequencies over an even grid are the reported probabilities, which sum to 1 over the tokens that are left."""
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    drawer = TokenDrawer(SamplingSettings(temperature=0.8, **cut))
    count = 20_000
    for row, draws in enumerate(drawer.draw(logits, [grid(count)] * 3, entropies=False)):
        logprobs = dict((draw.token, draw.logprob) for draw in draws)
        assert sum(torch.tensor(list(logprobs.values())).exp()).item() == pytest.approx(1, abs=1e-5)
        for token, logprob in logprobs.items():
            frequency = sum(draw.token == token for draw in draws) / count
            assert frequency == pytest.approx(torch.tensor(logprob).exp().item(), abs=2 / count)
        kept = brute_force_cut((logits[row] / 0.8).softmax(-1), **cut)
        assert set(logprobs) == set(kept.nonzero()[:, 0].tolist())
        for token, logprob in logprobs.items():
            assert logprob == pytest.approx((kept[token] / kept.sum()).log().item(), abs=1e-5)


def brute_force_cut(probabilities, top_k=0, top_p=1.0, min_p=0.0):
    """Top-k, then the smallest set of at least top_p, then min_p: each of what the one before left."""
    order = probabilities.argsort(descending=True).tolist()
    left = order[: top_k or None]
    total, nucleus = sum(probabilities[token] for token in left), []
    for token in left:
        nucleus.append(token)
        if sum(probabilities[token] for token in nucleus) / total >= top_p:
            break
    kept = torch.zeros_like(probabilities)
    for token in nucleus:
        if probabilities[token] >= min_p * probabilities[nucleus[0]]:
            kept[token] = probabilities[token]
    return kept


def test_no_number_draws_a_token_that_was_cut():
    """Not at the ends of (0, 1) either, whichever tokens are cut."""
    logits = torch.full((2, 9), -torch.inf)
    logits[0, [3, 5]] = 1.0
    logits[1, 8] = 0.0
    drawer = TokenDrawer(SamplingSettings())
    first, second = drawer.draw(logits, [[2**-49, 0.49, 0.5, 1 - 2**-49], [0.5]], entropies=True)
    assert [draw.token for draw in first] == [3, 3, 5, 5]
    assert [draw.token for draw in second] == [8]
    assert first[0].entropy == pytest.approx(0.693147, abs=1e-6)
    assert second[0].entropy == 0


def test_unlikely_tokens_are_drawn_when_their_turn_comes():
    """A thousand tokens of 1e-8 each, after one that has the rest: below float32's resolution at 1."""
    logits = torch.full((1, 1001), 1e-8).log()
    logits[0, 0] = 0.0
    total = 1 + 1000e-8
    numbers = [(1 + (token + 0.5) * 1e-8) / total for token in range(1000)]
    [draws] = TokenDrawer(SamplingSettings()).draw(logits, [numbers], entropies=False)
    assert [draw.token for draw in draws] == list(range(1, 1001))


def test_stop_texts_are_found_when_their_last_byte_comes():
    """Against decoding the whole turn at every token; characters of one to four bytes, texts that overlap."""
    tokenizer = byte_tokenizer()
    random.seed(0)
    letters = ["a", "b", "é", "€", "😀"]
    found = 0
    for _ in range(150):
        text = "".join(random.choices(letters, k=12))
        stops = tuple("".join(random.choices(letters, k=random.randint(1, 3))) for _ in range(2))
        tokens = tokenizer(text)["input_ids"]
        finder = StopFinder(tokenizer, stops)
        for end in range(1, len(tokens) + 1):
            whole = text.encode()[:end].decode(errors="ignore")
            expected = any(stop in whole for stop in stops)
            assert finder.found_in(tokens[:end]) == expected, (text, stops, end)
            if expected:
                found += 1
                break
    assert 30 < found < 150


def test_random_numbers_are_those_of_splitmix64_and_even():
    """The published sequence for a seed of 1234567, and even over (0, 1) across turns and within one."""
    turn = Turn(TurnRequest(history=(1,), max_tokens=1, seed=0), 0, end_token_ids=(), stop=None)
    turn._random = 1234567
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert [turn.uniform() for _ in published] == [((number >> 16) + 0.5) / 2**48 for number in published]
    for numbers in (
        [turn.uniform() for _ in range(5000)],
        [
            Turn(TurnRequest(history=(1,), max_tokens=1, seed=seed), index, end_token_ids=(), stop=None).uniform()
            for seed in range(-50, 50)
            for index in range(50)
        ],
    ):
        counts = torch.tensor(numbers).histc(bins=20, min=0, max=1)
        # Chi-squared with 19 degrees of freedom: beyond 44 once in a thousand.
        assert ((counts - 250) ** 2 / 250).sum() < 44
        assert len(set(numbers)) > 4990
