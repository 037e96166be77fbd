"""The Transformers engine against the unpatched model, one conversation at a time, and what it promises besides."""

import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager
from itertools import chain, cycle, product

import pytest
import torch
from support.byte_tokens import byte_tokenizer
from support.models import OF_EACH_KIND, OTHERS, VOCAB, tiny_model
from transformers import MistralConfig, MistralForCausalLM

from harts_hf.rollouts.engines import EngineError, SamplingSettings, TurnRequest
from harts_hf.rollouts.engines import transformers as module
from harts_hf.rollouts.engines.transformers import TransformersEngine

END = 1
SINGLE_TOKENS = [0, None, 1000]
# Measured over the six families: at most 3.4e-6 on log-probs near -4 (fp32; cached and chunked rules round apart).
BUDGET = 2e-5


def draws(count, generator):
    return tuple(torch.randint(2, VOCAB, (count,), generator=generator).tolist())


def request(history=(5, 6, 7), **changes):
    return TurnRequest(**{"history": tuple(history), "max_tokens": 6, "seed": 0, **changes})


def engine(model, *, settings=None, **options):
    return TransformersEngine(model, settings=settings or SamplingSettings(end_token_ids=(END,)), **options)


def sampled(source, *requests):
    """Their turns, sampled together."""
    futures = [source.submit(each) for each in requests]
    source.run(lambda: all(future.done() for future in futures))
    return [future.result() for future in futures]


@torch.no_grad()
def logprobs_alone(model, history, turn, temperature=1.0):
    """Log-probs of a turn's tokens in one forward of the conversation alone, without cache and padding."""
    logits = model(input_ids=torch.tensor([[*history, *turn.token_ids]])).logits[0, len(history) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(turn.token_ids)), list(turn.token_ids)]


def gap(model, history, turn, temperature=1.0):
    """The largest difference between reported log-probs and those of the conversation alone."""
    return (torch.tensor(turn.logprobs) - logprobs_alone(model, history, turn, temperature)).abs().max().item()


@contextmanager
def watched(model):
    """Collects the shape of the token ids of each forward, and the thread that ran it."""
    calls = []

    def note(_, args, kwargs):
        calls.append((tuple(kwargs["input_ids"].shape), threading.get_ident()))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_next")


@pytest.mark.essential("bailing_hybrid-None", "qwen3_5_text-1000")
@pytest.mark.parametrize(
    ("family", "single_tokens"),  # how observations are read knows no family: see tests/runtime/test_windows.py
    [*product(OF_EACH_KIND, SINGLE_TOKENS), *zip(OTHERS, cycle(SINGLE_TOKENS), strict=False)],
)
def test_logprobs_are_those_of_each_conversation_alone(family, single_tokens):
    """Three turns of ragged conversations that fork at each: padding, kept states, observations of any length."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    histories = [draws(length, generator) for length in (1, 5, 9, 70)]
    with engine(model, single_tokens=single_tokens) as source:
        for turn_index, observations in enumerate([(2, 19), (1, 66), (0, 0)]):
            requests = [request(each, seed=turn_index, count=2) for each in histories]
            following = []
            for history, turns in zip(histories, sampled(source, *requests), strict=True):
                for turn, observation in zip(turns, observations, strict=True):
                    assert gap(model, history, turn) < BUDGET
                    following.append((*history, *turn.token_ids, *draws(observation, generator)))
            histories = following[::2] + following[1:4]


def test_an_observation_is_read_in_one_forward_on_top_of_the_kept_state(model):
    """Nothing of the history is read again, and the long observation costs one forward."""
    observation = draws(40, torch.Generator().manual_seed(2))
    with engine(model) as source:
        [[turn]] = sampled(source, request(max_tokens=3))
        read_before = source.num_read_tokens
        with watched(model) as calls:
            sampled(source, request((5, 6, 7, *turn.token_ids, *observation), max_tokens=3))
        # The turn's last token and all of the observation but its last, then one token a round.
        assert [shape for shape, _ in calls] == [(1, 40), (1, 1), (1, 1), (1, 1)]
        assert source.num_read_tokens - read_before == 43


def test_observations_of_about_one_length_are_read_together(model):
    """On top of states nothing may be padded: the shortest rest is read in one forward, what is left one by one."""
    generator = torch.Generator().manual_seed(2)
    with engine(model, single_tokens=4) as source:
        turns = [turns[0] for turns in sampled(source, *[request((2, 3 + row), max_tokens=1) for row in range(3)])]
        histories = [(2, 3 + row, *turns[row].token_ids, *draws(30 + row, generator)) for row in range(3)]
        with watched(model) as calls:
            answers = sampled(source, *[request(history, max_tokens=1) for history in histories])
        assert [shape for shape, _ in calls] == [(3, 30), (3, 1), (2, 1), (1, 1)]
        assert all(gap(model, history, turn) < BUDGET for history, [turn] in zip(histories, answers, strict=True))


@pytest.mark.parametrize("single_tokens", [0, 1000])
def test_a_history_that_was_continued_before_is_not_read_again(model, single_tokens):
    """The state at a history's end is kept too, however it was read: further continuations cost its last token."""
    history = draws(20, torch.Generator().manual_seed(3))
    with engine(model, single_tokens=single_tokens) as source:
        sampled(source, request(history, max_tokens=1))
        assert source.num_read_tokens == 20
        [[turn]] = sampled(source, request(history, max_tokens=1, seed=9))
        assert source.num_read_tokens == 21
        assert gap(model, history, turn) < BUDGET


