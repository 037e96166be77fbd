"""The engine that samples with a Transformers model in this process.

Each round of :meth:`TransformersEngine.run` takes in what was submitted and has every turn in flight sample a token
(:mod:`~harts_hf.rollouts.engines.batch`). A history is not read anew: the states at the ends of turns and of histories
are kept (:mod:`~harts_hf.rollouts.engines.kept`), and only what comes after the longest kept beginning is read, in one
forward; see :mod:`~harts_hf.rollouts.engines.states` for what may be read together.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harts_hf.rollouts.engines.batch import DecodingBatch, Row
from harts_hf.rollouts.engines.drawing import TokenDrawer
from harts_hf.rollouts.engines.engine import Engine, EngineError, SampledTurn, SamplingSettings, TurnRequest
from harts_hf.rollouts.engines.kept import KeptStates, history_key
from harts_hf.rollouts.engines.reading import HistoryReader
from harts_hf.rollouts.engines.routes import RouterTap
from harts_hf.rollouts.engines.turns import StopFinder, Turn

_ASK_AGAIN_SECONDS = 0.1


@dataclass(eq=False, slots=True)
class _Job:
    """A request in hand."""

    request: TurnRequest
    key: bytes
    future: "Future[list[SampledTurn]]"
    turns: list[Turn]
    num_open: int


class TransformersEngine(Engine):
    """Samples with a model of this process, in the thread that calls :meth:`run`.

    Draws depend on a request's seed, the index of the continuation and the logits; the logits depend on what else is
    being sampled by rounding only. The model is used as it is: in training mode its dropout is on, as in TRL.

    Example::

        with TransformersEngine(model, settings=SamplingSettings(end_token_ids=(2,))) as engine:
            future = engine.submit(TurnRequest(history=(5, 6, 7), max_tokens=16, seed=0, count=4))
            engine.run(future.done)
            turns = future.result()

    Args:
        model: the policy, its parameters whole.
        settings: how tokens are drawn.
        tokenizer: decodes turns for requests with ``stop``; others need none.
        max_turns: most turns sampled at a time; requests beyond wait (one with more continuations goes alone).
        max_kept_bytes: most bytes of states that are kept for histories to come; by default a quarter of what a GPU
            has free, and 4 GiB elsewhere. States that were dropped are computed anew.
        max_prefill_tokens: most tokens of one forward that reads several histories (a longer one is read alone).
        single_tokens: a rest of a history of at most so many tokens is read one a round, along with the turns that
            are being sampled; by default as many as pays on the device (:class:`HistoryReader`).
        returns_routes: whether experts are noted, for requests with ``routes_from``.

    Raises:
        EngineError: a model whose states cannot be kept.
        ValueError: routes of a model without routers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_turns: int = 256,
        max_kept_bytes: int | None = None,
        max_prefill_tokens: int = 16384,
        single_tokens: int | None = None,
        returns_routes: bool = False,
    ) -> None:
        config = model.config.get_text_config()
        self.vocab_size = config.vocab_size
        self.max_positions = getattr(config, "max_position_embeddings", None)
        self._end_token_ids = frozenset(settings.end_token_ids)
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._kept = KeptStates(_room_for_states(model.device) if max_kept_bytes is None else max_kept_bytes)
        self.returns_routes = returns_routes
        tap = RouterTap(model) if returns_routes else None
        self._reader = HistoryReader(
            model, self._kept, max_prefill_tokens=max_prefill_tokens, single_tokens=single_tokens, tap=tap
        )
        self._batch = DecodingBatch(model, drawer=TokenDrawer(settings), kept=self._kept, tap=tap)
        self._jobs: dict[Turn, _Job] = {}  # of the turns in flight
        # Shared with the threads that submit; the condition guards these and nothing else.
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._woken = False
        self._running = False
        self._closed = False

    @property
    def num_read_tokens(self) -> int:
        """Tokens that the policy has read so far, each once for all turns that share it up to there."""
        return self._reader.num_read_tokens + self._batch.num_read_tokens

    def submit(self, request: TurnRequest) -> "Future[list[SampledTurn]]":
        """Queues a request; see :meth:`Engine.submit`."""
        key = self._check(request)
        if self.max_positions is not None and len(request.history) + request.max_tokens > self.max_positions:
            request = replace(request, max_tokens=self.max_positions - len(request.history))
        turns = [
            Turn(
                request,
                index,
                end_token_ids=self._end_token_ids,
                stop=StopFinder(self._tokenizer, request.stop) if request.stop and self._tokenizer else None,
            )
            for index in range(request.count)
        ]
        job = _Job(request, key, Future(), turns, request.count)
        with self._changed:
            if self._closed:
                raise EngineError("expected an engine that is open, got a closed one")
            self._queue.append(job)
            self._changed.notify_all()
        return job.future

    def _check(self, request: TurnRequest) -> bytes:
        history = request.history
        try:
            key = history_key(history)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"expected a history of token ids, ints in [0, {self.vocab_size}): {error}") from error
        if min(history) < 0 or max(history) >= self.vocab_size:
            raise ValueError(
                f"expected a history of token ids in [0, {self.vocab_size}), got ids from {min(history)} to "
                f"{max(history)}"
            )
        if self.max_positions is not None and len(history) >= self.max_positions:
            raise ValueError(
                f"expected a history that leaves room for a token in the model's {self.max_positions} positions, got "
                f"{len(history)} tokens"
            )
        if request.stop and self._tokenizer is None:
            raise ValueError("expected a tokenizer given to the engine for requests with stop texts, got None")
        if request.routes_from is not None and not self.returns_routes:
            raise ValueError("expected returns_routes=True for requests with routes_from, got False")
        if "" in request.stop:
            raise ValueError("expected stop texts of at least one character, got an empty one")
        return key

    def run(self, until: Callable[[], bool]) -> None:
        """Samples until ``until()`` is true; see :meth:`Engine.run`."""
        with self._changed:
            if self._running:
                raise RuntimeError("expected one call of run at a time, got another from within it or another thread")
            self._running = True
        try:
            while not until():
                if not self._wait():
                    continue
                try:
                    self._round()
                except Exception as error:
                    self._fail_all(error)
        finally:
            self._running = False

    def wake(self) -> None:
        """Has ``until`` asked again; see :meth:`Engine.wake`."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Cancels what is queued, fails what is in flight, and frees the states."""
        with self._changed:
            self._closed = True
            queued = list(self._queue)
            self._queue.clear()
        for job in queued:
            job.future.cancel()
        self._fail_all(EngineError("the engine was closed before the turn was over"))
        self._kept.clear()

    def _wait(self) -> bool:
        """Whether there is something to sample; waits a moment for it if not."""
        if self._closed:
            raise EngineError("expected an engine that is open, got a closed one")
        if self._jobs:
            return True
        with self._changed:
            if not self._queue and not self._woken:
                self._changed.wait(_ASK_AGAIN_SECONDS)
            self._woken = False
            return bool(self._queue)

    # Not only without gradients: a small model's forward is faster by an eighth without their bookkeeping. No tensor
    # made here outlives the engine.
    @torch.inference_mode()
    def _round(self) -> None:
        jobs = self._admit()
        if jobs:
            self._begin(jobs)
        if self._batch.rows:
            for turn in self._batch.step():
                self._end(turn)

    def _admit(self) -> list[_Job]:
        """Takes as many requests from the queue as there is room for."""
        jobs: list[_Job] = []
        num_turns = len(self._jobs)
        with self._changed:
            while self._queue and (not num_turns or num_turns + self._queue[0].request.count <= self._max_turns):
                job = self._queue.popleft()
                if job.future.set_running_or_notify_cancel():
                    jobs.append(job)
                    num_turns += job.request.count
        return jobs

    def _begin(self, jobs: Sequence[_Job]) -> None:
        self._jobs.update((turn, job) for job in jobs for turn in job.turns)
        rows: dict[bytes, Row] = {}
        for job in jobs:
            history = job.request.history
            row = rows.setdefault(job.key, Row(job.key, len(history), history, []))
            row.turns += job.turns
        self._batch.add(*self._reader.read(list(rows.values())))

    def _end(self, turn: Turn) -> None:
        if turn not in self._jobs:  # whoever was told of another turn has closed the engine
            return
        job = self._jobs.pop(turn)
        job.num_open -= 1
        if not job.num_open:
            job.future.set_result([turn.result() for turn in job.turns])

    def _fail_all(self, error: Exception) -> None:
        """Sets an error on every request in flight: they share forwards, and so their fate."""
        jobs = set(self._jobs.values())
        self._jobs.clear()
        self._batch.clear()
        if not isinstance(error, EngineError):
            wrapped = EngineError(f"the model could not sample: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        for job in jobs:
            job.future.set_exception(error)


def _room_for_states(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 4 << 30
