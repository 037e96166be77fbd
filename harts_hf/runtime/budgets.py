"""Limits of plans: those that fit into a device's memory, and smaller ones after memory ran out."""

import re
from dataclasses import dataclass, replace

from harts_hf.modeling.memory import WORKSPACE, RowBytes
from harts_hf.planner import CHUNK_SIZE, PlannerConfig, Schedule

# Part of the memory that is left for what is not predicted: fragments, temporary tensors, other processes.
MARGIN = 0.1
# Parts of what is left for rows: the limit of handed bytes, if one is asked for, by the planner's count, which is two
# to five times too high (docs/windows.md); and what is kept for handed states and for reading prefixes.
HANDED, KEPT = 1 / 4, 3 / 16
# Most rows of a microbatch: somewhat more than have been tried (91,408); the GPU is as busy with fewer.
MOST_ROWS = 131_072
# Elements that 32-bit offsets reach. Our kernels count in 64 bits; FLA's do not in every release, and their largest
# tensor is of the states of a group of chunk nodes, up to a quarter more than the rows fill (default_group_size).
REACHED, REPLAYED = 2**31, 1.25


_SIZE = re.compile(
    r"\s*(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>I?))?B?\s*",
    re.IGNORECASE | re.ASCII,
)


class DoesNotFitError(ValueError):
    """A model that leaves no memory for the rows of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of plans.

    Attributes:
        max_tokens: network rows of a microbatch.
        max_graph_tokens: network rows whose graphs may be alive at once; None for no limit.
        max_handoff_bytes: bytes of handed states that may be alive at once; None for no limit.
        reason: how they were found, in a few words.
    """

    max_tokens: int = 16_384
    max_graph_tokens: int | None = None
    max_handoff_bytes: int | None = None
    reason: str = "the default where a device's memory is not known"


def fitting_budget(rows: RowBytes, room: float, *, offload: bool = False, reason: str = "") -> Budget:
    """The largest limits whose graphs, handed states and head take at most so many bytes.

    One microbatch may take all rows whose graphs fit; where a window is cut and keeps the graphs of trunks,
    :meth:`harts_hf.runtime.planning.WindowPlanner.with_execution_chosen` divides them. Numbers of rows are a multiple
    of a quarter of a power of two (20,480, 24,576, 28,672, 32,768, 40,960, ...), so that a little more or less memory
    does not make another plan.

    Args:
        rows: of the model.
        room: bytes beside weights, gradients and optimizer, any margin taken off.
        offload: whether handed states lie on the CPU between uses.
        reason: of the budget.

    Raises:
        DoesNotFitError: not even one chunk of rows fits.
    """
    fixed = WORKSPACE + rows.head + rows.layer + rows.casts + rows.kept_casts  # of a trunk and a dependent
    left = room - fixed
    count = (left - rows.logits * rows.chunk_rows) * (1 - KEPT) / rows.row
    if count < rows.chunk_rows:  # the head takes them all at once
        count = left * (1 - KEPT) / (rows.row + rows.logits)
    if count < CHUNK_SIZE:
        needed = fixed + CHUNK_SIZE * (rows.row + rows.logits) / (1 - KEPT)
        raise DoesNotFitError(
            f"expected at least {_size(needed)} beside weights, gradients and optimizer ({_size(rows.head)} of them "
            f"for the head, {_size(rows.row)} per row), got {_size(room) if room > 0 else 'nothing left'}: take "
            "activation checkpointing, another optimizer, adapters, or more processes that share the model"
        )
    number = _rounded(min(int(count), most_rows(rows.state_elements)))
    return Budget(
        max_tokens=number,
        max_graph_tokens=number,
        max_handoff_bytes=None if offload else int(left * HANDED),
        reason=reason,
    )


def most_rows(state_elements: int) -> int:
    """The largest limit of rows, whatever the memory.

    Args:
        state_elements: of the state of a chunk node in a linear layer; 0 if there is none.
    """
    reached = int(REACHED * CHUNK_SIZE / REPLAYED / state_elements) if state_elements else MOST_ROWS
    return min(MOST_ROWS, reached)


def _size(count: float) -> str:
    """A number of bytes in the largest unit that leaves it above 1: a model may be tiny."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} bytes"


def _rounded(count: int) -> int:
    """Down to a quarter of a power of two, and to whole chunks."""
    step = max(CHUNK_SIZE, 1 << max(0, count.bit_length() - 3))
    return count // step * step


def parse_bytes(name: str, text: str) -> float:
    """Bytes of a text such as 141GB, 80 GiB, 1.5e11 or 1.41e+11 (as Python prints it).

    Args:
        name: of the option, for the error.
        text: a number, and a unit.

    Raises:
        ValueError: another text, or a size that is not finite or below one byte.
    """
    found = _SIZE.fullmatch(str(text))
    size = 0.0
    if found is not None:
        power = " KMGT".index((found["unit"] or " ").upper())
        size = float(found["number"]) * (1024 if found["binary"] else 1000) ** power
    if not 1 <= size < float("inf"):
        raise ValueError(f"expected {name} to be a size such as 141GB or 80GiB, got {text!r}")
    return size


def limited(config: PlannerConfig, rows: int, graph: int | None = None) -> PlannerConfig:
    """A configuration whose limits of rows are no larger than these.

    Args:
        config: of plans.
        rows: of a microbatch.
        graph: rows whose graphs may be alive at once; None leaves that limit as it is.
    """
    before = config.max_graph_tokens
    return replace(
        config,
        max_tokens_per_microbatch=min(config.max_tokens_per_microbatch, rows),
        max_graph_tokens=before if graph is None else graph if before is None else min(before, graph),
    )


def limited_to(config: PlannerConfig, schedule: Schedule, *, with_graphs: bool) -> PlannerConfig:
    """Limits that are no larger than what a schedule within them runs, so that half of them is half of that.

    Args:
        config: of the planner, with execution "auto" or another.
        schedule: planned with it, of all ranks.
        with_graphs: whether graphs were made.
    """
    rows = max(microbatch.num_rows for microbatch in schedule.microbatches)
    if not with_graphs:
        return limited(config, rows)
    ranks = range(schedule.config.world_size)
    alive = max(int(schedule.memory_counts(rank).graph_rows.max(initial=0)) for rank in ranks)
    # With execution="auto" the limit follows that of a microbatch, and halves with it, if it is not set. Nested
    # windows without a limit may have the graphs of any number of trunks alive, however small microbatches are.
    limit = schedule.config.max_graph_tokens
    is_bounded = schedule.config.execution != "nested" if limit is None else 2 * alive > limit
    return limited(config, rows, None if config.max_graph_tokens is None and is_bounded else alive)


def halved(config: PlannerConfig) -> PlannerConfig | None:
    """Limits of half as many rows, after memory ran out; None where a microbatch holds one chunk already."""
    smallest = config.chunk_size
    if config.max_tokens_per_microbatch <= smallest:
        return None
    graph = config.max_graph_tokens
    linear = config.max_linear_rows
    return replace(
        config,
        max_tokens_per_microbatch=max(smallest, config.max_tokens_per_microbatch // 2),
        max_graph_tokens=None if graph is None else max(smallest, graph // 2),
        max_linear_rows=None if linear is None else max(smallest, linear // 2),
    )
