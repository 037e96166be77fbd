"""The order of forwards and backwards of a rank, and equal strings of them over ranks (NumPy only)."""

from collections.abc import Sequence
from typing import Literal

from harts_hf.planner.microbatch import Microbatch

OpKind = Literal["S", "F", "B"]  # a forward without a graph, a forward, a backward
Op = tuple[OpKind, int]  # and the id of its microbatch
DUMMY = -1
OP_KINDS: tuple[OpKind, ...] = ("S", "F", "B")


def replay_ops(microbatches: Sequence[Microbatch], again: frozenset[int] = frozenset()) -> list[Op]:
    """``S`` of all, trunks first, then ``F B`` of each, dependents first.

    Args:
        microbatches: of one rank, trunks before dependents.
        again: ids of trunks whose handoff is dropped after the ``S`` pass and made again by a second ``S``.
    """
    ops: list[Op] = [("S", microbatch.id) for microbatch in microbatches]
    made_for = _first_readers(microbatches) if again else {}
    before: dict[int, list[int]] = {}
    for trunk in sorted(again):
        before.setdefault(made_for[trunk], []).append(trunk)
    for microbatch in reversed(microbatches):
        ops += [("S", trunk) for trunk in before.get(microbatch.id, ())]
        ops += [("F", microbatch.id), ("B", microbatch.id)]
    return ops


def _first_readers(microbatches: Sequence[Microbatch]) -> dict[int, int]:
    """For each trunk the first microbatch of the reverse order that needs its states.

    That is the last one that reads it, or a trunk of the last one, and so on: making a trunk's states again takes
    those of its own trunks. Complexity: one Python step per trunk of each microbatch.
    """
    first: dict[int, int] = {}
    for microbatch in reversed(microbatches):
        needed_for = first.get(microbatch.id, microbatch.id)
        for trunk in microbatch.trunks:
            if first.get(trunk, -1) < needed_for:
                first[trunk] = needed_for
    return first


def nested_ops(microbatches: Sequence[Microbatch], dropped: frozenset[int] = frozenset()) -> list[Op]:
    """Trunk ``F``, its dependents' ``F B``, trunk ``B``.

    Args:
        microbatches: of one rank, trunks before dependents.
        dropped: ids of trunks whose graph does not stay: ``S`` for the handoff, ``F B`` after the dependents.
    """
    last_reader = {trunk: microbatch.id for microbatch in microbatches for trunk in microbatch.trunks}
    ops: list[Op] = []
    stack: list[int] = []

    def close() -> None:
        trunk = stack.pop()
        ops.extend([("F", trunk), ("B", trunk)] if trunk in dropped else [("B", trunk)])

    for microbatch in microbatches:
        while stack and last_reader.get(stack[-1], -1) < microbatch.id:
            close()
        ops.append(("S" if microbatch.id in dropped else "F", microbatch.id))
        stack.append(microbatch.id)
    while stack:
        close()
    return ops


def block_ops(microbatches: Sequence[Microbatch], most: int, limit: int, seconds: Sequence[float]) -> list[Op]:
    """Nested words that look alike on all ranks: ``S`` of some trunks, then blocks of ``F`` of a few and their ``B``.

    Blocks are runs of the microbatches and go in reverse, dependents first; trunks that a later block reads are run
    once more for it, before all blocks. Which runs costs the fewest seconds of ``S``, then the fewest blocks.

    Args:
        microbatches: of one rank, trunks before dependents.
        most: microbatches of a block.
        limit: rows of a block, whose graphs are alive at once; a single microbatch may have more.
        seconds: of a forward of each microbatch, by id.

    Complexity: O(most) Python steps per trunk of each microbatch.
    """
    last_reader = {trunk: microbatch.id for microbatch in microbatches for trunk in microbatch.trunks}
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first microbatches: seconds, blocks
    block: list[tuple[int, set[int]]] = [(0, set())]  # that ends there: where it begins, trunks to be run before
    for stop in range(1, len(microbatches) + 1):
        found = []
        again: set[int] = set()
        rows, after = 0, microbatches[stop - 1].id
        for start in range(stop - 1, max(stop - most, 0) - 1, -1):
            one = microbatches[start]
            rows += one.num_rows
            if rows > limit and start < stop - 1:
                break
            if one.id in again or last_reader.get(one.id, -1) > after:
                again |= {one.id, *one.trunks}  # what it reads itself has to be there, too
            own = {index for index in again if index >= one.id}
            cost = best[start][0] + sum(seconds[index] for index in own)
            found.append((cost, best[start][1] + 1, start, own))
        cost, count, start, own = min(found, key=lambda choice: choice[:2])
        best.append((cost, count))
        block.append((start, own))
    scored: set[int] = set()
    ops: list[Op] = []
    stop = len(microbatches)
    while stop:
        start, own = block[stop]
        ids = [microbatch.id for microbatch in microbatches[start:stop]]
        scored |= own
        ops += [("F", index) for index in ids] + [("B", index) for index in reversed(ids)]
        stop = start
    return [("S", index) for index in sorted(scored)] + ops


