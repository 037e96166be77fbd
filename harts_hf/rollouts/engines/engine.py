"""What an engine is: histories in, sampled turns out, several continuations of one history in one request.

Whoever samples (a tree collector, an agent's gateway) submits requests, from any thread, and gets futures. The thread
that owns the engine lets it run: an engine that computes in this process does so there and nowhere else, one that asks
a server merely waits. So many conversations are in flight at once, each at a turn of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


class EngineError(RuntimeError):
    """An engine could not sample: a server that is dead, slow, or another than was expected. Says what to do."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn; the trainer's own, the same for every turn.

    Attributes:
        temperature: above 0.
        top_k: tokens that may be drawn; 0 for all.
        top_p: probability mass that may be drawn.
        min_p: least probability that may be drawn, as a part of the largest; None for 0.
        end_token_ids: tokens that end a turn.

    Raises:
        ValueError: numbers outside their ranges, or a repetition penalty in :meth:`from_args`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    end_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"expected a temperature above 0, got {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= (self.min_p or 0) <= 1:
            raise ValueError(
                "expected top_k of at least 0, top_p in (0, 1] and min_p in [0, 1], got "
                f"{self.top_k}, {self.top_p} and {self.min_p}"
            )

    @classmethod
    def from_args(cls, args: Any, end_token_ids: tuple[int, ...]) -> "SamplingSettings":
        """From a trainer's arguments (a ``GRPOConfig``)."""
        if args.repetition_penalty != 1.0:
            # It depends on the tokens before, which the loss's log-probs do not.
            raise ValueError(f"expected repetition_penalty 1.0 for tree rollouts, got {args.repetition_penalty}")
        return cls(
            temperature=args.temperature,
            top_k=args.top_k or 0,
            top_p=args.top_p,
            min_p=args.min_p,
            end_token_ids=tuple(end_token_ids),
        )


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A history that is to be continued.

    Attributes:
        history: ``[L]`` token ids, at least one.
        max_tokens: most tokens of a turn, at least 1.
        seed: decides the draws, together with the logits and nothing else: not with what else is being sampled.
        count: continuations, drawn independently.
        stop: texts that end a turn when its decoded text contains one; the tokens that hold it belong to the turn.
        entropies: whether the turns' entropies are wanted.
        routes_from: the first token of the history whose experts are wanted, with those of all that follow; None for
            none. What an earlier request has said need not be said again.
    """

    history: tuple[int, ...]
    max_tokens: int
    seed: int
    count: int = 1
    stop: tuple[str, ...] = ()
    entropies: bool = False
    routes_from: int | None = None

    def __post_init__(self) -> None:
        if self.routes_from is not None and not 0 <= self.routes_from <= len(self.history):
            raise ValueError(
                f"expected routes_from in [0, {len(self.history)}], tokens of the history, got {self.routes_from}"
            )
        if not self.history or self.max_tokens < 1 or self.count < 1:
            raise ValueError(
                "expected a history of at least one token, max_tokens and count of at least 1, got "
                f"{len(self.history)}, {self.max_tokens} and {self.count}"
            )


@dataclass(frozen=True, kw_only=True)
class SampledTurn:
    """One continuation.

    Attributes:
        token_ids: ``[T]``, at least one; the end token, or the tokens of the text that ended it, included.
        logprobs: ``[T]`` log of the probability with which each token was drawn: after the temperature, top-k, top-p
            and min-p (vLLM's ``processed_logprobs``).
        ended: what ended it: an end token, a text of the request's ``stop``, or ``max_tokens``.
        entropies: ``[T]`` in nats, of the tempered distribution that each token was drawn from; None unless asked
            for. An engine that sees the likeliest tokens only gives that of those, the rest taken as one token.
        routed_experts: ``[R, L, k]`` integers, the experts in each layer (or in each layer with a router) of the R
            tokens from the request's ``routes_from`` on that were read: the rest of the history, and the turn's but
            the last, which whoever continues the turn will read. -1 where the engine does not know. None unless asked
            for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: Literal["end_token", "stop_text", "length"]
    entropies: tuple[float, ...] | None = None
    routed_experts: NDArray[np.integer[Any]] | None = field(default=None, compare=False)


class Engine(ABC):
    """Samples turns; see the module. Use it as a context manager: it is closed at the end.

    Attributes:
        max_positions: tokens that a history and its turn may have together; None where unknown.
        vocab_size: token ids lie below it.
        returns_routes: whether requests with ``routes_from`` are answered; engines that do not refuse them.
    """

    max_positions: int | None = None
    returns_routes: bool = False
    vocab_size: int

    @abstractmethod
    def submit(self, request: TurnRequest) -> "Future[list[SampledTurn]]":
        """Queues a request; may be called from any thread.

        Returns:
            A future of ``request.count`` turns. Cancelling it before it has begun drops it.

        Raises:
            ValueError: routes of an engine that returns none; a history outside the vocabulary, or one that leaves no
                room for ``max_tokens`` of at least 1 (``max_tokens`` beyond the room is cut to it).
        """

    @abstractmethod
    def run(self, until: Callable[[], bool]) -> None:
        """Samples until ``until()`` is true.

        Called by the thread that owns the engine. The condition is asked after every request that was finished, after
        every :meth:`wake`, and at least ten times a second. Errors of a request are set on its future, not raised.
        """

    @abstractmethod
    def wake(self) -> None:
        """Has ``until`` of a running :meth:`run` asked again; may be called from any thread."""

    @property
    @abstractmethod
    def num_read_tokens(self) -> int:
        """Tokens that the policy has read or sampled so far, those of a kept state not again."""

    @abstractmethod
    def close(self) -> None:
        """Cancels what is queued and frees what is held."""

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
