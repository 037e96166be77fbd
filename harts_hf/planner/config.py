"""What a caller may ask of the planner."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from harts_hf.planner.chunks import CHUNK_SIZE
from harts_hf.planner.cost import CostModel

Sharing = Literal["auto", "always", "never"]
Execution = Literal["replay", "nested", "keep"]
ExecutionChoice = Literal["auto", "replay", "nested", "keep"]

# A plan has a string of ops for every rank, idle ones too, and this many still plan in seconds.
MAX_WORLD_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Limits and choices of :func:`harts_hf.planner.plan_window`.

    Attributes:
        max_tokens_per_microbatch: network rows that one forward may take.
        max_linear_rows: rows that its linear layers may take, replay included; None for no limit.
        max_graph_tokens: network rows whose graphs may be alive at once; None for no limit.
        max_handoff_bytes: bytes of boundary states that may be alive at once on a rank; None for no limit.
        world_size: ranks that share the work, at most 4,096.
        chunk_size: C, the chunk of the linear rule.
        sharing: "always" computes every row once over all ranks: a tree stays whole on one of them, so ranks may idle
            (and do, where all trajectories begin with one token, which makes them one tree). "never" gives every
            trajectory rows of its own. "auto" takes what is estimated to be fastest, prefixes computed again on
            several ranks included.
        execution: "replay", "nested" or "keep" (docs/windows.md); "auto" takes "replay", which is exact everywhere.
        cost: coefficients of the time estimate; None for the defaults.
        handoff: whether a microbatch may read the states of others. False: a cut computes its prefix again.

    Integers of NumPy are taken as the integers that they are.

    Raises:
        ValueError: a setting of another type, or one that no plan can meet; the message names the smallest that works.
    """

    max_tokens_per_microbatch: int = 16384
    max_linear_rows: int | None = None
    max_graph_tokens: int | None = None
    max_handoff_bytes: int | None = None
    world_size: int = 1
    chunk_size: int = CHUNK_SIZE
    sharing: Sharing = "auto"
    execution: ExecutionChoice = "auto"
    cost: CostModel | None = None
    handoff: bool = True

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)
        _at_least("world_size", self.world_size, 1, "somebody has to do the work")
        if self.world_size > MAX_WORLD_SIZE:
            raise ValueError(f"expected world_size of at most {MAX_WORLD_SIZE}, got {self.world_size}")
        chunk = f"one chunk of {self.chunk_size} tokens has to fit"
        if self.max_graph_tokens is not None:  # before the limit of a microbatch, which may have been made of it
            _at_least("max_graph_tokens", self.max_graph_tokens, self.chunk_size, chunk)
        _at_least("max_tokens_per_microbatch", self.max_tokens_per_microbatch, self.chunk_size, chunk)
        if self.max_linear_rows is not None:
            _at_least("max_linear_rows", self.max_linear_rows, self.chunk_size, chunk)
        if self.max_handoff_bytes is not None:
            _at_least("max_handoff_bytes", self.max_handoff_bytes, 0, "bytes cannot be negative")
        _one_of("sharing", self.sharing, get_args(Sharing))
        _one_of("execution", self.execution, get_args(ExecutionChoice))
        if not isinstance(self.handoff, bool):
            raise ValueError(f"expected handoff to be True or False, got {self.handoff!r}")
        if self.cost is not None and not isinstance(self.cost, CostModel):
            raise ValueError(f"expected cost to be a CostModel or None, got {self.cost!r}")

    def plain(self) -> "PlannerConfig":
        """The same with Python's own integers in place of NumPy's, which overflow."""
        integers: dict[str, Any] = {
            name: int(value) for name, value in vars(self).items() if isinstance(value, np.integer)
        }
        return replace(self, **integers) if integers else self


def planner_config(config: PlannerConfig | None) -> PlannerConfig:
    """The configuration, or the defaults for None.

    Raises:
        ValueError: something else.
    """
    if config is None:
        return PlannerConfig()
    if not isinstance(config, PlannerConfig):
        raise ValueError(f"expected a PlannerConfig or None, got {type(config).__name__}")
    return config


def check_chunk_size(chunk_size: object) -> None:
    """Raises ValueError for a chunk size that is no integer of at least 1."""
    _at_least("chunk_size", chunk_size, 1, "a chunk holds at least one token")


def _at_least(name: str, value: object, smallest: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"expected {name} to be an integer, got {value!r}")
    if value < smallest:
        raise ValueError(f"expected {name} of at least {smallest} ({why}), got {value}")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
