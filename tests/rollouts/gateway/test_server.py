"""The gateway over HTTP: OpenAI's client, streams, tools, hostile clients, many at a time."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from support.agents import WEATHER, ScriptedEngine, chat_tokenizer, odd_tokens, running

from harts_hf.rollouts.engines import EngineError
from harts_hf.rollouts.gateway import EngineTurns, Gateway, LengthLimits, TrlFormat, formats
from harts_hf.rollouts.gateway.requests import read_request
from harts_hf.rollouts.gateway.server import MAX_BODY_BYTES

TOKENIZER = chat_tokenizer()
END = TOKENIZER.eos_token_id
CALL = (
    "I look.\n</think>\n\nSure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>"
)
PLAIN = "I know.\n</think>\n\nhello world<|im_end|>"
USER = [{"role": "user", "content": "hello, the weather of Paris?"}]


@pytest.fixture(scope="module")
def gateway():
    with Gateway() as gateway:
        yield gateway


@pytest.fixture
def serve(gateway):
    """Opens sessions whose turns are texts: the same each time, or ``texts(request, choice)``."""
    stack, sessions = [], []
    gateway.watch(lambda: None)

    def serve(texts=PLAIN, *, max_turns=8, max_positions=2000, max_completion_tokens=1500, max_turn_tokens=400):
        say = texts if callable(texts) else lambda request, choice: texts

        def answer(request, choice):
            return odd_tokens(TOKENIZER, say(request, choice), seed=request.seed + choice)

        engine = ScriptedEngine(answer, end_ids=(END,), max_positions=max_positions)
        context = running(engine)
        context.__enter__()
        stack.append(context)
        limits = LengthLimits(
            max_turn_tokens=max_turn_tokens, max_completion_tokens=max_completion_tokens, max_positions=max_positions
        )
        source = EngineTurns(engine, TrlFormat(TOKENIZER), end_ids=(END,), limits=limits)

        def open_session():
            session = gateway.open(source, seed_of=lambda number: 100 + number, max_turns=max_turns)
            sessions.append(session)
            return session

        return engine, open_session

    yield serve
    for session in sessions:
        gateway.drop(session)
    for context in stack:
        context.__exit__(None, None, None)


def client_of(session, **changes):
    return openai.OpenAI(**{"base_url": session.base_url, "api_key": session.key, "max_retries": 0, **changes})


def ask(session, messages=USER, **fields):
    return client_of(session).chat.completions.create(model="policy", messages=messages, **fields)


def post(session, content, **headers):
    return httpx.post(f"{session.base_url}/chat/completions", content=content, headers=headers, trust_env=False)


def test_an_answer_has_everything_that_clients_read(serve):
    """Message, thinking, reason, usage, model; the turn is in the recording."""
    engine, open_session = serve()
    session = open_session()
    answer = ask(session)
    message = answer.choices[0].message
    assert (message.role, message.content, message.reasoning_content) == ("assistant", "hello world", "I know.")
    assert answer.choices[0].finish_reason == "stop" and answer.model == "policy"
    (request,), ((turn,),) = engine.requests, engine.turns
    assert request.seed == 100
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(request.history), len(turn.token_ids))
    (row,) = session.recording.rows()
    assert tuple(row.prompt_ids) == request.history and tuple(row.completion_ids) == turn.token_ids
    assert tuple(row.logprobs) == turn.logprobs and row.env_mask == [1] * len(turn.token_ids)
    assert [model.id for model in client_of(session).models.list()] == ["policy"]


def test_tools_over_two_turns(serve):
    """A call and its answer; the second history holds the sampled ids."""
    engine, open_session = serve(lambda request, choice: CALL if request.seed == 100 else PLAIN)
    session = open_session()
    answer = ask(session, tools=[WEATHER])
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and message.content == "Sure."
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    reply = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    ask(session, [*USER, message.to_dict(), reply], tools=[WEATHER])
    first, second = engine.requests
    assert second.history[: len(first.history)] == first.history
    assert second.history[len(first.history) :][: len(engine.turns[0][0].token_ids)] == engine.turns[0][0].token_ids
    assert len(session.recording.rows()) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}], ids=["no-tools", "none"])
def test_without_tools_a_call_is_text(serve, fields):
    """Nobody could answer it."""
    _, open_session = serve(CALL)
    answer = ask(open_session(), **fields)
    message = answer.choices[0].message
    assert not message.tool_calls and "function=weather" in message.content
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_what_a_whole_answer_says(serve):
    """Contents, thinking, calls and usage, put together from the chunks by OpenAI's own accumulator."""
    _, open_session = serve(lambda request, choice: CALL if choice == 0 else PLAIN)
    whole = ask(open_session(), tools=[WEATHER], n=2)
    session = open_session()
    with client_of(session).chat.completions.stream(
        model="policy", messages=USER, tools=[WEATHER], n=2, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        streamed = stream.get_final_completion()
    assert sum(event.type == "chunk" for event in events) > 6
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert one.message.content == (other.message.content or None)
        assert one.message.reasoning_content == other.message.reasoning_content
        calls = [
            [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
            for choice in (one, other)
        ]
        assert calls[0] == calls[1]
    assert whole.usage.total_tokens == streamed.usage.total_tokens
    assert len(session.recording.rows()) == 2


def _call(value):
    return (
        f"x\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>"
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "text",
    [_call('{"a": "\\ud800"}'), _call('["\\udc00 x"]'), _call("[" * 3000), _call('{"a":' * 3000)],
    ids=["half-pair", "half-pair-in-list", "deep-list", "deep-object"],
)
def test_whatever_the_policy_writes_is_a_message(gateway, serve, text, stream):
    """Halves of surrogate pairs, arguments nested too deeply: an answer, no end of the run; and the agent goes on."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
    _, open_session = serve(text, max_turn_tokens=20_000, max_positions=90_000, max_completion_tokens=60_000)
    session = open_session()
    fields = {"tools": [tool]}
    if stream:
        assert list(ask(session, stream=True, **fields))[-1].choices[0].finish_reason in ("stop", "tool_calls")
    else:
        message = ask(session, **fields).choices[0].message.to_dict()
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in message.get("tool_calls") or ()
        ]
        ask(session, [*USER, message, *(results or USER)], **fields)
    assert gateway.error is None


def test_a_parser_that_fails_leaves_text(monkeypatch):
    """Of any exception."""

    def fail(*_, **__):
        raise RecursionError

    monkeypatch.setattr(formats, "parse_response", fail)
    asked = read_request(json.dumps({"messages": USER}).encode())
    ids = TOKENIZER(PLAIN, add_special_tokens=False)["input_ids"]
    chat_format = TrlFormat(TOKENIZER)
    assert "hello world" in chat_format.parse(ids, asked, history=chat_format.render(asked)).content


def test_arguments_that_utf_8_lacks_are_refused(gateway, serve):
    """Escaped once more, so the body itself is fine."""
    _, open_session = serve()
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "\\ud800"}'}}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, *USER]
    with pytest.raises(openai.BadRequestError, match="expected characters that UTF-8 has"):
        ask(open_session(), messages)
    assert gateway.error is None


def test_several_choices_fork(serve):
    """``n`` answers to one history are one request of the engine and as many rows."""
    engine, open_session = serve(lambda request, choice: PLAIN if choice else CALL)
    session = open_session()
    answer = ask(session, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and engine.requests[0].count == 3
    rows = session.recording.rows()
    assert len(rows) == 3 and len({tuple(row.prompt_ids) for row in rows}) == 1


def test_max_tokens_cut_a_turn(serve):
    """The smallest of the request's, the collector's and the room left by the context."""
    engine, open_session = serve(max_turn_tokens=6)
    session = open_session()
    answer = ask(session, max_completion_tokens=4)
    assert answer.choices[0].finish_reason == "length" and engine.requests[0].max_tokens == 4
    ask(session)
    assert engine.requests[1].max_tokens == 6


def test_stop_texts_are_not_in_the_answer(serve):
    """They are in the turn, which is what was sampled."""
    engine, open_session = serve()
    session = open_session()
    engine._turn = lambda request, choice: _stopped(request)
    answer = ask(session, stop=["world"])
    assert answer.choices[0].message.content == "hello " and answer.choices[0].finish_reason == "stop"
    assert engine.requests[0].stop == ("world",)
    assert TOKENIZER.decode(session.recording.rows()[0].completion_ids).endswith("hello world")


def _stopped(request):
    from harts_hf.rollouts.engines import SampledTurn

    ids = TOKENIZER("a\n</think>\n\nhello world", add_special_tokens=False)["input_ids"]
    return SampledTurn(token_ids=tuple(ids), logprobs=(-1.0,) * len(ids), ended="stop_text")


@pytest.mark.parametrize("limits", [{"max_positions": 30}, {"max_completion_tokens": 20}], ids=["context", "sample"])
def test_over_the_context_length_is_openais_error(serve, limits):
    """Its code is what agents compact at; other rows of the episode may still be continued."""
    _, open_session = serve(**limits)
    session = open_session()
    messages = [*USER, {"role": "user", "content": "hello " * 50}] if "max_positions" in limits else USER
    with pytest.raises(openai.BadRequestError) as error:
        for _ in range(3):
            answer = ask(session, messages)
            messages = [
                *messages,
                answer.choices[0].message.to_dict(),
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ]
    assert error.value.code == "context_length_exceeded"
    assert session.counts["refused"] == session.counts["out_of_room"] == 1 and session.hit_a_limit
    ask(session, max_tokens=2)  # a shorter history: it goes on
    assert not session.hit_a_limit


def test_sampling_parameters_are_ignored_and_counted(serve):
    """Seeds are the episode's and the request's number's."""
    engine, open_session = serve()
    session = open_session()
    ask(session, temperature=0.0, seed=5)
    assert session.counts["ignored_parameters"] == 2 and engine.requests[0].seed == 100


def test_after_its_turns_an_episode_is_refused_more(serve):
    """An agent that asks for ever."""
    _, open_session = serve(max_turns=2)
    session = open_session()
    ask(session)
    for fields in ({"n": 2}, {}, {}):
        try:
            ask(session, **fields)
        except openai.BadRequestError as error:
            assert error.code == "max_turns_exceeded"
    assert session.recording.num_turns == 2 and session.counts["over_limit"] == 2 and session.hit_a_limit


def test_keys_and_urls_tell_episodes(gateway, serve):
    """By the key at the common URL, by the own URL whatever the key; not both of two episodes."""
    _, open_session = serve()
    first, second = open_session(), open_session()
    client_of(first, base_url=gateway.base_url).chat.completions.create(model="x", messages=USER)
    client_of(first, api_key="whatever").chat.completions.create(model="x", messages=USER)
    assert first.recording.num_turns == 2
    with pytest.raises(openai.AuthenticationError, match="got another episode's"):
        client_of(first, api_key=second.key).chat.completions.create(model="x", messages=USER)
    with pytest.raises(openai.AuthenticationError, match="got an unknown one") as error:
        client_of(first, base_url=gateway.base_url, api_key="sk-secret").models.list()
    assert "sk-secret" not in str(error.value) and second.recording.num_turns == 0
    gateway.drop(first)
    with pytest.raises(openai.AuthenticationError):
        ask(first)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b'{"messages": "\xff"}', 400),
        (b"\0" * 100, 400),
        (json.dumps({"messages": [{"role": "wizard", "content": "x"}]}).encode(), 400),
        (json.dumps({"messages": [{"role": "system", "content": "x"}]}).encode(), 400),  # the template wants a user
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
    ids=["json", "utf-8", "binary", "role", "template", "huge"],
)
def test_hostile_bodies_are_answered(gateway, serve, content, status):
    """An error in OpenAI's form, nothing recorded, and the next request is served."""
    _, open_session = serve()
    session = open_session()
    answer = post(session, content)
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert session.counts["refused"] == 1 and session.recording.num_turns == 0
    ask(session)
    assert session.recording.num_turns == 1 and gateway.error is None


