"""Orders of a rank's ops that stay within the limits of memory (NumPy only)."""

from collections.abc import Iterable, Mapping, Sequence

from harts_hf.planner.accounting import Export
from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.execution import Op, graph_tokens, keep_ops, nested_ops, replay_ops
from harts_hf.planner.memory import handed_bytes, value_lives
from harts_hf.planner.microbatch import Microbatch


class LimitError(ValueError):
    """No schedule was found that keeps within limits.

    Attributes:
        needed: names of the limits in :class:`PlannerConfig` that are too small, and values that would do.
    """

    def __init__(self, needed: Mapping[str, int], config: PlannerConfig) -> None:
        given = " and ".join(f"{name}={getattr(config, name)}" for name in needed)
        super().__init__(
            f"no schedule keeps within {given}; the smallest that works with these settings is {_listed(needed)}"
        )
        self.needed = dict(needed)

    @property
    def wish(self) -> str:
        """What would have to be, for a sentence."""
        return _listed(self.needed)


def _listed(needed: Mapping[str, int]) -> str:
    return " and ".join(f"{name}={value}" for name, value in needed.items())


def join_needs(needs: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Limits that meet all of several needs."""
    joined: dict[str, int] = {}
    for needed in needs:
        for name, value in needed.items():
            joined[name] = max(value, joined.get(name, 0))
    return joined


def order_ops(
    own: Sequence[Microbatch],
    all_microbatches: Sequence[Microbatch],
    exports: dict[int, Export],
    *,
    execution: str,
    config: PlannerConfig,
) -> list[Op]:
    """Ops of one rank within the limits, with as few extra forwards as the greedy choices below find.

    Args:
        own: the rank's microbatches, trunks before dependents.
        all_microbatches: by id.
        exports: what each trunk hands over.
        execution: "replay", "nested" or "keep".
        config: has the limits.

    Raises:
        LimitError: limits that no order of these microbatches was found to meet.
    """
    if not own:
        return []
    if execution == "nested":
        ops = _nested_within(own, all_microbatches, config.max_graph_tokens)
    elif execution == "keep":
        ops = keep_ops(own)
    else:
        ops = _replay_within(own, all_microbatches, exports, config.max_handoff_bytes)
    peaks = {"max_graph_tokens": max(graph_tokens(ops, all_microbatches))}
    if config.max_handoff_bytes is not None:
        peaks["max_handoff_bytes"] = int(handed_bytes(ops, all_microbatches, exports).max())
    limits = {name: getattr(config, name) for name in peaks}
    needed = {name: peak for name, peak in peaks.items() if limits[name] is not None and peak > limits[name]}
    if needed:
        raise LimitError(needed, config)
    return ops


def _nested_within(own: Sequence[Microbatch], all_microbatches: Sequence[Microbatch], limit: int | None) -> list[Op]:
    """Drops graphs of open trunks, the outermost first, where too many are alive: those lie above most others."""
    dropped: set[int] = set()
    while True:
        ops = nested_ops(own, frozenset(dropped))
        if limit is None:
            return ops
        more: set[int] = set()
        alive: list[int] = []
        total = 0
        for kind, index in ops:
            rows = all_microbatches[index].num_rows
            if kind == "F":
                alive.append(index)
                total += rows
                # What is dropped here is gone from every later peak too.
                excess = total - sum(all_microbatches[i].num_rows for i in more & set(alive)) - limit
                for trunk in alive[:-1]:
                    if excess <= 0:
                        break
                    if trunk not in more:
                        more.add(trunk)
                        excess -= all_microbatches[trunk].num_rows
            elif kind == "B":
                alive.remove(index)
                total -= rows
        if not more:
            return ops
        dropped |= more


def _replay_within(
    own: Sequence[Microbatch], all_microbatches: Sequence[Microbatch], exports: dict[int, Export], limit: int | None
) -> list[Op]:
    """Drops handed states after the scoring pass, most bytes a row first, and makes them again where needed."""
    again: set[int] = set()
    last_reader = {trunk: microbatch.id for microbatch in own for trunk in microbatch.trunks}
    # States that the last microbatch reads are needed at once when the scoring pass ends.
    droppable = [trunk for trunk, reader in last_reader.items() if reader != own[-1].id]
    droppable.sort(key=lambda trunk: (-exports[trunk].value_bytes / all_microbatches[trunk].num_rows, trunk))
    while True:
        ops = replay_ops(own, frozenset(again))
        if limit is None:
            return ops
        alive_bytes = handed_bytes(ops, all_microbatches, exports)
        place = int(alive_bytes.argmax())
        if alive_bytes[place] <= limit:
            return ops
        alive = {trunk for trunk, first, last in value_lives(ops, all_microbatches) if first <= place <= last}
        more = next((trunk for trunk in droppable if trunk in alive and trunk not in again), None)
        if more is None:
            return ops
        again.add(more)
