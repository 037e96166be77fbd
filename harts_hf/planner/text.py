"""Schedules in words."""

from collections.abc import Sequence

from harts_hf.planner.execution import DUMMY, Op

# Ranks whose ops are listed, and ops of a rank.
MAX_RANKS = 64
MAX_OPS = 24


def counted(number: int, name: str, plural: str | None = None) -> str:
    """A number with its name: ``1 rank``, ``2 ranks``, ``4,096 ranks``."""
    return f"{number:,} {name if number == 1 else plural or name + 's'}"


def op_lines(aligned: Sequence[Sequence[Op]]) -> list[str]:
    """A line per rank with its ops, dummies as ``-``, shortened where there are many."""
    lines = [f"  rank {rank}: {_shortened(ops)}" for rank, ops in enumerate(aligned[:MAX_RANKS])]
    if len(aligned) > MAX_RANKS:
        lines.append(f"  ... {counted(len(aligned) - MAX_RANKS, 'more rank')}")
    return lines


def _shortened(ops: Sequence[Op]) -> str:
    words = [f"{kind}{'-' if index == DUMMY else index}" for kind, index in ops]
    if len(words) <= MAX_OPS:
        return " ".join(words)
    return " ".join([*words[: MAX_OPS // 2], f"... {len(words) - MAX_OPS} more ...", *words[-MAX_OPS // 2 :]])
