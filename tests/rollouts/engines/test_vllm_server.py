"""The engine over a server: turns against the unpatched model, faults, many requests at once, secrets."""

import logging
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch
from support import fake_vllm, recorded
from support.fake_vllm import FakeVLLM
from support.models import VOCAB, tiny_model

from harts_hf.rollouts.engines import EngineError, SampledTurn, SamplingSettings, TurnRequest
from harts_hf.rollouts.engines.vllm_completions import spread_seed
from harts_hf.rollouts.engines.vllm_http import HTTPAnswerError
from harts_hf.rollouts.engines.vllm_server import ServerOptions, VLLMServerEngine

# fp32: the server computes a row in a batch of rows, the oracle alone. The largest seen was 3e-6.
TOLERANCE = 2e-5
HISTORIES = [(3,), (5, 9, 11), tuple(range(2, 40)), (7, 7, 7, 7, 7)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_next").eval()


@pytest.fixture(scope="module")
def shared_server(model):
    with FakeVLLM(model, tokenizer=recorded.tokenizer()) as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.faults.clear()
    shared_server.bodies.clear()
    shared_server.headers.clear()
    shared_server.most_at_once = shared_server.num_dropped = 0
    return shared_server


def open_engine(server: FakeVLLM, *, end_token_ids=(), **options) -> VLLMServerEngine:
    """An engine with the given settings and options."""
    fields = {name: options.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in options}
    settings = SamplingSettings(end_token_ids=end_token_ids, **fields)
    engine = VLLMServerEngine(server.url, settings=settings, vocab_size=VOCAB, options=ServerOptions(**options))
    server.bodies.clear()  # of the checks at the start
    server.headers.clear()
    return engine


def sample(engine: VLLMServerEngine, *requests: TurnRequest) -> list[list[SampledTurn]]:
    """The turns of each request."""
    futures = [engine.submit(request) for request in requests]
    engine.run(until=lambda: all(future.done() for future in futures))
    return [future.result() for future in futures]


@torch.no_grad()
def scores(model, history, turn, settings) -> torch.Tensor:
    """``[T, V]`` log-probs of the distributions that a turn's tokens were drawn from, by the unpatched model alone."""
    tokens = torch.tensor([[*history, *turn.token_ids]])
    logits = model(input_ids=tokens).logits[0, len(history) - 1 : -1]
    body = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    return fake_vllm.processed(logits, body).log_softmax(-1)


@pytest.mark.essential("top_p")
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7}, {"top_k": 5, "temperature": 1.3}, {"top_p": 0.6}, {"min_p": 0.3}],
    ids=["temperature", "top_k", "top_p", "min_p"],
)
def test_logprobs_are_of_what_was_drawn(server, model, settings):
    """Log-probs of forked turns equal the unpatched model's, after all that cuts the distribution."""
    with open_engine(server, **settings) as engine:
        requests = [TurnRequest(history=h, max_tokens=9, seed=i, count=3) for i, h in enumerate(HISTORIES)]
        for request, turns in zip(requests, sample(engine, *requests), strict=True):
            assert len(turns) == 3
            for turn in turns:
                expected = scores(model, request.history, turn, settings).gather(
                    1, torch.tensor(turn.token_ids)[:, None]
                )
                assert np.abs(np.array(turn.logprobs) - expected[:, 0].numpy()).max() < TOLERANCE
                assert turn.ended == "length" and len(turn.token_ids) == 9


def test_entropies(server, model):
    """Of the likeliest tokens and the drawn one, the rest taken as one token; exact with all of them."""
    request = TurnRequest(history=HISTORIES[1], max_tokens=6, seed=2, entropies=True)
    with open_engine(server, num_top_logprobs=VOCAB) as engine:
        ((whole,),) = sample(engine, request)
    with open_engine(server, num_top_logprobs=10) as engine:
        ((part,),) = sample(engine, request)
    logprobs = scores(model, request.history, whole, {})
    assert np.abs(np.array(whole.entropies) + (logprobs.exp() * logprobs).sum(-1).numpy()).max() < TOLERANCE
    assert part.token_ids == whole.token_ids
    for entropy, token, row in zip(part.entropies, part.token_ids, logprobs.exp().double(), strict=True):
        seen = row[sorted({token, *row.topk(10).indices.tolist()})]
        groups = torch.cat([seen, 1 - seen.sum(0, keepdim=True)])
        assert abs(entropy + float((groups * groups.log()).sum())) < TOLERANCE


