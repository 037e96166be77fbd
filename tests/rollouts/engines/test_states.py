"""Row states: what every family does with a forward of several tokens on top of them, and how rows are joined."""

import pytest
import torch
from support.models import FAMILIES, VOCAB, tiny_model

from harts_hf.rollouts.engines.states import RowStates, join

# Measured over the six families: at most 1.7e-6 on logits of size 2 (fp32, cached and chunked rules round apart).
BUDGET = 1e-5


def draws(count, generator):
    return torch.randint(2, VOCAB, (count,), generator=generator).tolist()


@torch.no_grad()
def next_logits(model, tokens):
    """The logits after one conversation alone, without cache and padding."""
    return model(input_ids=torch.tensor([tokens])).logits[0, -1]


def assert_equal_alone(model, logits, rows):
    gaps = [(got - next_logits(model, tokens)).abs().max() for got, tokens in zip(logits, rows, strict=True)]
    assert max(gaps) < BUDGET


@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_continue_the_states(family):
    """Recurrent and convolution states go on through forwards of any length, chunks of 64 crossed or not."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    rows = [draws(length, generator) for length in (1, 5, 9, 70)]
    states = RowStates.zero(model).take([0] * 4)
    assert_equal_alone(model, states.read(model, rows), rows)
    for size in (2, 1, 61, 3, 130):
        new = [draws(size, generator) for _ in rows]
        rows = [row + tokens for row, tokens in zip(rows, new, strict=True)]
        assert_equal_alone(model, states.read(model, new), rows)
    assert states.lengths == [length + 197 for length in (1, 5, 9, 70)]


@pytest.mark.parametrize("family", ["bailing_hybrid", "qwen3_5_text"])
def test_rows_of_many_lengths_are_joined_repeated_and_dropped(family):
    """Rows of several states go on together; the states that they come from are untouched and can be used again."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(2)
    zero = RowStates.zero(model)
    rows_of = [[draws(length, generator) for length in lengths] for lengths in ((3, 40), (7,), (90, 2))]
    parts = []
    for rows in rows_of:
        parts.append(zero.take([0] * len(rows)))
        parts[-1].read(model, rows)
    for _ in range(2):
        joined = join([(parts[0], [1, 0]), (zero, [0]), (parts[2], [1, 1]), (parts[1], []), (parts[0], [0])])
        rows = [rows_of[0][1], rows_of[0][0], [], rows_of[2][1], rows_of[2][1], rows_of[0][0]]
        assert joined.lengths == [40, 3, 0, 2, 2, 3]
        for size in (1, 20):
            new = [draws(size, generator) for _ in rows]
            rows = [row + tokens for row, tokens in zip(rows, new, strict=True)]
            assert_equal_alone(model, joined.read(model, new), rows)
        # The longest leaves: the columns that only it needed are cut, which the bytes show.
        fewer = joined.take([4, 1, 2])
        alone = [joined.take([row]).num_bytes for row in (1, 1, 1)]
        assert fewer.num_bytes == sum(alone)
        new = [draws(2, generator) for _ in range(3)]
        assert_equal_alone(model, fewer.read(model, new), [rows[row] + new[at] for at, row in enumerate([4, 1, 2])])
    assert [part.lengths for part in parts] == [[3, 40], [7], [90, 2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_top_of_states_would_leak(family):
    """Why tokens that continue states are as many in every row (transformers 47086)."""
    model = tiny_model(family)
    first, second = draws(6, generator := torch.Generator().manual_seed(1)), draws(2, generator)
    states = RowStates.zero(model).take([0])
    states.read(model, [first])
    padded = torch.tensor([[0, 0, *second]])
    with torch.no_grad():
        leaked = model(
            input_ids=padded,
            attention_mask=torch.tensor([[1] * 6 + [0, 0, 1, 1]]),
            position_ids=torch.tensor([[0, 0, 6, 7]]),
            cache=states._cache,
        ).logits[0, -1]
    assert (leaked - next_logits(model, first + second)).abs().max() > 1000 * BUDGET
    with pytest.raises(AssertionError, match="padding would enter the states"):
        RowStates.zero(model).take([0])  # a fresh one, as the other was just spoilt
        two = join([(states, [0, 0])])
        two.read(model, [[5], [5, 6]])


def test_zero_states_follow_the_models_dtype():
    """They are made once a model, and again where it has changed."""
    model = tiny_model("qwen3_next")
    first = RowStates.zero(model)
    assert RowStates.zero(model).num_bytes == first.num_bytes
    states = RowStates.zero(model.to(torch.bfloat16)).take([0])
    logits = states.read(model, [[5, 6]])
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()
