"""Sessions: an episode as its agent sees it, from the first request to the last."""

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

from harts_hf.rollouts.gateway.requests import ApiError, ChatRequest
from harts_hf.rollouts.gateway.turns import FinishedTurns, PendingTurns, TurnSource


class Session:
    """One episode's requests. Thread-safe.

    Args:
        base_url: of the gateway, without the session's own part.
        source: where its turns come from.
        seed_of: the seed of its request with a number, 0 the first.
        max_turns: turns that it may ask for.

    Attributes:
        key: unguessable; the API key, and part of the base URL.
        base_url: of the session's own endpoint, as OpenAI's clients take it.
        source: where its turns come from.
        recording: what was sampled.
        counts: requests by what became of them ("requests", "refused", "disconnected", "over_limit", "out_of_room"),
            and "ignored_parameters".
        messages: of the latest request that was answered, as they came.
        answers: what was answered to it.
        result: what its agent returned.
    """

    def __init__(self, base_url: str, source: TurnSource, *, seed_of: Callable[[int], int], max_turns: int) -> None:
        self.key = secrets.token_urlsafe(24)
        self.base_url = f"{base_url}/episodes/{self.key}/v1"
        self.source = source
        self.recording = source.open_recording()
        self.counts: Counter[str] = Counter()
        self.messages: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.result: Any = None
        self._seed_of = seed_of
        self._max_turns = max_turns
        # One request at a time is rendered, or its answer parsed. It may wait for a server: only requests wait for it.
        self._lock = threading.Lock()
        # Held for moments: what is pending, what is over, and the recording while it changes.
        self._state = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._num_started = 0
        self._num_turns = 0
        self._has_no_room = False  # since the latest turn, or with it
        self._is_closed = False

    @property
    def hit_a_limit(self) -> bool:
        """Whether turns were asked for beyond the last one that there may be, or there was no room for more.

        An agent that was refused for the length of its history, compacts it and gets another turn has gone on.
        """
        return bool(self.counts["over_limit"]) or self._has_no_room

    def start(self, request: ChatRequest) -> tuple[int, PendingTurns]:
        """Begins sampling the answers to a request.

        Returns:
            The request's number in the episode, and its turns.

        Raises:
            ApiError: the episode is over, or has had all its turns.
        """
        with self._lock:
            with self._state:
                self._check_open()
                self.counts["ignored_parameters"] += len(request.ignored)
                if self._num_turns + request.count > self._max_turns:
                    self.counts["over_limit"] += 1
                    raise ApiError(
                        400,
                        f"expected at most {self._max_turns} turns in an episode, got more",
                        code="max_turns_exceeded",
                    )
            number = self._num_started
            with self._while_open():
                pending = self.source.start(request, self.recording, seed=self._seed_of(number))
            with self._state:
                if not self._is_closed:
                    self._num_started += 1
                    self._num_turns += request.count
                    self._pending.add(pending.sampled)
                    return number, pending
        pending.sampled.cancel()
        raise _over()

    def finish(self, pending: PendingTurns) -> FinishedTurns:
        """What was sampled; nothing is recorded yet."""
        with self._lock:
            with self._state:
                self._pending.discard(pending.sampled)
                self._check_open()
            with self._while_open():
                return self.source.finish(pending, self.recording)

    def record(self, pending: PendingTurns, finished: FinishedTurns, answers: list[dict[str, Any]]) -> None:
        """Adds turns to the episode.

        Raises:
            ApiError: it is over.
        """
        with self._lock, self._state:
            self._check_open()
            self.recording.record(finished.history, finished.turns, pending.request)
            self._has_no_room = finished.fills_room
            self.messages = pending.request.body["messages"]
            self.answers = answers

    def abandon(self, pending: PendingTurns) -> None:
        """Forgets turns whose client has gone; they are none of ``max_turns``."""
        pending.sampled.cancel()
        with self._state:
            self._pending.discard(pending.sampled)
            self._num_turns -= pending.request.count
            self.counts["disconnected"] += 1

    def close(self) -> None:
        """Ends the episode: turns that are being sampled are dropped, further requests refused.

        Waits for no request, and no server; the recording changes no more.
        """
        with self._state:
            self._is_closed = True
            pending = list(self._pending)
            self._pending.clear()
        for sampled in pending:
            sampled.cancel()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Notes what has no room. What fails because the episode is over by now is no failure of the engine's."""
        try:
            yield
        except ApiError as error:
            if error.code == "context_length_exceeded":
                with self._state:
                    self.counts["out_of_room"] += 1
                    self._has_no_room = True
            raise
        except CancelledError as error:
            raise ApiError(403, "expected an engine that samples, got one that was closed") from error
        except Exception as error:
            if self._is_closed:
                raise _over() from error
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise _over()


def _over() -> ApiError:
    return ApiError(403, "expected an episode that goes on, got a request to one that is over")