def test_other_paths_and_methods_do_not_repeat_the_key(serve):
    """A path holds the key; an error need not."""
    _, open_session = serve()
    session = open_session()
    for answer in (
        httpx.post(f"{session.base_url}/completions", json={}, trust_env=False),
        httpx.get(f"{session.base_url}/chat/completions", trust_env=False),
    ):
        assert answer.status_code == 404 and session.key not in answer.text
        assert "expected POST /v1/chat/completions" in answer.json()["error"]["message"]


def test_a_client_that_sends_half_a_request_and_goes(gateway, serve):
    """Its body never ends."""
    _, open_session = serve()
    session = open_session()
    host, port = gateway.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    path = session.base_url.split(port, 1)[1]
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"messages"')
    ask(session)
    assert session.recording.num_turns == 1 and gateway.error is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_disconnects_mid_turn_leaves_nothing(gateway, serve, stream):
    """The request is cancelled, the turn is not recorded and is none of ``max_turns``."""
    engine, open_session = serve(max_turns=1)
    session = open_session()
    engine.hold.set()
    with pytest.raises(openai.APITimeoutError):
        list(client_of(session, timeout=0.3).chat.completions.create(model="x", messages=USER, stream=stream))
    wait_for(lambda: session.counts["disconnected"] == 1)
    engine.hold.clear()
    ask(session)
    assert len(engine.requests) == 1 and session.recording.num_turns == 1 and gateway.error is None


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_an_episode_that_is_closed_refuses_what_is_in_flight(serve):
    """Its requests are cancelled, and answered."""
    engine, open_session = serve()
    session = open_session()
    engine.hold.set()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, session)
        wait_for(lambda: session._pending)
        session.close()
        with pytest.raises(openai.PermissionDeniedError, match="one that is over"):
            asking.result()
    with pytest.raises(openai.PermissionDeniedError, match="one that is over"):
        ask(session)
    assert session.recording.num_turns == 0


