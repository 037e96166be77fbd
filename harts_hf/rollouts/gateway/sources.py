"""What samples an agent's turns: an engine with a chat format, or a vLLM server that does everything."""

from collections.abc import Callable
from typing import Any

from harts_hf.rollouts.engines import Engine, SamplingSettings
from harts_hf.rollouts.engines.opening import wants_routes
from harts_hf.rollouts.engines.vllm_server import VLLMServerEngine
from harts_hf.rollouts.gateway.agents import Agent
from harts_hf.rollouts.gateway.formats import ChatFormat, TrlFormat
from harts_hf.rollouts.gateway.turns import EngineTurns, LengthLimits, TurnSource
from harts_hf.rollouts.gateway.vllm import VLLMChatTurns, VLLMFormat, VLLMServer

ChatFormatFactory = Callable[[Any], ChatFormat]


class TurnSources:
    """Makes the source of each collection.

    Args:
        agent: whose chat format is taken where none is given.
        chat_format: see :class:`~harts_hf.rollouts.AgentRolloutCollector`.
        max_turn_tokens: most tokens of a turn; None for the trainer's ``max_completion_length``.
        max_context_length: most tokens of a history and its turn; None for the engine's.

    Raises:
        ValueError: a chat format that is none.
    """

    def __init__(
        self,
        agent: Agent,
        chat_format: ChatFormatFactory | str | None,
        *,
        max_turn_tokens: int | None,
        max_context_length: int | None,
    ) -> None:
        if isinstance(chat_format, str) and chat_format != "vllm_chat":
            raise ValueError(f"expected chat_format to be a function, 'vllm_chat' or None, got {chat_format!r}")
        self._agent = agent
        self._chat_format = chat_format
        self._max_turn_tokens = max_turn_tokens
        self._max_context_length = max_context_length
        self._format: tuple[Any, ChatFormat] | None = None  # of the tokenizer

    def check_tokenizer(self, tokenizer: Any, *, use_vllm: bool) -> None:
        """See :meth:`AgentRolloutCollector.check_tokenizer`."""
        if not use_vllm and self._chat_format != "vllm_chat":
            self._new_format(tokenizer, None)

    def source(self, trainer: Any, engine: Engine) -> TurnSource:
        """The source of one collection.

        Args:
            trainer: the ``GRPOTrainer``, whose tokenizer, sampling settings and limits are taken.
            engine: that is open for it.

        Raises:
            ValueError: a tokenizer without a known chat format.
        """
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        limits = LengthLimits(
            max_turn_tokens=self._max_turn_tokens or trainer.args.max_completion_length,
            max_completion_tokens=trainer.args.max_completion_length,
            max_positions=min(filter(None, (self._max_context_length, engine.max_positions)), default=None),
        )
        end_ids, routes = tuple(trainer.eos_token_ids), wants_routes(trainer.args)
        if self._chat_format == "vllm_chat":
            settings = SamplingSettings.from_args(trainer.args, end_ids)
            server = VLLMServer.of_engine(engine)
            return VLLMChatTurns(tokenizer, server, settings=settings, limits=limits, routes=routes)
        # The tokenizer is copied, which takes a while: once.
        if self._format is None or self._format[0] is not tokenizer:
            self._format = tokenizer, self._new_format(tokenizer, engine)
        chat_format = self._format[1]
        if trainer.use_vllm and isinstance(chat_format, VLLMFormat):
            # Each collection has an engine of its own, with connections of its own.
            chat_format.server = VLLMServer.of_engine(engine)
        return EngineTurns(engine, chat_format, end_ids=end_ids, limits=limits, routes=routes)

    def _new_format(self, tokenizer: Any, engine: Engine | None) -> ChatFormat:
        if callable(self._chat_format):
            return self._chat_format(tokenizer)
        own = self._agent.chat_format(tokenizer)
        if own is not None:
            return own
        if isinstance(engine, VLLMServerEngine):
            return VLLMFormat(tokenizer, VLLMServer.of_engine(engine))
        return TrlFormat(tokenizer)
