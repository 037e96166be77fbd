"""A vLLM server's own chat format: its templates and parsers, asked for over HTTP.

Started with ``--enable-scale-out``, vLLM (0.31) renders messages to token ids (``/v1/chat/completions/render``) and
parses token ids to messages (``/v1/chat/completions/derender``), so the gateway splices held ids in between. A stock
server has ``/v1/chat/completions`` only, which tokenises every history anew.
"""

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from harts_hf.rollouts.engines import Engine, EngineError, SampledTurn, SamplingSettings
from harts_hf.rollouts.engines.vllm_http import HTTPAnswerError, ServerClient
from harts_hf.rollouts.engines.vllm_routes import FIELD, read_routes
from harts_hf.rollouts.engines.vllm_server import VLLMServerEngine
from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.gateway.answers import AssistantMessage, ToolCall
from harts_hf.rollouts.gateway.formats import ChatFormat
from harts_hf.rollouts.gateway.recording import Recording
from harts_hf.rollouts.gateway.requests import ApiError, ChatRequest
from harts_hf.rollouts.gateway.turns import FinishedTurns, LengthLimits, PendingTurns, TurnSource, fills, finished

# What the agent's messages are to blame for.
_REFUSALS = {400, 413, 422}
_CONTEXT_LENGTH = "This model's maximum context length"


class VLLMServer:
    """What a vLLM server answers to chat requests. Thread-safe.

    Args:
        client: asks it.
        model: name of the served model.
        vocab_size: the trainer's; token ids lie below it.
    """

    def __init__(self, client: ServerClient, model: str, *, vocab_size: int) -> None:
        self._client = client
        self.model = model
        self._vocab_size = vocab_size

    @classmethod
    def of_engine(cls, engine: Engine) -> "VLLMServer":
        """The server that an engine samples on.

        Raises:
            ValueError: an engine without one.
        """
        if not isinstance(engine, VLLMServerEngine):
            raise ValueError(f"expected an engine that samples on a vLLM server, got {type(engine).__name__}")
        return cls(engine.client, engine.model, vocab_size=engine.vocab_size)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts to a path; see :meth:`answer`."""
        return self.answer(self.start(path, body))

    def start(self, path: str, body: dict[str, Any]) -> "Future[dict[str, Any]]":
        """Begins posting to a path; cancelling drops the connection."""
        return self._client.start(self._client.request("POST", path, {**body, "model": self.model}))

    def answer(self, posted: "Future[dict[str, Any]]") -> dict[str, Any]:
        """Waits for the answer to what was posted.

        Raises:
            ApiError: the server refuses the request (400, 413, 422).
            EngineError: no answer, or one of another form.
        """
        try:
            return posted.result()
        except HTTPAnswerError as error:
            if error.status in _REFUSALS:
                message = str(error).partition(f"HTTP {error.status}: ")[2] or str(error)
                code = "context_length_exceeded" if message.startswith(_CONTEXT_LENGTH) else None
                raise ApiError(400, message, code=code, param="messages") from error
            if error.status == 404:
                raise EngineError(
                    f"{error}. Was the server (vLLM 0.31 or later) started with --enable-scale-out?"
                ) from error
            raise

    def token_ids(self, ids: Any, what: str) -> list[int]:
        """Token ids of an answer, checked.

        Raises:
            EngineError: they are none, or the server has another vocabulary than the trainer.
        """
        if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
            raise EngineError(f"expected {what} from the vLLM server, a list of integers, got {shortened(ids)}")
        if ids and max(ids) >= self._vocab_size:
            raise EngineError(
                f"expected {what} below the trainer's {self._vocab_size} from the vLLM server, got {max(ids)}: is its "
                "tokenizer another one?"
            )
        return ids


class VLLMFormat(ChatFormat):
    """Rendering and parsing by a vLLM server's scale-out endpoints.

    Args:
        tokenizer: the trainer's, for decoding and to tokenise what the template writes anew in a repaired answer.
        server: the one that samples.

    Attributes:
        server: likewise; may be exchanged for another connection to it.
    """

    def __init__(self, tokenizer: Any, server: VLLMServer) -> None:
        super().__init__(tokenizer)
        self.server = server

    def render(self, request: ChatRequest) -> list[int]:
        # The server refuses a prompt that leaves no room for max_tokens; how many there are is decided afterwards.
        body = {**chat_body(request), "max_tokens": 1}
        answer = self.server.post("/v1/chat/completions/render", body)
        return self.server.token_ids(answer.get("token_ids"), "token_ids of a rendered request")

    def parse(self, ids: Sequence[int], request: ChatRequest, *, history: Sequence[int]) -> AssistantMessage:
        generated = {
            "request_id": "turn",
            "choices": [{"index": 0, "token_ids": list(ids), "finish_reason": "stop"}],
        }
        chat_request = {**chat_body(request), "model": self.server.model}
        body = {"generate_response": generated, "chat_request": chat_request, "prompt_tokens": len(history)}
        answer = self.server.post("/v1/chat/completions/derender", body)
        return _message(_choices(answer, 1)[0])


class VLLMChatTurns(TurnSource):
    """Turns of a stock vLLM server's ``/v1/chat/completions`` with ``return_token_ids``.

    The server tokenises every history anew: where that gives other ids than were sampled, a row of its own begins, and
    is counted as a fork. For servers without ``--enable-scale-out``; sharing suffers.

    Args:
        tokenizer: the trainer's.
        server: the one that samples.
        settings: how tokens are drawn.
        limits: what a turn may be.
        routes: whether the server's routes are wanted.
    """

    def __init__(
        self,
        tokenizer: Any,
        server: VLLMServer,
        *,
        settings: SamplingSettings,
        limits: LengthLimits,
        routes: bool = False,
    ) -> None:
        self._format = VLLMFormat(tokenizer, server)  # nothing is rendered or parsed by it
        self._server = server
        self._settings = settings
        self._limits = limits
        self._routes = routes

    def open_recording(self) -> Recording:
        return Recording(self._format, self._settings.end_token_ids)

    def start(self, request: ChatRequest, recording: Recording, *, seed: int) -> PendingTurns:
        settings = self._settings
        body = {
            **chat_body(request),
            "n": request.count,
            "max_tokens": min(self._limits.max_turn_tokens, request.max_tokens or self._limits.max_turn_tokens),
            "stop": list(request.stop),
            "seed": seed,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p or 0.0,
            "stop_token_ids": list(settings.end_token_ids),
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
        }
        sampled = self._server.start("/v1/chat/completions", body)
        return PendingTurns(request=request, history=None, sampled=sampled)

    def finish(self, pending: PendingTurns, recording: Recording) -> FinishedTurns:
        sampled = self._server.answer(pending.sampled)
        prompt_ids = self._server.token_ids(
            sampled.get("prompt_token_ids"), "prompt_token_ids (vLLM's return_token_ids)"
        )
        history = recording.adopt(prompt_ids)
        room = self._limits.room(history)
        turns, choices = [], []
        for choice in _choices(sampled, pending.request.count):
            ids = self._server.token_ids(choice.get("token_ids"), "token_ids (vLLM's return_token_ids)")
            num_read = len(prompt_ids) + len(ids) - 1 if self._routes else None
            turn = _turn(choice, ids, self._settings.end_token_ids, num_read)
            if len(turn.token_ids) > room:
                raise ApiError(
                    400,
                    f"This model's maximum context length leaves {room} tokens, and the answer has more. Please "
                    "reduce the length of the messages.",
                    code="context_length_exceeded",
                    param="messages",
                )
            turns.append(turn)
            choices.append(finished(_message(choice), turn.ended, len(turn.token_ids), pending.request.stop))
        return FinishedTurns(history, turns, choices, fills(turns, room))


def chat_body(request: ChatRequest) -> dict[str, Any]:
    """The parts of a request that decide how it is rendered and how its answer is parsed, for a server."""
    body: dict[str, Any] = {"messages": [_openai_message(message) for message in request.messages]}
    if request.tools is not None:
        body["tools"] = request.tools
        body["tool_choice"] = "auto" if request.may_call else "none"
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    return body


def _openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as texts, and thinking under the server's name for it."""
    message = dict(message)
    if "reasoning_content" in message:
        message["reasoning"] = message["reasoning_content"]
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _choices(answer: dict[str, Any], count: int) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != count or not all(isinstance(c, dict) for c in choices):
        raise EngineError(f"expected {count} choices from the vLLM server, got {shortened(choices)}")
    return choices