@pytest.mark.parametrize("method", ["render", "parse"])
def test_closing_does_not_wait_for_a_format_that_hangs(gateway, serve, monkeypatch, method):
    """A vLLM server renders and parses over HTTP, which may take minutes; other episodes go on meanwhile."""
    _, open_session = serve()
    session, other = open_session(), open_session()
    hangs, goes_on = threading.Event(), threading.Event()
    usual = getattr(TrlFormat, method)

    def hang(self, *arguments, **named):
        if threading.current_thread() is not threading.main_thread() and not hangs.is_set():
            hangs.set()
            goes_on.wait(20)
            raise EngineError("expected an answer, got none")
        return usual(self, *arguments, **named)

    monkeypatch.setattr(TrlFormat, method, hang)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, session)
        assert hangs.wait(10)
        try:
            started = time.monotonic()
            ask(other)
            session.close()
            assert session.recording.rows() == [] and time.monotonic() - started < 5
        finally:
            goes_on.set()
        with pytest.raises(openai.PermissionDeniedError, match="one that is over"):
            asked.result(10)
    assert gateway.error is None and len(other.recording.rows()) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_engine_that_fails_is_told_to_whoever_runs_it(gateway, serve, stream):
    """The agent learns that there was an error, and no more of it."""

    def fail(request, choice):
        raise EngineError("expected a server at http://secret, got none")

    _, open_session = serve(fail)
    told = threading.Event()
    gateway.watch(told.set)
    with pytest.raises(openai.APIError, match="the engine failed") as error:
        list(client_of(open_session()).chat.completions.create(model="x", messages=USER, stream=stream))
    assert "secret" not in str(error.value)
    assert told.is_set() and isinstance(gateway.error, EngineError)


