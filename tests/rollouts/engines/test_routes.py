"""Routes that engines return against the unpatched model, one conversation at a time; float64, so none flips."""

import numpy as np
import pytest
import torch
from support.fake_vllm import FakeVLLM, changed, routes_alone
from support.models import VOCAB, tiny_model
from support.oracle import float64_everywhere

from harts_hf.rollouts.engines import EngineError, SamplingSettings, TurnRequest
from harts_hf.rollouts.engines.transformers import TransformersEngine
from harts_hf.rollouts.engines.vllm_server import ServerOptions, VLLMServerEngine

FAMILY = "bailing_hybrid"  # its first layer has no experts
HISTORIES = [tuple(range(2, 24)), (5, 9, 11), (5, 9, 11, 3)]


@pytest.fixture(scope="module")
def model():
    model = tiny_model(FAMILY, dtype=torch.float64).eval()
    with float64_everywhere(model):
        yield model


def sampled(engine, requests):
    """The turns of each request."""
    futures = [engine.submit(request) for request in requests]
    engine.run(lambda: all(future.done() for future in futures))
    return [future.result() for future in futures]


def assert_routes(model, request, turn, *, dense):
    """A turn's are those of the tokens that were read, of the conversation alone; ``dense``: layers of zeros too."""
    alone = routes_alone(model, [*request.history, *turn.token_ids[:-1]])
    found = np.sort(turn.routed_experts, axis=-1)
    assert found.shape[:2] == (
        len(request.history) + len(turn.token_ids) - 1 - request.routes_from,
        len(alone) + dense,
    )
    for index, layer in enumerate(sorted(alone)):
        expected = np.sort(alone[layer], axis=-1)[request.routes_from :]
        assert np.array_equal(found[:, layer if dense else index], expected)
    assert not (dense and found[:, 0].any())


def play(model, engine, *, dense):
    """Turns, and turns that continue them: from a kept state, from elsewhere; histories in common."""
    first = [
        TurnRequest(history=history, max_tokens=4, seed=seed, count=2, routes_from=0)
        for seed, history in enumerate(HISTORIES)
    ]
    second = []
    for request, turns in zip(first, sampled(engine, first), strict=True):
        for turn in turns:
            assert_routes(model, request, turn, dense=dense)
            history = (*request.history, *turn.token_ids, 4, 8)
            read = len(request.history) + len(turn.token_ids) - 1
            second.append(TurnRequest(history=history, max_tokens=3, seed=len(second), routes_from=read))
    second.append(TurnRequest(history=HISTORIES[0][:9], max_tokens=2, seed=1, routes_from=9))
    for request, (turn,) in zip(second, sampled(engine, second), strict=True):
        assert_routes(model, request, turn, dense=dense)
    (turn,) = sampled(engine, [TurnRequest(history=(3, 4), max_tokens=2, seed=0)])[0]
    assert turn.routed_experts is None


@pytest.mark.exhaustive
def test_transformers_engine(model):
    """Whatever is read together, kept, or read one by one."""
    for options in ({}, {"max_kept_bytes": 0}, {"single_tokens": 0}):
        with TransformersEngine(
            model, settings=SamplingSettings(end_token_ids=(1,)), returns_routes=True, **options
        ) as engine:
            play(model, engine, dense=0)
    with (
        TransformersEngine(model, settings=SamplingSettings()) as engine,
        pytest.raises(ValueError, match="returns_routes=True for requests with routes_from"),
    ):
        engine.submit(TurnRequest(history=(3,), max_tokens=1, seed=0, routes_from=0))
    with pytest.raises(ValueError, match="mixture of experts where routes are wanted"):
        TransformersEngine(tiny_model("qwen3_5_text"), settings=SamplingSettings(), returns_routes=True)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match=rf"routes_from in \[0, 1\].*got {wrong}"):
            TurnRequest(history=(3,), max_tokens=1, seed=0, routes_from=wrong)


def open_engine(server, **options):
    settings = SamplingSettings(end_token_ids=(1,))
    return VLLMServerEngine(
        server.url, settings=settings, vocab_size=VOCAB, options=ServerOptions(retries=0), **options
    )


@pytest.mark.exhaustive
def test_vllm_engine(model):
    """In vLLM's form, less what earlier requests have said; a server that returns none is refused at the start."""
    with FakeVLLM(model, returns_routes=True) as server:
        with open_engine(server, returns_routes=True) as engine:
            assert server.bodies[-1]["routed_experts_prompt_start"] == 0
            play(model, engine, dense=1)
            request = TurnRequest(history=(3, 4), max_tokens=2, seed=0, routes_from=0)
            for value, said in (
                (None, "got none: start the server with `vllm serve ... --enable-return-routed-experts`"),
                ("bm8=", "as base64 of a .npy array"),
                (server._routes([3, 4], 0), "shape [3, layers, experts per token]"),
            ):
                server.faults.append(
                    changed(server, lambda right, value=value: right["choices"][0].update(routed_experts=value))
                )
                future = engine.submit(request)
                engine.run(future.done)
                with pytest.raises(EngineError) as error:
                    future.result()
                assert said in str(error.value)
        with open_engine(server) as engine:
            assert "routed_experts_prompt_start" not in server.bodies[-1]
            with pytest.raises(ValueError, match="returns_routes=True for requests with routes_from"):
                engine.submit(request)
        server.returns_routes = False
        with pytest.raises(EngineError, match=r"choice 0 .*--enable-return-routed-experts"):
            open_engine(server, returns_routes=True)