def test_continuations_share_what_they_have_in_common(model):
    """Equal histories and equal draws are one row, whichever request they belong to."""
    history = draws(30, torch.Generator().manual_seed(3))
    sure = SamplingSettings(temperature=1e-6, end_token_ids=(END,))
    with engine(model, settings=sure) as source, watched(model) as calls:
        turns = sampled(source, request(history, count=5), request(history, seed=1, count=2))
        assert len({turn.token_ids for turns_of_request in turns for turn in turns_of_request}) == 1
        assert {shape[0] for shape, _ in calls} == {1}
        assert source.num_read_tokens == 30 + 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("max_kept_bytes", [0, 20_000, None])
def test_states_that_were_dropped_are_computed_anew(model, max_kept_bytes):
    """However little is kept, the turns are the same; only more is read."""
    generator = torch.Generator().manual_seed(4)
    histories = [draws(20 + row, generator) for row in range(6)]
    observations = [draws(10, generator) for _ in histories]

    def play(source):
        first = sampled(source, *[request(each, seed=row) for row, each in enumerate(histories)])
        longer = [
            (*history, *turns[0].token_ids, *observation)
            for history, turns, observation in zip(histories, first, observations, strict=True)
        ]
        return first, [sampled(source, request(each))[0] for each in longer]

    with engine(model) as source:
        expected, least = play(source), source.num_read_tokens
    with engine(model, max_kept_bytes=max_kept_bytes) as source:
        got = play(source)
        assert source.num_read_tokens > least if max_kept_bytes is not None else source.num_read_tokens == least
    for expected_turns, turns in zip(chain(*expected), chain(*got), strict=True):
        assert turns[0].token_ids == expected_turns[0].token_ids
        assert turns[0].logprobs == pytest.approx(expected_turns[0].logprobs, abs=BUDGET)


def test_draws_depend_on_the_seed_and_the_index_and_not_on_what_else_is_sampled(model):
    """Alone, among others, joining them halfway, and however many may run at a time: the same tokens."""
    generator = torch.Generator().manual_seed(5)
    wanted = request(draws(12, generator), max_tokens=8, seed=7, count=3)
    others = [request(draws(length, generator), max_tokens=12, seed=length) for length in (1, 20, 33)]
    with engine(model) as source:
        [alone] = sampled(source, wanted)
    with engine(model) as source:
        among = sampled(source, *others, wanted)[-1]
    with engine(model, max_turns=2) as source, watched(model) as calls:
        waiting = sampled(source, *others, wanted)[-1]
    assert max(rows for (rows, _), _ in calls) == 3  # those of one request, which go alone
    with engine(model) as source:
        started = [source.submit(each) for each in others]
        with watched(model) as calls:
            source.run(lambda: len(calls) > 4)
        assert not all(future.done() for future in started)
        [joining] = sampled(source, wanted)
    tokens = [turn.token_ids for turn in alone]
    assert len(set(tokens)) == 3
    for turns in (among, waiting, joining):
        assert [turn.token_ids for turn in turns] == tokens
        for turn, same in zip(turns, alone, strict=True):
            assert turn.logprobs == pytest.approx(same.logprobs, abs=BUDGET)
    with engine(model) as source:
        [[more]] = sampled(source, request(wanted.history, max_tokens=8, seed=7))
        [other_seed] = sampled(source, request(wanted.history, max_tokens=8, seed=8, count=3))
    assert more.token_ids == tokens[0]
    assert [turn.token_ids for turn in other_seed] != tokens


