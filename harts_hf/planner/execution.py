"""The order of forwards and backwards of a rank, and equal strings of them over ranks (NumPy only)."""

from collections.abc import Sequence

from harts_hf.planner.microbatch import Microbatch

Op = tuple[str, int]
DUMMY = -1


def replay_ops(microbatches: Sequence[Microbatch], again: frozenset[int] = frozenset()) -> list[Op]:
    """``S`` of all, trunks first, then ``F B`` of each, dependents first.

    Args:
        microbatches: of one rank, trunks before dependents.
        again: ids of trunks whose handoff is dropped after the ``S`` pass and made again by a second ``S``.
    """
    by_id = {microbatch.id: microbatch for microbatch in microbatches}
    ops: list[Op] = [("S", microbatch.id) for microbatch in microbatches]
    missing = set(again)
    for microbatch in reversed(microbatches):
        needed = sorted(_open_trunks(microbatch, by_id) & missing) if missing else []
        ops += [("S", trunk) for trunk in needed]
        missing -= set(needed)
        ops += [("F", microbatch.id), ("B", microbatch.id)]
    return ops


def _open_trunks(microbatch: Microbatch, by_id: dict[int, Microbatch]) -> set[int]:
    """Trunks of a microbatch and the trunks that those read, all the way up."""
    found: set[int] = set()
    queue = list(microbatch.trunks)
    while queue:
        trunk = queue.pop()
        if trunk not in found:
            found.add(trunk)
            queue += by_id[trunk].trunks
    return found


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


def keep_ops(microbatches: Sequence[Microbatch]) -> list[Op]:
    """``F`` of all, then ``B`` of all in reverse."""
    ids = [microbatch.id for microbatch in microbatches]
    return [("F", i) for i in ids] + [("B", i) for i in reversed(ids)]


def graph_tokens(ops: Sequence[Op], microbatches: Sequence[Microbatch]) -> list[int]:
    """Network rows whose graphs are alive while each op runs (a dummy's one row is not counted)."""
    alive, series = 0, []
    for kind, index in ops:
        rows = microbatches[index].num_rows if index != DUMMY else 0
        alive += rows if kind == "F" else 0
        series.append(alive)
        alive -= rows if kind == "B" else 0
    return series


def handoff_lives(ops: Sequence[Op], microbatches: Sequence[Microbatch]) -> list[tuple[int, int, int]]:
    """When handed states are alive: ``(trunk id, first op, last op)``, both included.

    A forward of a trunk makes its handoff; the latest one counts. It lives until the last op that reads it, and, once
    a dependent's backward has put gradients there, until the trunk's own backward. A forward that nobody reads (the
    ``F`` just before the trunk's ``B``) makes none.
    """
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    holds_gradient: set[int] = set()
    lives = []

    def end(trunk: int) -> None:
        if trunk in last:
            assert trunk in made, "states that no forward made"
            lives.append((trunk, made[trunk], last.pop(trunk)))

    for time, (kind, index) in enumerate(ops):
        if index == DUMMY:
            continue
        for trunk in microbatches[index].trunks:
            last[trunk] = time
            if kind == "B":
                holds_gradient.add(trunk)
        if kind == "B":
            if index in holds_gradient:
                last[index] = time
            end(index)
        elif index not in holds_gradient:
            end(index)
            made[index] = time
    for trunk in list(last):
        end(trunk)
    return sorted(lives)


def align(rank_ops: Sequence[Sequence[Op]]) -> list[list[Op]]:
    """Ops of all ranks as strings of equal kinds, dummies filled in.

    At every place the ranks whose next op is of the chosen kind run it, and the others run a dummy. ``S`` goes before
    ``F`` before ``B``. All ranks always have equally many open graphs, dummies counted, so if no rank wants a forward,
    a rank that does not want ``B`` has finished and has an open dummy: the string can always go on. Dummies that are
    open at the end are closed by dummy ``B``.
    """
    place = [0] * len(rank_ops)
    open_dummies = [0] * len(rank_ops)
    aligned: list[list[Op]] = [[] for _ in rank_ops]

    def append(kind: str, heads: Sequence[str]) -> None:
        for rank, head in enumerate(heads):
            if head == kind:
                aligned[rank].append(rank_ops[rank][place[rank]])
                place[rank] += 1
            else:
                aligned[rank].append((kind, DUMMY))
                open_dummies[rank] += {"S": 0, "F": 1, "B": -1}[kind]

    while True:
        heads = [ops[place[rank]][0] if place[rank] < len(ops) else "" for rank, ops in enumerate(rank_ops)]
        if not any(heads):
            break
        append(next(kind for kind in "SFB" if kind in heads), heads)
    for _ in range(open_dummies[0] if rank_ops else 0):
        append("B", [""] * len(rank_ops))
    return aligned


def interleave(rank_ops: Sequence[Sequence[Op]], rows: Sequence[int], limit: int) -> list[list[Op]]:
    """Nested words that align with fewer dummies: a rank whose next op is ``B`` may run its next ``F`` first.

    The graphs that would have been closed then stay open below it and are closed after it, so words stay nested.

    Args:
        rank_ops: nested words of all ranks.
        rows: rows of each microbatch, by id.
        limit: rows whose graphs may be alive at once on a rank.
    """
    ahead = [list(ops) for ops in rank_ops]
    dropped = [{index for kind, index in ops if kind == "S"} for ops in rank_ops]
    done: list[list[Op]] = [[] for _ in rank_ops]
    alive = [0] * len(rank_ops)
    while any(ahead):
        kind = next(kind for kind in "SFB" if any(ops and ops[0][0] == kind for ops in ahead))
        for rank, ops in enumerate(ahead):
            if kind == "F" and ops and ops[0][0] == "B":
                _bring_forward(ops, dropped[rank], rows, limit - alive[rank])
            if ops and ops[0][0] == kind:
                op = ops.pop(0)
                done[rank].append(op)
                alive[rank] += {"S": 0, "F": rows[op[1]], "B": -rows[op[1]]}[kind]
    return done


def _bring_forward(ops: list[Op], dropped: set[int], rows: Sequence[int], room: int) -> None:
    """Moves the first ``F`` behind leading ``B`` to the front, and those ``B`` behind its own, if that is legal."""
    place = next((i for i, (kind, _) in enumerate(ops) if kind != "B"), None)
    if place is None:
        return
    kind, index = ops[place]
    # A dropped trunk's late F has to wait for its dependents' B.
    if kind != "F" or index in dropped:
        return
    close = ops.index(("B", index))
    alive = 0
    for kind, index in ops[place:close]:
        alive += {"S": 0, "F": rows[index], "B": -rows[index]}[kind]
        if alive > room:
            return
    ops[:] = [*ops[place : close + 1], *ops[:place], *ops[close + 1 :]]
