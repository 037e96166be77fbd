"""The gateway: OpenAI's chat completions on loopback, each episode at its own base URL or API key.

The server runs in a thread of its own. It renders, submits and parses; whoever owns the engine lets it run in another.
"""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harts_hf.errors import MissingExtraError

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingExtraError("an agent by URL", "uvicorn") from error

from harts_hf.rollouts.engines import EngineError
from harts_hf.rollouts.gateway.answers import Answer
from harts_hf.rollouts.gateway.requests import ApiError, ChatRequest, read_request
from harts_hf.rollouts.gateway.sessions import Session
from harts_hf.rollouts.gateway.turns import FinishedTurns, PendingTurns, TurnSource

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
# Comments in a stream, so that clients and proxies do not take a long turn for a dead connection.
_KEEP_ALIVE_SECONDS = 10.0
_START_SECONDS = 30.0


class Gateway:
    """An OpenAI-compatible server on 127.0.0.1, at a port that the system chooses.

    Example::

        with Gateway() as gateway:
            session = gateway.open(source, seed_of=lambda number: number, max_turns=8)
            client = openai.OpenAI(base_url=session.base_url, api_key=session.key)

    Attributes:
        base_url: the endpoint that tells episodes by their API keys (a session's own URL is its ``base_url``).
        error: the first error of an engine, or of the gateway itself; a run that meets one cannot go on.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._on_error: Callable[[], None] = lambda: None
        self._sessions: dict[str, Session] = {}
        self._workers = ThreadPoolExecutor(8, thread_name_prefix="gateway-worker")
        listener = socket.create_server(("127.0.0.1", 0))
        self._root = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.base_url = f"{self._root}/v1"
        config = uvicorn.Config(
            self._app(),
            lifespan="off",
            log_config=None,
            access_log=False,  # paths hold keys
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=60,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="gateway", daemon=True
        )
        self._thread.start()
        for _ in range(int(_START_SECONDS / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            self._thread.join(0.01)
        if not self._server.started:
            raise RuntimeError("the gateway's server did not start")

    def open(self, source: TurnSource, *, seed_of: Callable[[int], int], max_turns: int) -> Session:
        """Opens an episode.

        Args:
            source: where its turns come from.
            seed_of: the seed of its request with a number.
            max_turns: turns that it may ask for.
        """
        session = Session(self._root, source, seed_of=seed_of, max_turns=max_turns)
        self._sessions[session.key] = session
        return session

    def drop(self, session: Session) -> None:
        """Ends an episode; its key is not known any more."""
        session.close()
        self._sessions.pop(session.key, None)

    def watch(self, on_error: Callable[[], None]) -> None:
        """Has a function called, in another thread, when :attr:`error` is set; forgets earlier errors."""
        self.error = None
        self._on_error = on_error

    def close(self) -> None:
        """Ends all episodes and stops the server."""
        for session in list(self._sessions.values()):
            self.drop(session)
        self._server.should_exit = True
        self._thread.join(5)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "Gateway":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _app(self) -> Starlette:
        routes = []
        for root in ("/v1", "/episodes/{key}/v1"):
            routes += [
                Route(f"{root}/chat/completions", self._answering(self._chat), methods=["POST"]),
                Route(f"{root}/models", self._answering(self._models), methods=["GET"]),
            ]
        return Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})

    def _answering(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                response: Response = await handler(request)
                return response
            except ApiError as error:
                return JSONResponse(error.body(), error.status)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # one request must not end the server
                return JSONResponse(self._failure(error).body(), 500)

        return answer

    def _failure(self, error: BaseException) -> ApiError:
        """Keeps an error for whoever runs the episodes; agents only learn that there was one."""
        if self.error is None:
            self.error = error
            self._on_error()
        what = "the engine failed" if isinstance(error, EngineError) else f"the gateway failed: {type(error).__name__}"
        return ApiError(500, what)

    def _session(self, request: Request) -> Session:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        by_key = self._sessions.get(bearer.strip()) if scheme.lower() == "bearer" else None
        in_path = request.path_params.get("key")
        session = by_key if in_path is None else self._sessions.get(in_path)
        if session is None:
            raise ApiError(
                401, "expected an episode's API key or base URL, got an unknown one", code="invalid_api_key"
            )
        if by_key not in (None, session):
            raise ApiError(
                401, "expected the API key of the base URL's episode, got another episode's", code="invalid_api_key"
            )
        return session

    async def _models(self, request: Request) -> Response:
        model = {"id": self._session(request).source.model, "object": "model", "created": 0, "owned_by": "harts_hf"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        session.counts["requests"] += 1
        try:
            asked = read_request(await _body(request))
            number, pending = await self._in_thread(session.start, asked)
        except ApiError:
            session.counts["refused"] += 1
            raise
        if asked.stream:
            chunks = self._stream(session, asked, number, pending)
            return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        gone = asyncio.ensure_future(_disconnected(request))
        sampled = _settled(pending)
        try:
            await asyncio.wait({gone, sampled}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                session.abandon(pending)
                return Response(status_code=499)
            finished, answer = await self._finish(session, number, pending)
            if gone.done():
                session.abandon(pending)
                return Response(status_code=499)
            body = answer.body()
            await self._record(session, pending, finished, body)
            return JSONResponse(body)
        finally:
            gone.cancel()
            sampled.cancel()

    async def _stream(
        self, session: Session, asked: ChatRequest, number: int, pending: PendingTurns
    ) -> AsyncIterator[str]:
        is_recorded = False
        sampled = _settled(pending)
        try:
            while not (await asyncio.wait({sampled}, timeout=_KEEP_ALIVE_SECONDS))[0]:
                yield ": sampling\n\n"
            finished, answer = await self._finish(session, number, pending)
            for chunk in answer.texts():
                yield _event(chunk)
            # Before the client can know that the turn is whole and send the next request.
            is_recorded = True
            await self._record(session, pending, finished, answer.body())
            for chunk in answer.ends(include_usage=asked.include_usage):
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        except ApiError as error:
            is_recorded = True
            yield _event(error.body())
        except Exception as error:  # the response has begun: no status can say it
            is_recorded = True
            yield _event(self._failure(error).body())
        finally:  # a client that has gone: the response is cancelled
            sampled.cancel()
            if not is_recorded:
                session.abandon(pending)

    async def _finish(self, session: Session, number: int, pending: PendingTurns) -> tuple[FinishedTurns, Answer]:
        if pending.sampled.cancelled():
            raise ApiError(403, "expected an episode that goes on, got a request to one that is over")
        finished = await self._in_thread(session.finish, pending)
        answer = Answer(
            number=number,
            model=session.source.model,
            prompt_tokens=len(finished.history.ids),
            choices=finished.choices,
        )
        return finished, answer

    async def _record(
        self, session: Session, pending: PendingTurns, finished: FinishedTurns, body: dict[str, Any]
    ) -> None:
        # It may wait for another request of the session: not in the server's thread. Begun, it is done, whoever goes.
        answers = [choice["message"] for choice in body["choices"]]
        await asyncio.shield(self._in_thread(session.record, pending, finished, answers))

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)


def _settled(pending: PendingTurns) -> "asyncio.Future[None]":
    """Done when the turns are sampled, have failed or are cancelled; itself never fails, nor cancels them."""
    loop = asyncio.get_running_loop()
    settled: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not settled.done():
            settled.set_result(None)

    def done(_: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    pending.sampled.add_done_callback(done)
    return settled


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"expected a body of at most {MAX_BODY_BYTES:,} bytes, got more")
    return bytes(body)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _not_found(request: Request, error: Exception) -> Response:
    # The path holds a key: it is not said again.
    known = "POST /v1/chat/completions or GET /v1/models"
    return JSONResponse(ApiError(404, f"expected {known}, got another path or method").body(), 404)
