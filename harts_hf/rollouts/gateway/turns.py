"""From a request to its turns: rendered, spliced into its episode, sampled by an engine, parsed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from harts_hf.rollouts.engines import Engine, SampledTurn, TurnRequest
from harts_hf.rollouts.gateway.answers import AssistantMessage, Choice
from harts_hf.rollouts.gateway.formats import ChatFormat
from harts_hf.rollouts.gateway.recording import Recording, Spliced
from harts_hf.rollouts.gateway.requests import ApiError, ChatRequest


@dataclass(frozen=True, kw_only=True)
class LengthLimits:
    """What a turn may be.

    Attributes:
        max_turn_tokens: most tokens of a turn, whatever its request says.
        max_completion_tokens: most tokens of a row after its prompt (the trainer's ``max_completion_length``).
        max_positions: most tokens of a history and its turn; None where unknown.
    """

    max_turn_tokens: int
    max_completion_tokens: int
    max_positions: int | None = None

    def room(self, history: Spliced) -> int:
        """Tokens that a turn may still have.

        Raises:
            ApiError: none (OpenAI's ``context_length_exceeded``).
        """
        length = len(history.ids)
        limits = {
            "the context": self.max_positions,
            "a sample": history.row_prompt_length + self.max_completion_tokens,
        }
        for what, limit in limits.items():
            if limit is not None and length >= limit:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {limit} tokens ({what}). However, your messages are "
                    f"{length} tokens. Please reduce the length of the messages.",
                    code="context_length_exceeded",
                    param="messages",
                )
        return min(limit - length for limit in limits.values() if limit is not None)


@dataclass(frozen=True, kw_only=True)
class PendingTurns:
    """Turns that are being sampled.

    Attributes:
        request: what they answer.
        history: their history, as its episode has it; None where only the answer says it.
        sampled: becomes what :meth:`TurnSource.finish` takes.
    """

    request: ChatRequest
    history: Spliced | None
    sampled: "Future[Any]"


class FinishedTurns(NamedTuple):
    """Turns that were sampled.

    Attributes:
        history: of all of them.
        turns: themselves.
        choices: what each says.
        fills_room: whether one was cut because its row or the context may not be longer.
    """

    history: Spliced
    turns: list[SampledTurn]
    choices: list[Choice]
    fills_room: bool


class TurnSource(ABC):
    """Where an episode's turns come from. Called from several threads; an episode's calls do not overlap.

    Attributes:
        model: name under which agents see the policy.
    """

    model: str = "policy"

    @abstractmethod
    def open_recording(self) -> Recording:
        """What an episode is recorded in."""

    @abstractmethod
    def start(self, request: ChatRequest, recording: Recording, *, seed: int) -> PendingTurns:
        """Begins sampling the answers to a request.

        Raises:
            ApiError: messages that the template does not take, or that leave no room.
        """

    @abstractmethod
    def finish(self, pending: PendingTurns, recording: Recording) -> FinishedTurns:
        """What was sampled, as turns and messages, once it is there; nothing is recorded yet.

        Raises:
            ApiError: what was sampled leaves no room.
            EngineError: the engine could not sample.
        """


class EngineTurns(TurnSource):
    """Turns of an engine, between a chat format's rendering and its parsing.

    Args:
        engine: samples them.
        chat_format: renders and parses.
        end_ids: tokens that end turns.
        limits: what a turn may be.
        routes: whether the engine's routes are wanted.
    """

    def __init__(
        self,
        engine: Engine,
        chat_format: ChatFormat,
        *,
        end_ids: Sequence[int],
        limits: LengthLimits,
        routes: bool = False,
    ) -> None:
        self._engine = engine
        self._format = chat_format
        self._end_ids = tuple(end_ids)
        self._limits = limits
        self._routes = routes

    def open_recording(self) -> Recording:
        return Recording(self._format, self._end_ids)

    def start(self, request: ChatRequest, recording: Recording, *, seed: int) -> PendingTurns:
        try:
            rendered = self._format.render(request)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        if not rendered:
            raise ApiError(400, "expected messages that leave at least one token, got none", param="messages")
        history = recording.splice(rendered)
        room = self._limits.room(history)
        turn = TurnRequest(
            history=tuple(history.ids),
            max_tokens=min(room, self._limits.max_turn_tokens, request.max_tokens or room),
            seed=seed,
            count=request.count,
            stop=request.stop,
            routes_from=recording.num_routed(history) if self._routes else None,
        )
        # There is room: what the engine refuses now, such as ids outside the vocabulary, is no fault of the agent's.
        return PendingTurns(request=request, history=history, sampled=self._engine.submit(turn))

    def finish(self, pending: PendingTurns, recording: Recording) -> FinishedTurns:
        turns = pending.sampled.result()
        history = pending.history
        assert history is not None
        choices = [
            finished(
                self._message(pending.request, turn, history.ids),
                turn.ended,
                len(turn.token_ids),
                pending.request.stop,
            )
            for turn in turns
        ]
        return FinishedTurns(history, list(turns), choices, fills(turns, self._limits.room(history)))

    def _message(self, request: ChatRequest, turn: SampledTurn, history: list[int]) -> AssistantMessage:
        message = self._format.parse(turn.token_ids, request, history=history)
        if message.tool_calls and not request.may_call:
            # Nobody asked for calls: what looks like one is text.
            return AssistantMessage(content=self._format.plain_text(turn.token_ids))
        return message


def fills(turns: Sequence[SampledTurn], room: int) -> bool:
    """Whether one of the turns was cut because it had taken all the room that there was."""
    return any(turn.ended == "length" and len(turn.token_ids) >= room for turn in turns)


def finished(
    message: AssistantMessage, ended: Literal["end_token", "stop_text", "length"], num_tokens: int, stop: Sequence[str]
) -> Choice:
    """A turn's message as a choice: cut before the text that ended it, and with its reason."""
    if ended == "stop_text":
        found = [message.content.find(text) for text in stop]
        cuts = [place for place in found if place >= 0]
        content = message.content[: min(cuts)] if cuts else message.content
        message = AssistantMessage(
            content=content, reasoning_content=message.reasoning_content, tool_calls=message.tool_calls
        )
    reason: Any = "length" if ended == "length" else "tool_calls" if message.tool_calls else "stop"
    return Choice(message=message, finish_reason=reason, num_tokens=num_tokens)