def _message(choice: dict[str, Any]) -> AssistantMessage:
    message = choice.get("message")
    if not isinstance(message, dict):
        raise EngineError(f"expected a choice with a message from the vLLM server, got {shortened(choice)}")
    try:
        calls = tuple(
            ToolCall(name=call["function"]["name"], arguments=call["function"]["arguments"] or "{}")
            for call in message.get("tool_calls") or ()
        )
        thinking = message.get("reasoning") or message.get("reasoning_content")
        return AssistantMessage(content=message.get("content") or "", reasoning_content=thinking, tool_calls=calls)
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(
            f"expected texts and calls of functions from the vLLM server, got {shortened(message)}"
        ) from error


def _turn(choice: dict[str, Any], ids: list[int], end_ids: Sequence[int], num_read: int | None) -> SampledTurn:
    """``num_read``: tokens whose routes are wanted, from the history's first on; None for none."""
    try:
        logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(
            f"expected log-probs from the vLLM server, got {shortened(choice.get('logprobs'))}"
        ) from error
    if not ids or len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
        raise EngineError(
            f"expected one finite log-prob for each of {len(ids)} tokens, at least one, from the vLLM server, got "
            f"{len(logprobs)}"
        )
    ended: Any = "end_token" if ids[-1] in end_ids else "stop_text"
    if choice.get("finish_reason") == "length":
        ended = "length"
    try:
        routes = None if num_read is None else read_routes(choice.get(FIELD), num_read)
    except ValueError as error:
        raise EngineError(str(error)) from error
    return SampledTurn(token_ids=tuple(ids), logprobs=logprobs, ended=ended, routed_experts=routes)
