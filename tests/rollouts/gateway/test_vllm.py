"""A vLLM server's rendering, parsing and plain chat, against a fake one whose answers have vLLM 0.31's form."""

import json

import httpx
import openai
import pytest
from support.agents import WEATHER, ScriptedEngine, chat_tokenizer, odd_tokens, running

from harts_hf.rollouts.engines import EngineError, SamplingSettings
from harts_hf.rollouts.engines.vllm_http import ServerClient
from harts_hf.rollouts.gateway import ApiError, EngineTurns, Gateway, LengthLimits, TrlFormat
from harts_hf.rollouts.gateway.requests import read_request
from harts_hf.rollouts.gateway.vllm import VLLMChatTurns, VLLMFormat, VLLMServer

TOKENIZER = chat_tokenizer()
LOCAL = TrlFormat(TOKENIZER)
END = TOKENIZER.eos_token_id
LIMITS = LengthLimits(max_turn_tokens=200, max_completion_tokens=900, max_positions=1000)
CALL = (
    "I look.\n</think>\n\nSure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>"
)
USER = [{"role": "user", "content": "hello, the weather of Paris?"}]


CLIENTS = []


def server():
    """The fake server as the gateway asks it."""
    CLIENTS.append(ServerClient("http://vllm", retries=0))
    return VLLMServer(CLIENTS[-1], "tiny", vocab_size=500)