def test_requests_come_from_any_thread_and_the_model_runs_in_one(model):
    """Threads play turn after turn while the owner runs; what they get is what one thread would get."""
    generator = torch.Generator().manual_seed(6)
    prompts = [draws(3 + row, generator) for row in range(4)]

    def play(ask, prompt):
        history = prompt
        for turn in range(3):
            history += (*ask(request(history, max_tokens=4, seed=turn))[0].token_ids, 3, 4)
        return history

    with engine(model) as source:
        expected = [play(lambda each: sampled(source, each)[0], prompt) for prompt in prompts]
    got = {}
    with engine(model) as source, watched(model) as calls:

        def converse(row):
            got[row] = play(lambda each: source.submit(each).result(timeout=60), prompts[row])
            source.wake()

        threads = [threading.Thread(target=converse, args=(row,)) for row in range(4)]
        for thread in threads:
            thread.start()
        source.run(lambda: len(got) == 4)
        for thread in threads:
            thread.join()
    assert [got[row] for row in range(4)] == expected
    assert {thread for _, thread in calls} == {threading.get_ident()}


def test_the_condition_is_asked_again_from_time_to_time(model):
    """An idle engine waits, but not for long."""
    with engine(model) as source:
        asked = []
        source.run(lambda: asked.append(None) or len(asked) == 3)


def test_no_wake_is_missed(model, monkeypatch):
    """Also one that comes after the condition was asked and before the engine waits."""
    monkeypatch.setattr(module, "_ASK_AGAIN_SECONDS", 60)
    begin = time.monotonic()
    with engine(model) as source:
        asked = []

        def until():
            asked.append(None)
            source.wake()
            return len(asked) == 2

        source.run(until)
        done = threading.Event()
        thread = threading.Timer(0.05, lambda: (done.set(), source.wake()))
        thread.start()
        source.run(done.is_set)
        thread.join()
    assert time.monotonic() - begin < 30


def test_a_request_that_was_cancelled_is_dropped(model):
    """Before it has begun; nothing is read for it."""
    with engine(model) as source:
        dropped = source.submit(request(draws(40, torch.Generator().manual_seed(7))))
        assert dropped.cancel()
        sampled(source, request())
        assert source.num_read_tokens < 40
        with pytest.raises(CancelledError):
            dropped.result()


def test_turns_end_at_stop_texts_end_tokens_and_their_length():
    """The tokens of a stop text belong to the turn; what ends a turn is said."""
    model = tiny_model("qwen3_next", vocab_size=256)
    tokenizer = byte_tokenizer()
    with engine(model, tokenizer=tokenizer) as source:
        [turns] = sampled(source, request(max_tokens=40, count=20))
        assert all(turn.ended == ("end_token" if END in turn.token_ids else "length") for turn in turns)
        text = next(letter for letter in str(tokenizer.decode(list(turns[0].token_ids[5:]))) if letter.isalpha())
        [stopped] = sampled(source, request(max_tokens=40, count=20, stop=("no such text", text)))
    assert stopped[0].ended == "stop_text"
    assert stopped[0].token_ids == turns[0].token_ids[: len(stopped[0].token_ids)]
    for turn, free in zip(stopped, turns, strict=True):
        decoded = [text in str(tokenizer.decode(list(free.token_ids[:end]))) for end in range(1, 41)]
        assert len(turn.token_ids) == ([*decoded, True].index(True) + 1 if any(decoded) else len(free.token_ids))


def test_an_end_token_ends_a_turn_and_belongs_to_it(model):
    """Of twenty turns of forty tokens some meet it."""
    with engine(model) as source:
        [turns] = sampled(source, request(max_tokens=40, count=20))
    assert {turn.ended for turn in turns} == {"end_token", "length"}
    for turn in turns:
        assert turn.token_ids.count(END) == (turn.ended == "end_token")
        assert (turn.token_ids[-1] == END) == (turn.ended == "end_token")
        assert turn.ended == "end_token" or len(turn.token_ids) == 40
        assert len(turn.logprobs) == len(turn.token_ids)
        assert turn.entropies is None


def test_max_tokens_is_cut_to_the_models_positions():
    """A turn ends with the last position; a history that leaves none is refused."""
    model = tiny_model("qwen3_next", max_position_embeddings=20)
    with engine(model) as source:
        assert source.max_positions == 20
        [[turn]] = sampled(source, request((5,) * 17, max_tokens=100, seed=3))
        assert (turn.ended, len(turn.token_ids)) == ("length", 3)
        assert len(sampled(source, request((5,) * 19))[0][0].token_ids) == 1
        with pytest.raises(ValueError, match="leaves room for a token in the model's 20 positions, got 20 tokens"):
            source.submit(request((5,) * 20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"history": (5, VOCAB)}, rf"token ids in \[0, {VOCAB}\), got ids from 5 to {VOCAB}"),
        ({"history": (-1, 5)}, r"got ids from -1 to 5"),
        ({"history": (2.5,)}, r"expected a history of token ids, ints in \[0, 48\)"),
        ({"history": (2**40,)}, r"expected a history of token ids, ints in \[0, 48\)"),
        ({"stop": ("a",)}, "expected a tokenizer given to the engine for requests with stop texts, got None"),
    ],
)
def test_bad_requests_are_refused_at_once(model, changes, message):
    """Before anything is sampled, by the thread that asks."""
    with engine(model) as source, pytest.raises(ValueError, match=message):
        source.submit(request(**changes))


