"""JSON over HTTP to one server: many requests under way, from any thread; retries, time-outs, no secrets in errors."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import httpx

from harts_hf.rollouts.engines.engine import EngineError

# vLLM's own name for it, read by `vllm serve` too.
API_KEY_VARIABLE = "VLLM_API_KEY"
# What a server answers when it is busy, restarting or behind a proxy that has lost it for a moment.
_WORTH_RETRYING = {408, 429, 500, 502, 503, 504}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between tries; doubled each time
_CONNECT_TIMEOUT = 10.0
_SHOWN = 500  # characters of what a server says


class HTTPAnswerError(EngineError):
    """A server answered, and not with what was asked for.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """Asks one server, over one bounded pool of connections, in a thread of its own.

    A request that is repeated must be the same request: what is asked for here carries its seed.

    Args:
        base_url: ``http://host:port``, or with a path. A name and password in it are sent and never shown. An API key
            comes from the environment variable ``VLLM_API_KEY`` alone.
        timeout: seconds for which a request's answer is waited for.
        retries: how often a request is repeated if the connection fails, nothing comes in time, or the server says
            that it cannot at the moment.
        max_connections: requests that are under way at once; more wait here.

    Attributes:
        url: the server's address without name, password and query: for messages.

    Raises:
        ValueError: what is not an http(s) address; a password and an API key both.
    """

    def __init__(self, base_url: str, *, timeout: float = 600.0, retries: int = 3, max_connections: int = 256) -> None:
        self.url, auth = _split(base_url)
        self._timeout, self._retries = timeout, retries
        key = os.environ.get(API_KEY_VARIABLE) or None
        if key and auth:
            raise ValueError(f"expected a password in the server's address or {API_KEY_VARIABLE}, got both")
        self._secrets = [secret for secret in (key, *(auth or ())) if secret]
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(max_connections)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            auth=auth,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        )
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="harts-server-client", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Runs a coroutine in the client's thread; may be called from any other. Cancelling drops its connection.

        Raises:
            EngineError: the client is closed.
        """
        if self._closed:
            work.close()
            raise EngineError(f"expected an open engine, got a closed one (server {self.url})")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def get(self, path: str) -> dict[str, Any]:
        """Waits for ``GET``; see :meth:`request`."""
        return self.start(self.request("GET", path)).result()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Waits for ``POST``; see :meth:`request`."""
        return self.start(self.request("POST", path, body)).result()

    async def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """One request, in the client's thread.

        Args:
            method: of HTTP.
            path: below the server's address, beginning with a slash.
            body: sent as JSON.
            retries: as in the class, for this request.
            timeout: as in the class, for this request.

        Returns:
            The JSON object of the answer; an empty one for an empty answer.

        Raises:
            HTTPAnswerError: a status other than 200, with what the server said; no JSON object.
            EngineError: no answer, after all tries.
        """
        where, tries = f"{method} {self.url}{path}", 1 + (self._retries if retries is None else retries)
        timeout = self._timeout if timeout is None else timeout
        limits = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT), pool=None)
        failure: EngineError = EngineError(where)
        async with self._places:
            for attempt in range(tries):
                if attempt:
                    await asyncio.sleep(min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))
                try:
                    response = await self._client.request(method, path, json=body, timeout=limits)
                except httpx.TimeoutException as error:
                    said = f"no answer within {timeout:g} seconds ({type(error).__name__})"
                    failure = EngineError(f"{where}: {said}, tried {attempt + 1} times")
                except httpx.TransportError as error:
                    said = f"no connection ({type(error).__name__}: {self._shown(str(error))})"
                    failure = EngineError(f"{where}: {said}, tried {attempt + 1} times. Is the server alive?")
                else:
                    if response.status_code == 200:
                        return self._json(response, where)
                    said = self._shown(_message(response))
                    failure = HTTPAnswerError(f"{where}: HTTP {response.status_code}: {said}", response.status_code)
                    if response.status_code not in _WORTH_RETRYING:
                        break
        raise failure

    def close(self) -> None:
        """Drops what is under way and ends the thread; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.aclose()

    def _json(self, response: httpx.Response, where: str) -> dict[str, Any]:
        try:
            answer = response.json() if response.content else {}
        except ValueError:  # of JSON, of UTF-8
            answer = None
        if not isinstance(answer, dict):
            got = self._shown(response.text)
            raise HTTPAnswerError(f"{where}: expected a JSON object, got {got!r}", response.status_code)
        return answer

    def _shown(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _split(base_url: str) -> tuple[str, tuple[str, str] | None]:
    """The address without anything secret, and name and password.

    httpx logs addresses with what is in them, so a password must not be in one.
    """
    try:
        parts = urlsplit(base_url)
        port = f":{parts.port}" if parts.port is not None else ""
    except (ValueError, AttributeError, TypeError):
        raise ValueError("expected a server's address such as http://localhost:8000, got one that is none") from None
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(
            "expected a server's address such as http://localhost:8000, got one "
            + (f"with the scheme {parts.scheme!r}" if host else "without a host")
        )
    auth = (parts.username or "", parts.password or "") if parts.username or parts.password else None
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{port}{parts.path.rstrip('/')}", auth


def _message(response: httpx.Response) -> str:
    """What a server says about an error: OpenAI's form, or the answer as it is."""
    try:
        answer = response.json()
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return response.text or "no message"