class FakeVLLM:
    """Answers as ``vllm serve`` does; its template and parsers are the local ones."""

    def __init__(self, say=CALL):
        self.say = say
        self.bodies = []
        self.change = lambda path, answer: answer

    def __call__(self, request):
        path = request.url.path
        body = json.loads(request.content)
        self.bodies.append((path, body))
        handler = {
            "/v1/chat/completions/render": self.render,
            "/v1/chat/completions/derender": self.derender,
            "/v1/chat/completions": self.chat,
        }[path]
        status, answer = self.change(path, handler(body))
        return httpx.Response(status, json=answer)

    def asked(self, body):
        """The part of a request that decides how it is rendered, which the server reads for itself."""
        names = ("messages", "tools", "tool_choice", "chat_template_kwargs")
        return read_request(json.dumps({name: body[name] for name in names if name in body}).encode())

    def render(self, body):
        assert body["model"] == "tiny" and body["max_tokens"] == 1
        return 200, {"request_id": "chatcmpl-1", "token_ids": LOCAL.render(self.asked(body)), "model": "tiny"}

    def derender(self, body):
        (choice,) = body["generate_response"]["choices"]
        message = self.message(choice["token_ids"], body["chat_request"])
        return 200, {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }

    def message(self, ids, body):
        said = LOCAL.parse(ids, self.asked(body), history=TOKENIZER("<|im_start|>assistant\n<think>\n")["input_ids"])
        message = {"role": "assistant", "content": said.content or None, "reasoning": said.reasoning_content}
        if said.tool_calls:
            message["tool_calls"] = [
                {"id": "x", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.tool_calls
            ]
        return message

    def chat(self, body):
        prompt = LOCAL.render(self.asked(body))
        choices = []
        for index in range(body["n"]):
            ids = odd_tokens(TOKENIZER, self.say, seed=body["seed"] + index)[: body["max_tokens"]]
            content = [{"token": "t", "logprob": -0.5, "bytes": [], "top_logprobs": []} for _ in ids]
            choices.append(
                {
                    "index": index,
                    "message": self.message(ids, body),
                    "logprobs": {"content": content},
                    "finish_reason": "stop" if ids[-1] == END else "length",
                    "token_ids": ids,
                }
            )
        return 200, {"object": "chat.completion", "choices": choices, "prompt_token_ids": prompt}


@pytest.fixture
def fake(monkeypatch):
    """A fake server behind every ``httpx.AsyncClient`` that is made."""
    fake = FakeVLLM()

    class Client(httpx.AsyncClient):
        def __init__(self, **settings):
            super().__init__(**settings, transport=httpx.MockTransport(fake))

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    yield fake
    while CLIENTS:
        CLIENTS.pop().close()


def request_of(messages=USER, **fields):
    return read_request(json.dumps({"messages": messages, **fields}).encode())


def test_rendering_and_parsing_are_the_servers(fake):
    """Token ids of render; messages of derender, whose thinking is called ``reasoning``."""
    chat = VLLMFormat(TOKENIZER, server())
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    said = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    request = request_of(
        [*USER, said, {"role": "tool", "tool_call_id": "c", "content": "sunny"}],
        tools=[WEATHER],
        chat_template_kwargs={"enable_thinking": True},
    )
    history = chat.render(request)
    assert history == LOCAL.render(request)
    _, body = fake.bodies[0]
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'  # a text again
    assert body["messages"][1]["reasoning"] == "hm" and body["tools"] == [WEATHER]
    ids = odd_tokens(TOKENIZER, CALL, seed=0)
    assert chat.parse(ids, request, history=history) == LOCAL.parse(ids, request, history=history)
    assert fake.bodies[1][1]["chat_request"]["messages"] == body["messages"]


def test_an_episode_with_splicing_between_render_and_generate(fake):
    """The second history has the sampled ids, not those that the server's tokenizer would choose."""
    engine = ScriptedEngine(lambda request, choice: odd_tokens(TOKENIZER, CALL, seed=1), end_ids=(END,))
    source = EngineTurns(engine, VLLMFormat(TOKENIZER, server()), end_ids=(END,), limits=LIMITS)
    with running(engine), Gateway() as gateway:
        session = gateway.open(source, seed_of=lambda number: number, max_turns=4)
        _two_turns(session)
    first, second = engine.requests
    sampled = engine.turns[0][0].token_ids
    assert second.history[: len(first.history) + len(sampled)] == (*first.history, *sampled)
    assert len(session.recording.rows()) == 1


def _two_turns(session):
    client = openai.OpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
    message = client.chat.completions.create(model="x", messages=USER, tools=[WEATHER]).choices[0].message
    assert message.tool_calls[0].function.name == "weather" and message.reasoning_content == "I look."
    reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    client.chat.completions.create(model="x", messages=[*USER, message.to_dict(), reply], tools=[WEATHER])


def chat_turns(**changes):
    settings = SamplingSettings(temperature=0.7, top_k=5, end_token_ids=(END,))
    return VLLMChatTurns(TOKENIZER, server(), settings=settings, limits=LIMITS, **changes)


def test_plain_chat_tokenises_histories_anew_and_counts_the_drift(fake):
    """The fallback: two rows where splicing gives one; sampling settings are the trainer's."""
    with Gateway() as gateway:
        session = gateway.open(chat_turns(), seed_of=lambda number: 10 + number, max_turns=4)
        _two_turns(session)
    rows = session.recording.rows()
    assert len(rows) == 2 and session.recording.drifts["fork"] == 1
    assert rows[0].completion_ids == odd_tokens(TOKENIZER, CALL, seed=10) and set(rows[0].logprobs) == {-0.5}
    _, body = fake.bodies[1]
    assert (body["temperature"], body["top_k"], body["seed"], body["max_tokens"]) == (0.7, 5, 11, 200)
    assert body["return_token_ids"] and body["stop_token_ids"] == [END]


def test_plain_chat_without_drift_continues_its_row(fake, monkeypatch):
    """Where the policy samples what the tokenizer chooses."""
    monkeypatch.setattr(f"{__name__}.odd_tokens", lambda tokenizer, text, seed: tokenizer(text)["input_ids"])
    with Gateway() as gateway:
        session = gateway.open(chat_turns(), seed_of=lambda number: 10 + number, max_turns=4)
        _two_turns(session)
    assert len(session.recording.rows()) == 1 and session.recording.drifts["clean"] == 1


def test_over_the_context_length_of_the_server(fake):
    """Its message becomes OpenAI's code."""
    message = "This model's maximum context length is 1000 tokens. However, you requested 1 output tokens"
    fake.change = lambda path, answer: (400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
    with pytest.raises(ApiError, match="maximum context length is 1000") as error:
        VLLMFormat(TOKENIZER, server()).render(request_of())
    assert error.value.code == "context_length_exceeded" and error.value.status == 400


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (
            404,
            {"detail": "Not Found"},
            "HTTP 404: .*Not Found.*--enable-scale-out",
        ),
        (500, {"error": {"message": "boom"}}, "chat/completions/render: HTTP 500: boom"),
        (200, [1], "expected a JSON object, got"),
        (200, {"token_ids": None}, "expected token_ids of a rendered request"),
        (200, {"token_ids": ["a"]}, "expected token_ids of a rendered request"),
        (
            200,
            {"token_ids": [1, 500]},
            "expected token_ids .* below the trainer's 500 .*got 500: is its tokenizer another",
        ),
    ],
)
def test_a_server_that_answers_otherwise_is_an_engines_error(fake, status, answer, message):
    """It ends the run, and says what was expected."""
    fake.change = lambda path, _: (status, answer)
    with pytest.raises(EngineError, match=message):
        VLLMFormat(TOKENIZER, server()).render(request_of())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: answer.pop("prompt_token_ids"), "expected prompt_token_ids"),
        (lambda answer: answer["choices"].pop(), "expected 1 choices"),
        (lambda answer: answer["choices"][0].pop("token_ids"), "expected token_ids"),
        (lambda answer: answer["choices"][0].update(logprobs=None), "expected log-probs"),
        (lambda answer: answer["choices"][0]["logprobs"]["content"].pop(), "expected one finite log-prob for each of"),
        (lambda answer: answer["choices"][0].pop("message"), "expected a choice with a message"),
    ],
    ids=["prompt", "choices", "ids", "logprobs", "length", "message"],
)
def test_plain_chat_without_what_training_needs(fake, change, message):
    """No token ids, no log-probs: no row."""

    def changed(path, answer):
        change(answer[1])
        return answer

    fake.change = changed
    source = chat_turns()
    recording = source.open_recording()
    pending = source.start(request_of(), recording, seed=0)
    with pytest.raises(EngineError, match=message):
        source.finish(pending, recording)


def test_only_engines_on_a_server_have_one():
    """A chat format that asks a server, beside an engine in this process."""
    engine = ScriptedEngine(lambda request, choice: [1], end_ids=(END,))
    with pytest.raises(ValueError, match="expected an engine that samples on a vLLM server, got ScriptedEngine"):
        VLLMServer.of_engine(engine)