def test_reported_logprobs_are_those_of_the_draw_and_entropies_those_before_the_cut(model):
    """Tempered, cut and renormalised, in that order; entropies of the tempered distribution, where asked for."""
    settings = SamplingSettings(temperature=0.7, top_k=3, end_token_ids=(END,))
    with engine(model, settings=settings) as source:
        [[turn], [plain]] = sampled(source, request(entropies=True), request(seed=1))
    assert plain.entropies is None
    ids = torch.tensor([[5, 6, 7, *turn.token_ids]])
    with torch.no_grad():
        tempered = model(input_ids=ids).logits[0, 2:-1] / 0.7
    entropies = torch.distributions.Categorical(logits=tempered).entropy()
    torch.testing.assert_close(torch.tensor(turn.entropies), entropies, atol=BUDGET, rtol=0)
    for token, logprob, logits in zip(turn.token_ids, turn.logprobs, tempered, strict=True):
        best = logits.topk(3)
        expected = best.values.log_softmax(-1)[best.indices == token]
        assert logprob == pytest.approx(expected.item(), abs=BUDGET)


def test_a_model_that_fails_sets_errors_and_the_engine_goes_on():
    """Not raised: other requests' owners have to hear of it. What is asked later is sampled."""
    model = tiny_model("qwen3_next")
    weight = model.get_output_embeddings().weight
    healthy = weight.detach().clone()
    with engine(model) as source:
        with torch.no_grad():
            weight.fill_(float("nan"))
        futures = [source.submit(request()), source.submit(request((8, 9)))]
        source.run(lambda: all(future.done() for future in futures))
        for future in futures:
            with pytest.raises(EngineError, match="expected logits that are numbers, got NaN"):
                future.result()
        with torch.no_grad():
            weight.copy_(healthy)
        [[turn]] = sampled(source, request())
        assert gap(model, (5, 6, 7), turn) < BUDGET

        def break_down(*_):
            raise RuntimeError("out of everything")

        handle = model.register_forward_pre_hook(break_down)
        future = source.submit(request((9, 9, 9)))
        source.run(future.done)
        handle.remove()
        with pytest.raises(EngineError, match="RuntimeError: out of everything"):
            future.result()


def test_gradient_checkpointing_does_no_harm():
    """Transformers drops the cache of a checkpointed forward, but not without gradients."""
    model = tiny_model("qwen3_next")
    model.activation_checkpointing_enable()
    with engine(model) as source:
        [[turn]] = sampled(source, request())
        assert gap(model, (5, 6, 7), turn) < BUDGET


def test_a_model_that_keeps_no_states_is_refused():
    """Whatever it was wrapped in."""
    model = tiny_model("qwen3_next")
    forward = model.forward
    model.forward = lambda **inputs: forward(**{**inputs, "cache": None})
    with pytest.raises(EngineError, match="expected the model to write into the cache it is given, got nothing"):
        engine(model)


def test_layers_of_other_kinds_are_refused():
    """Sliding windows cannot be joined with others of another length."""
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(EngineError, match="got DynamicSlidingWindowLayer for layer 0"):
        engine(MistralForCausalLM(config))


def test_a_closed_engine_cancels_fails_and_refuses(model):
    """What is queued is cancelled, what is in flight fails, what comes later is refused."""
    source = engine(model)
    flying = source.submit(request(max_tokens=40))
    with watched(model) as calls:
        source.run(lambda: len(calls) > 2)
    queued = source.submit(request())
    source.close()
    assert queued.cancelled()
    with pytest.raises(EngineError, match="closed before the turn was over"):
        flying.result()
    with pytest.raises(EngineError, match="expected an engine that is open, got a closed one"):
        source.submit(request())
    with pytest.raises(EngineError, match="expected an engine that is open, got a closed one"):
        source.run(lambda: False)


def test_run_is_not_entered_twice(model):
    """Not from within either."""
    with engine(model) as source:
        caught = []

        def again(_):
            try:
                source.run(lambda: True)
            except RuntimeError as error:
                caught.append(str(error))

        future = source.submit(request())
        future.add_done_callback(again)
        source.run(future.done)
        assert caught and "one call of run at a time" in caught[0]