def keep_ops(microbatches: Sequence[Microbatch]) -> list[Op]:
    """``F`` of all, then ``B`` of all in reverse."""
    ids = [microbatch.id for microbatch in microbatches]
    return [("F", i) for i in ids] + [("B", i) for i in reversed(ids)]


# What an op adds to the open graphs of its rank.
OPENED: dict[OpKind, int] = {"S": 0, "F": 1, "B": -1}


def align(rank_ops: Sequence[Sequence[Op]]) -> list[list[Op]]:
    """Ops of all ranks as strings of equal kinds, dummies filled in.

    At every index the ranks whose next op is of the chosen kind run it, and the others run a dummy. ``S`` goes before
    ``F`` before ``B``. Every rank's graphs, dummies among them, are closed in the reverse of the order in which they
    were opened. So a backward runs beside the backwards of exactly those microbatches that its forward ran beside:
    where ranks exchange tokens within a forward (expert parallelism), its gradients go back the same way.

    Args:
        rank_ops: of each rank; every ``B`` closes the rank's last open graph.

    Raises:
        ValueError: a ``B`` of another microbatch than the last that was opened.
    """
    ahead = [list(reversed(ops)) for ops in rank_ops]  # the next op is the last
    opened: list[list[int]] = [[] for _ in rank_ops]
    aligned: list[list[Op]] = [[] for _ in rank_ops]
    while any(ahead) or any(opened):
        kind = _next_kind(ahead)
        for own, graphs, ops in zip(ahead, opened, aligned, strict=True):
            ops.append(_take(kind, own, graphs))
    return aligned


def _next_kind(ahead: Sequence[Sequence[Op]]) -> OpKind:
    """The first kind in their order that a rank's next op is of; of none, what closes dummies."""
    return next((kind for kind in OP_KINDS if any(ops and ops[-1][0] == kind for ops in ahead)), "B")


def _take(kind: OpKind, ahead: list[Op], opened: list[int]) -> Op:
    """The op of a kind that a rank runs: its next one, or a dummy.

    All ranks always have equally many open graphs. A ``B`` is chosen where no rank's next op is a forward, so a rank
    whose last open graph is no dummy wants to close it.

    Args:
        kind: of the op.
        ahead: the rank's ops to come, the next one last; it is taken away.
        opened: microbatches of its open graphs, dummies among them; brought up to date.
    """
    is_own = opened[-1] != DUMMY if kind == "B" else bool(ahead) and ahead[-1][0] == kind
    if not is_own:
        op: Op = (kind, DUMMY)
    elif kind == "B" and (not ahead or ahead[-1] != ("B", opened[-1])):
        raise ValueError(f"expected backward {opened[-1]}, of the last open graph, got {ahead[-1:] or 'no more ops'}")
    else:
        op = ahead.pop()
    if kind == "F":
        opened.append(op[1])
    elif kind == "B":
        opened.pop()
    return op


def interleave(rank_ops: Sequence[Sequence[Op]], rows: Sequence[int], limit: int) -> list[list[Op]]:
    """Nested words that align with fewer dummies: a rank whose next op is ``B`` may run its next ``F`` first.

    The graphs that would have been closed then stay open below it and are closed after it, so words stay nested.

    Args:
        rank_ops: nested words of all ranks.
        rows: rows of each microbatch, by id.
        limit: rows whose graphs may be alive at once on a rank.
    """
    ahead = [list(reversed(ops)) for ops in rank_ops]  # the next op is the last
    dropped = [{index for kind, index in ops if kind == "S"} for ops in rank_ops]
    opened: list[list[int]] = [[] for _ in rank_ops]
    done: list[list[Op]] = [[] for _ in rank_ops]
    alive = [0] * len(rank_ops)
    while any(ahead):
        kind = _next_kind(ahead)
        for rank, own in enumerate(ahead):
            if kind == "F" and own and own[-1][0] == "B":
                _bring_forward(own, dropped[rank], rows, limit - alive[rank])
            op = _take(kind, own, opened[rank])
            if op[1] != DUMMY:
                done[rank].append(op)
                alive[rank] += OPENED[kind] * rows[op[1]]
    return done


def _bring_forward(ahead: list[Op], dropped: set[int], rows: Sequence[int], room: int) -> None:
    """Moves the first ``F`` behind leading ``B`` to the front, and those ``B`` behind its own, if that is legal.

    Args:
        ahead: the ops to come, the next one last.
        dropped: ids of trunks whose late ``F`` has to wait for their dependents' ``B``.
        rows: rows of each microbatch, by id.
        room: rows whose graphs may be alive besides those that are.
    """
    first = len(ahead) - 1
    while first >= 0 and ahead[first][0] == "B":
        first -= 1
    if first < 0 or ahead[first][0] != "F" or ahead[first][1] in dropped:
        return
    own, alive = ahead[first][1], 0
    close = first
    while ahead[close] != ("B", own):
        kind, index = ahead[close]
        alive += OPENED[kind] * rows[index]
        if alive > room:
            return
        close -= 1
    ahead[close:] = [*ahead[first + 1 :], *ahead[close : first + 1]]