def test_ids_outside_the_vocabulary_are_no_fault_of_the_agents(gateway, serve):
    """A tokenizer with more tokens than the model: the run cannot go on."""
    engine, open_session = serve()

    def refuse(request):
        raise ValueError("expected token ids below 9")

    engine.submit = refuse
    with pytest.raises(openai.InternalServerError, match="the gateway failed: ValueError"):
        ask(open_session())
    assert str(gateway.error) == "expected token ids below 9"


@pytest.mark.exhaustive
def test_many_at_a_time(serve):
    """Twenty episodes with two requests in flight each, sampled in one thread: none has a token of another."""
    engine, open_session = serve(
        lambda request, choice: f"x\n</think>\n\n{TOKENIZER.decode(request.history)[-60:-40]}<|im_end|>"
    )
    sessions = [open_session() for _ in range(20)]

    def play(number):
        session = sessions[number // 2]
        messages = [{"role": "user", "content": f"episode {number // 2} part {number % 2}"}]
        for _ in range(2):
            answer = ask(session, messages)
            messages += [answer.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": "c", "content": "go"}]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(play, range(40)))
    assert len(engine.threads) == 1 and len(engine.requests) == 80
    for number, session in enumerate(sessions):
        rows = session.recording.rows()
        assert len(rows) == 2 and session.recording.num_turns == 4
        assert all(f"episode {number} part" in TOKENIZER.decode(row.prompt_ids) for row in rows)
