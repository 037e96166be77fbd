"""Which keys of ungrouped rows look as if they said the group: a hint for whoever forgot to name one."""

from collections.abc import Iterator, Mapping
from typing import Any

# What programs call the task that several rollouts are of; keys of nested objects end in them, too (info.task_id).
TASK_NAMES = (
    "group", "group_id", "task", "task_id", "instance_id", "problem", "problem_id", "prompt_id", "question",
    "question_id", "example_id",
)  # fmt: skip


class GroupKeys:
    """Counts the values of such keys while rows are read."""

    def __init__(self) -> None:
        self._rows = 0
        self._values: dict[str, set[str | int]] = {}
        self._found: dict[str, int] = {}

    def add(self, *sources: Any) -> None:
        """Looks at the objects in which ``group_key`` would be looked for, of one rollout."""
        self._rows += 1
        found: dict[str, str | int] = {}
        for source in sources:
            found = {**dict(_named_values(source)), **found}
        for key, value in found.items():
            self._found[key] = self._found.get(key, 0) + 1
            self._values.setdefault(key, set()).add(value)

    def likely(self) -> dict[str, int]:
        """Keys that every row has with several values, some of them more than once, and how many values they have."""
        counts = {key: len(self._values[key]) for key, rows in self._found.items() if rows == self._rows}
        return {key: count for key, count in counts.items() if 1 < count < self._rows}


def _named_values(source: Any) -> Iterator[tuple[str, str | int]]:
    if not isinstance(source, Mapping):
        return
    for key, value in source.items():
        nested = {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else {key: value}
        for name, one in nested.items():
            if isinstance(one, str | int) and not isinstance(one, bool) and _is_task(name):
                yield name, one


def _is_task(key: Any) -> bool:
    if not isinstance(key, str):
        return False
    last, whole = key.rpartition(".")[2].lower(), key.replace(".", "_").lower()
    return last in TASK_NAMES or whole in TASK_NAMES
