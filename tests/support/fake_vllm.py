"""A small server that answers as `vllm serve` does, from a tiny model in this process, and can be made to fail."""

import asyncio
import base64
import io
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Fault = Callable[[Request, dict[str, Any]], Any]


class FakeVLLM:
    """Serves on a loopback port that the system chose; a context manager.

    Attributes:
        url: where.
        bodies: of the requests to `/v1/completions` so far.
        headers: of the same.
        faults: what the next requests meet, one each: an (async) function of the request and its body that returns a
            response, or None to go on.
        most_at_once: completions under way at once, at most.
        num_dropped: completions whose client went away meanwhile (told by the faults that look).
        returns_routes: whether it was started with ``--enable-return-routed-experts``.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        max_model_len: int = 160,
        logprobs_mode: str = "processed_logprobs",
        returns_routes: bool = False,
    ) -> None:
        self.returns_routes = returns_routes
        self.model, self.tokenizer = model, tokenizer
        self.max_model_len, self.logprobs_mode = max_model_len, logprobs_mode
        self.faults: deque[Fault] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self.num_dropped = self._at_once = 0
        self._one_at_a_time = threading.Lock()
        routes = [
            Route("/health", lambda _: Response()),
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        if tokenizer is not None:
            routes.append(Route("/tokenize", self._tokenize, methods=["POST"]))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> "FakeVLLM":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends at once: connections are cut."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def _models(self, _: Request) -> JSONResponse:
        card = {"id": "tiny", "parent": None, "max_model_len": self.max_model_len}
        return JSONResponse({"data": [{"id": "adapter", "parent": "tiny"}, card]})

    async def _tokenize(self, request: Request) -> JSONResponse:
        text = (await request.json())["prompt"]
        return JSONResponse({"tokens": self.tokenizer.encode(text, add_special_tokens=False)})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            fault = self.faults.popleft() if self.faults else None
            answer = fault(request, body) if fault else None
            if asyncio.iscoroutine(answer):
                answer = await answer
            return answer or await asyncio.to_thread(self._answer, body)
        finally:
            self._at_once -= 1

    def _answer(self, body: dict[str, Any]) -> Response:
        prompt, vocab_size = body["prompt"], self.model.config.vocab_size
        if body["model"] != "tiny":
            return refusal(404, f"The model `{body['model']}` does not exist.")
        if max(prompt) >= vocab_size:
            return refusal(400, f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) + body["max_tokens"] > self.max_model_len:
            return refusal(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        with self._one_at_a_time, torch.no_grad():
            choices = self._sample(body)
        total = sum(len(choice["token_ids"]) for choice in choices)
        return JSONResponse({"choices": choices, "usage": {"prompt_tokens": len(prompt), "completion_tokens": total}})

    def _sample(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        generators = [torch.Generator().manual_seed(body["seed"] + index) for index in range(body["n"])]
        rows = [list(body["prompt"]) for _ in generators]
        choices = [self._choice(index, body) for index in range(body["n"])]
        for _ in range(body["max_tokens"]):
            live = [index for index, choice in enumerate(choices) if choice["finish_reason"] is None]
            if not live:
                break
            logits = self.model(input_ids=torch.tensor([rows[index] for index in live])).logits[:, -1].float()
            scores = processed(logits, body)
            reported = (scores if self.logprobs_mode == "processed_logprobs" else logits).log_softmax(-1)
            for row, index in enumerate(live):
                # The token at which the distribution function passes a uniform number.
                uniform = torch.rand(1, generator=generators[index], dtype=torch.float64)
                passed = scores[row].double().softmax(-1).cumsum(0) > uniform
                token = int(passed.nonzero()[0]) if passed.any() else int(scores[row].argmax())
                rows[index].append(token)
                self._write(choices[index], token, reported[row], body)
        for row, choice in zip(rows, choices, strict=True):
            if self.returns_routes:
                choice["routed_experts"] = self._routes(row[:-1], body.get("routed_experts_prompt_start", 0))
        return choices

    def _routes(self, tokens: list[int], start: int) -> str:
        """As vLLM 0.31 writes them: all layers, zeros in those without experts, base64 of a ``.npy`` array."""
        config = self.model.config
        found = np.zeros((len(tokens), config.num_hidden_layers, config.num_experts_per_tok), np.uint8)
        for layer, experts in routes_alone(self.model, tokens).items():
            found[:, layer] = experts
        written = io.BytesIO()
        np.save(written, found[start:], allow_pickle=False)
        return base64.b64encode(written.getbuffer()).decode("ascii")

    def _choice(self, index: int, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": index,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": [],
            "prompt_token_ids": body["prompt"],
            "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": []},
            "routed_experts": None,
        }

    def _write(self, choice: dict[str, Any], token: int, logprobs: torch.Tensor, body: dict[str, Any]) -> None:
        choice["token_ids"].append(token)
        logprobs = logprobs.clamp(min=-9999.0)
        top = [token, *logprobs.topk(body["logprobs"]).indices.tolist()]
        choice["logprobs"]["tokens"].append(f"token_id:{token}")
        choice["logprobs"]["token_logprobs"].append(logprobs[token].item())
        choice["logprobs"]["top_logprobs"].append({f"token_id:{one}": logprobs[one].item() for one in top})
        text = self.tokenizer.decode(choice["token_ids"]) if body["stop"] else ""
        found = [stop for stop in body["stop"] if stop in text]
        if token in body["stop_token_ids"]:
            choice.update(finish_reason="stop", stop_reason=token)
        elif found:
            choice.update(finish_reason="stop", stop_reason=found[0])
        elif len(choice["token_ids"]) == body["max_tokens"]:
            choice["finish_reason"] = "length"


def routes_alone(model: Any, tokens: list[int]) -> dict[int, np.ndarray]:
    """``[T, k]`` by number of the layer, the experts of one conversation's tokens in a forward of its own."""
    found: dict[int, np.ndarray] = {}
    handles = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopkRouter") or type(module).__name__.endswith("TopKRouter"):
            layer = int(name.split(".")[2])
            handles.append(
                module.register_forward_hook(
                    lambda _, inputs, answer, layer=layer: found.update({layer: answer[2].numpy()})
                )
            )
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return found


