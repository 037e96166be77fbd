"""What a caller may ask of the planner."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harts_hf.planner.chunks import CHUNK_SIZE

if TYPE_CHECKING:
    from harts_hf.planner.cost import CostModel

SHARING = ("auto", "always", "never")
EXECUTIONS = ("auto", "replay", "nested", "keep")


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Limits and choices of :func:`harts_hf.planner.plan_window`.

    Attributes:
        max_tokens_per_microbatch: network rows that one forward may take.
        max_linear_rows: rows that its linear layers may take, replay included; None for no limit.
        max_graph_tokens: network rows whose graphs may be alive at once; None for no limit.
        max_handoff_bytes: bytes of boundary states that may be alive at once on a rank; None for no limit.
        world_size: ranks that share the work.
        chunk_size: C, the chunk of the linear rule.
        sharing: "always" computes every shared row as seldom as the limits allow; "never" gives every trajectory rows
            of its own; "auto" takes whichever is estimated to be faster.
        execution: "replay", "nested" or "keep" (DESIGN 5); "auto" takes "replay", which is exact everywhere.
        cost: coefficients of the time estimate; None for the defaults.
        handoff: whether a microbatch may read the states of others. False: a cut computes its prefix again.

    Raises:
        ValueError: a setting that no plan can meet; the message names the smallest one that works.
    """

    max_tokens_per_microbatch: int = 16384
    max_linear_rows: int | None = None
    max_graph_tokens: int | None = None
    max_handoff_bytes: int | None = None
    world_size: int = 1
    chunk_size: int = CHUNK_SIZE
    sharing: str = "auto"
    execution: str = "auto"
    cost: "CostModel | None" = None
    handoff: bool = True

    def __post_init__(self) -> None:
        _at_least("chunk_size", self.chunk_size, 1, "a chunk holds at least one token")
        _at_least("world_size", self.world_size, 1, "somebody has to do the work")
        chunk = f"one chunk of {self.chunk_size} tokens has to fit"
        _at_least("max_tokens_per_microbatch", self.max_tokens_per_microbatch, self.chunk_size, chunk)
        if self.max_linear_rows is not None:
            _at_least("max_linear_rows", self.max_linear_rows, self.chunk_size, chunk)
        if self.max_graph_tokens is not None:
            _at_least("max_graph_tokens", self.max_graph_tokens, self.chunk_size, chunk)
        if self.max_handoff_bytes is not None:
            _at_least("max_handoff_bytes", self.max_handoff_bytes, 0, "bytes cannot be negative")
        _one_of("sharing", self.sharing, SHARING)
        _one_of("execution", self.execution, EXECUTIONS)


def _at_least(name: str, value: int, smallest: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected {name} to be an integer, got {value!r}")
    if value < smallest:
        raise ValueError(f"expected {name} of at least {smallest} ({why}), got {value}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