def test_seeds(server):
    """A request's draws depend on its seed, not on others; neighbouring seeds share none."""
    request = TurnRequest(history=HISTORIES[2], max_tokens=8, seed=1, count=3)
    others = [TurnRequest(history=h, max_tokens=5, seed=4) for h in HISTORIES]
    with open_engine(server) as engine:
        ((alone,), (amid, *_), (next_,)) = (
            sample(engine, request),
            sample(engine, request, *others),
            sample(engine, TurnRequest(history=HISTORIES[2], max_tokens=8, seed=2, count=3)),
        )
    assert [turn.token_ids for turn in alone] == [turn.token_ids for turn in amid]
    assert len({turn.token_ids for turn in [*alone, *next_]}) == 6
    assert min(map(spread_seed, range(1000))) >= 0 and max(map(spread_seed, range(1000))) < 2**62


def test_how_a_turn_ends(server):
    """By an end token of the trainer's, a text, its length, or the server's room."""
    tokenizer = recorded.tokenizer()
    history = HISTORIES[1]
    with open_engine(server) as engine:
        ((free,),) = sample(engine, TurnRequest(history=history, max_tokens=20, seed=3))
        text = tokenizer.decode([free.token_ids[7]])
        first = next(i for i in range(20) if text in tokenizer.decode(free.token_ids[: i + 1]))
        ((stopped,), (cut,)) = sample(
            engine,
            TurnRequest(history=history, max_tokens=20, seed=3, stop=("no such text", text)),
            TurnRequest(history=(4,) * (server.max_model_len - 3), max_tokens=20, seed=3),
        )
    assert stopped.ended == "stop_text" and stopped.token_ids == free.token_ids[: first + 1]
    assert cut.ended == "length" and len(cut.token_ids) == 3
    end = free.token_ids[9]
    with open_engine(server, end_token_ids=(VOCAB - 1, end)) as engine:
        ((ended,),) = sample(engine, TurnRequest(history=history, max_tokens=20, seed=3))
        assert server.bodies[-1]["ignore_eos"]
    assert ended.ended == "end_token" and ended.token_ids == free.token_ids[: free.token_ids.index(end) + 1]


@pytest.mark.exhaustive
def test_many_requests_are_under_way_at_once(server):
    """As many as there may be connections, and no more; results are those of one after another."""
    requests = [TurnRequest(history=HISTORIES[i % 4], max_tokens=3, seed=i) for i in range(12)]
    server.faults.extend([fake_vllm.hold(server, 0.1)] * 12)
    with open_engine(server, max_connections=5) as engine:
        together = sample(engine, *requests)
        assert server.most_at_once == 5
        assert together == [sample(engine, request)[0] for request in requests]
        read = sum(len(request.history) + 3 for request in requests)
        assert engine.num_read_tokens == 2 * read


@pytest.mark.parametrize("fault", ["busy", "cut", "slow"])
def test_repeats(server, fault):
    """A request that failed is asked again, the very same; a slow one is dropped at the server."""
    faults = {"busy": fake_vllm.status(503), "cut": fake_vllm.cut(), "slow": fake_vllm.hold(server, 5)}
    request = TurnRequest(history=HISTORIES[1], max_tokens=3, seed=8, count=2)
    with open_engine(server, timeout=0.5 if fault == "slow" else 60, retries=2) as engine:
        (expected,) = sample(engine, request)
        server.bodies.clear()
        server.faults.append(faults[fault])
        assert sample(engine, request) == [expected]
    assert len(server.bodies) == 2 and server.bodies[0] == server.bodies[1]
    assert server.num_dropped == (fault == "slow")


@pytest.mark.parametrize(
    ("fault", "tries", "said"),
    [
        (fake_vllm.status(503, "the queue is full"), 2, r"HTTP 503: the queue is full"),
        (fake_vllm.status(400, "prompt is odd"), 1, r"HTTP 400: prompt is odd"),
        (fake_vllm.text("<html>"), 1, r"expected a JSON object, got '<html>'"),
        (fake_vllm.text("[]"), 1, r"expected a JSON object"),
        (fake_vllm.cut(), 2, r"no connection \(RemoteProtocolError: .*tried 2 times. Is the server alive\?"),
    ],
    ids=["busy", "refused", "no JSON", "no object", "cut"],
)
def test_faults_that_stay(server, fault, tries, said):
    """The error is the future's, names the place, and what the server said."""
    with open_engine(server, retries=1) as engine:
        server.faults.extend([fault] * 2)
        future = engine.submit(TurnRequest(history=(3,), max_tokens=2, seed=0))
        engine.run(until=future.done)
        with pytest.raises(EngineError, match=rf"POST {server.url}/v1/completions: {said}"):
            future.result()
    assert len(server.bodies) == tries


