"""The writer of a collector, whatever its environments are."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from harts_hf.rollouts.engines.engine import SampledTurn
from harts_hf.rollouts.environment import Environment
from harts_hf.rollouts.environments.chat import ChatWriter
from harts_hf.rollouts.environments.texts import ObservationLimit, PlainWriter, Writer


class AnyWriter(Writer):
    """Writes messages by the chat template and texts as they are, each environment as it says.

    Args:
        tokenizer: the policy's; one without a chat template will do as long as no environment needs it.
        chat: whether texts are messages too.
        end_ids: as for :class:`ChatWriter`.
        template_kwargs: likewise.
        limit: likewise.

    Raises:
        ValueError: ``chat``, and a tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool,
        end_ids: Sequence[int],
        template_kwargs: dict[str, Any] | None = None,
        limit: ObservationLimit | None = None,
    ) -> None:
        limit = limit or ObservationLimit()
        super().__init__(tokenizer, limit)
        self._plain = PlainWriter(tokenizer, limit)
        self._make = partial(ChatWriter, tokenizer, end_ids=end_ids, template_kwargs=template_kwargs, limit=limit)
        self._always = chat
        self._chat: ChatWriter | None = self._make() if chat else None

    @property
    def num_cut(self) -> int:
        """Observations that were cut so far."""
        return self._plain.num_cut + (0 if self._chat is None else self._chat.num_cut)

    def prompt(self, said: Any, environment: Environment, *, limit: int | None = None) -> list[int]:
        return self._of(environment).prompt(said, environment, limit=limit)

    def action(self, turn: SampledTurn, history: Sequence[int], environment: Environment) -> Any:
        return self._of(environment).action(turn, history, environment)

    def answer(self, observation: Any, turn: SampledTurn, environment: Environment, *, limit: int) -> list[int] | None:
        return self._of(environment).answer(observation, turn, environment, limit=limit)

    def _of(self, environment: Environment) -> Writer:
        if not self._always and not environment.takes_messages:
            return self._plain
        if self._chat is None:
            self._chat = self._make()
        return self._chat
