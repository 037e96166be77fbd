"""What a conversation with an environment may cost."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """What a conversation may cost.

    Attributes:
        max_turns: a conversation is closed after so many turns, whatever the environment says.
        max_turn_tokens: a turn ends at an end token, or after so many tokens.
        max_completion_tokens: a conversation holds at most so many tokens after its prompt. Where an observation and
            one more token do not fit, it is closed before the observation; a turn that is cut by this limit (not by
            ``max_turn_tokens``) is not played. The engine's ``max_positions`` limit a conversation likewise.

    Raises:
        ValueError: numbers below 1.
    """

    max_turns: int
    max_turn_tokens: int
    max_completion_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens", "max_completion_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