def first_choice(**fields):
    """A change of an answer: fields of its first choice."""
    return lambda answer: answer["choices"][0].update(fields)


def logprobs(**fields):
    """A change of an answer: fields of its first choice's log-probs."""
    return lambda answer: answer["choices"][0]["logprobs"].update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda answer: answer["choices"].pop(), "expected 2 choices numbered from 0, got indices .0."),
        (first_choice(index=1), r"expected 2 choices numbered from 0, got indices \[1, 1\]"),
        (lambda answer: {"choices": None}, "expected choices in the server's answer, got None"),
        (first_choice(token_ids=None), "choice 0 .*: expected token_ids, got none"),
        (first_choice(token_ids=[]), "expected 1 to 2 token_ids, got 0"),
        (first_choice(token_ids=[3, 4, 5]), "expected 1 to 2 token_ids, got 3"),
        (first_choice(token_ids=[3, "4"]), "expected token_ids to be a list of integers"),
        (first_choice(token_ids=[3, VOCAB]), "below the trainer's vocabulary size 48, got 48: .* another model"),
        (first_choice(token_ids=[3, -1]), "below the trainer's vocabulary size 48, got -1"),
        (first_choice(prompt_token_ids=[1, 3]), "expected the history of 1 tokens to be read as it was sent, got 2"),
        (first_choice(logprobs=None), "expected log-probs, got None"),
        (logprobs(tokens=["token_id:1", "token_id:2"]), "expected log-probs of the tokens sampled"),
        (logprobs(token_logprobs=[-1.0]), "expected 2 token_logprobs, one per token"),
        (logprobs(token_logprobs=[-1.0, None]), "finite and at most 0, got None at position 1"),
        (logprobs(token_logprobs=[-9999.0, -1.0]), "finite and at most 0, got -9999.0 at position 0"),
        (logprobs(token_logprobs=[0.5, -1.0]), "finite and at most 0, got 0.5 at position 0"),
        (first_choice(finish_reason="abort"), "expected finish_reason 'stop' or 'length', got 'abort'"),
        (first_choice(finish_reason="stop"), r"one of the tokens \(\) ended, got \d+ there"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_malformed_answers(server, change, said):
    """Nothing that a turn lacks is made up."""
    with open_engine(server) as engine:
        server.faults.append(fake_vllm.changed(server, change))
        with pytest.raises(EngineError, match=said):
            sample(engine, TurnRequest(history=(3,), max_tokens=2, seed=0, count=2))


def test_choices_in_another_order(server):
    """Continuations are told apart by their numbers."""
    request = TurnRequest(history=(3,), max_tokens=4, seed=0, count=3)
    with open_engine(server) as engine:
        (expected,) = sample(engine, request)
        server.faults.append(fake_vllm.changed(server, lambda answer: answer["choices"].reverse()))
        assert sample(engine, request) == [expected]


def test_not_a_number_is_no_logprob(server):
    """JSON has no NaN, and vLLM has written it."""
    broken = '{"choices": [{"index": 0, "finish_reason": "length", "token_ids": [3], "logprobs": %s}]}'
    with open_engine(server) as engine:
        server.faults.append(fake_vllm.text(broken % '{"token_logprobs": [NaN]}'))
        with pytest.raises(EngineError, match="expected log-probs that are finite and at most 0, got nan"):
            sample(engine, TurnRequest(history=(3,), max_tokens=2, seed=0))


@pytest.mark.parametrize(
    ("history", "said"),
    [((3, VOCAB), "below 48, got 48"), ((3, -1), "below 48, got -1"), ((3,) * 160, "leaves room .* got 160 tokens")],
)
def test_histories_that_cannot_be_sent(server, history, said):
    """Refused at once, before anything is sent."""
    with open_engine(server) as engine:
        with pytest.raises(ValueError, match=said):
            engine.submit(TurnRequest(history=history, max_tokens=1, seed=0))
        assert not server.bodies


def test_cancelling_drops_the_request(server):
    """Also one that is under way: the server sees its client go."""
    with open_engine(server) as engine:
        server.faults.append(fake_vllm.hold(server, 30))
        future = engine.submit(TurnRequest(history=(3,), max_tokens=2, seed=0))
        wait_for(lambda: server.bodies)
        assert future.cancel()
        wait_for(lambda: server.num_dropped)
        with pytest.raises(CancelledError):
            future.result()


def test_run_asks_when_woken_and_after_callbacks(server):
    """``until`` sees what callbacks did, and is asked again by ``wake``, from any thread."""
    done = []
    with open_engine(server) as engine:
        future = engine.submit(TurnRequest(history=(3,), max_tokens=2, seed=0))
        future.add_done_callback(done.append)
        engine.run(until=lambda: bool(done))
        flag = threading.Event()
        threading.Timer(0.2, lambda: (flag.set(), engine.wake())).start()
        engine.run(until=flag.is_set)
        asked = []
        engine.run(until=lambda: asked.append(time.monotonic()) or len(asked) == 3)
        assert asked[2] - asked[0] < 0.5


def test_a_server_that_dies(model):
    """Requests under way and later ones end in errors; nothing waits for ever."""
    with FakeVLLM(model, tokenizer=recorded.tokenizer()) as server, open_engine(server, retries=1) as engine:
        server.faults.extend([fake_vllm.hold(server, 30)] * 2)
        futures = [engine.submit(TurnRequest(history=(3,), max_tokens=2, seed=i)) for i in range(2)]
        wait_for(lambda: len(server.bodies) == 2)
        server.stop()
        futures.append(engine.submit(TurnRequest(history=(3,), max_tokens=2, seed=3)))
        engine.run(until=lambda: all(future.done() for future in futures))
        for future in futures:
            with pytest.raises(EngineError, match=r"no connection .* tried 2 times. Is the server alive"):
                future.result()


def test_closing(server):
    """What is under way is cancelled; a closed engine takes nothing; closing twice is closing."""
    engine = open_engine(server)
    server.faults.append(fake_vllm.hold(server, 30))
    future = engine.submit(TurnRequest(history=(3,), max_tokens=2, seed=0))
    wait_for(lambda: server.bodies)
    engine.close()
    engine.close()
    assert future.cancelled()
    with pytest.raises(EngineError, match="closed"):
        engine.submit(TurnRequest(history=(3,), max_tokens=2, seed=0))


def test_secrets_are_sent_and_never_shown(server, monkeypatch, caplog):
    """Neither a password in the address nor the API key is in errors, logs or what engines show of themselves."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with pytest.raises(ValueError, match="got both") as both:
        VLLMServerEngine(server.url.replace("//", "//me:hidden@"), settings=SamplingSettings(), vocab_size=VOCAB)
    with open_engine(server) as engine:
        server.faults.append(fake_vllm.status(401, "no key like sesame is known"))
        with pytest.raises(HTTPAnswerError, match=r"HTTP 401: no key like \[secret\] is known") as refused:
            sample(engine, TurnRequest(history=(3,), max_tokens=2, seed=0))
        assert server.headers[-1]["authorization"] == "Bearer sesame"
    monkeypatch.delenv("VLLM_API_KEY")
    with VLLMServerEngine(
        server.url.replace("//", "//me:hidden@"), settings=SamplingSettings(), vocab_size=VOCAB
    ) as engine:
        assert server.headers[-1]["authorization"].startswith("Basic ")
        server.faults.append(fake_vllm.status(401))
        with pytest.raises(HTTPAnswerError) as password:
            sample(engine, TurnRequest(history=(3,), max_tokens=2, seed=0))
        assert engine.client.url == server.url
    shown = " ".join([caplog.text, *(str(error.value) for error in (both, refused, password))])
    assert "/v1/completions" in caplog.text  # httpx does log addresses
    assert "sesame" not in shown and "hidden" not in shown


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "the scheme 'localhost'|without a host"),
        ("ftp://me:hidden@localhost", "scheme 'ftp'"),
        ("http://", "without a host"),
        ("http://me:hidden@localhost:port", "got one that is none"),
    ],
)
def test_addresses_that_are_none(url, said):
    """Refused at once, and without showing what may be secret."""
    with pytest.raises(ValueError, match=said) as error:
        VLLMServerEngine(url, settings=SamplingSettings(), vocab_size=VOCAB)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "timeout above 0, got 0"),
        ({"retries": -1}, "retries at least 0, got -1"),
        ({"max_connections": 0}, "max_connections at least 1, got 0"),
        ({"max_logprob_gap": 0.0}, "max_logprob_gap above 0, or None, got 0.0"),
    ],
)
def test_options_out_of_range(options, said):
    """Named."""
    with pytest.raises(ValueError, match=said):
        ServerOptions(**options)


def wait_for(condition, seconds: float = 10.0) -> None:
    """Until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