def processed(logits: torch.Tensor, body: dict[str, Any]) -> torch.Tensor:
    """``[R, V]`` logits after everything that a request changes in a distribution."""
    if body.get("allowed_token_ids"):
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool)
        allowed[body["allowed_token_ids"]] = True
        logits = logits.masked_fill(~allowed, -torch.inf)
    scores = logits / body["temperature"]
    if body["top_k"]:
        scores = TopKLogitsWarper(body["top_k"])(None, scores)
    if body["top_p"] < 1:
        scores = TopPLogitsWarper(body["top_p"])(None, scores)
    if body["min_p"]:
        scores = MinPLogitsWarper(body["min_p"])(None, scores)
    return scores


def refusal(status: int, message: str) -> JSONResponse:
    """An error as vLLM words it."""
    return JSONResponse({"error": {"message": message, "type": "Error", "code": status}}, status_code=status)


def status(code: int, message: str = "not now") -> Fault:
    """A fault: another HTTP status."""
    return lambda request, body: refusal(code, message)


def text(content: str) -> Fault:
    """A fault: not JSON."""
    return lambda request, body: Response(content)


def cut() -> Fault:
    """A fault: the connection ends within the answer."""

    async def half() -> AsyncIterator[bytes]:
        yield b'{"choices": ['
        raise ConnectionError

    return lambda request, body: StreamingResponse(half(), headers={"content-length": "1000"})


def hold(server: FakeVLLM, seconds: float) -> Fault:
    """A fault: it takes so long; a client that goes away is counted."""

    async def wait(request: Request, body: dict[str, Any]) -> None:
        for _ in range(round(seconds / 0.02)):
            if await request.is_disconnected():
                server.num_dropped += 1
                return
            await asyncio.sleep(0.02)

    return wait


def changed(server: FakeVLLM, change: Callable[[dict[str, Any]], Any]) -> Fault:
    """A fault: the right answer, changed in place by a function (or another that it returns)."""

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        right = {"choices": await asyncio.to_thread(server._sample, body)}
        other = change(right)
        return JSONResponse(other if isinstance(other, dict) and "choices" in other else right)

    return answer
