"""Results that live as long as the tables they were made from."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

Key = ParamSpec("Key")
Result = TypeVar("Result")


def kept_with_table(
    build: Callable[Concatenate[Any, Key], Result],
) -> Callable[Concatenate[Any, Key], Result]:
    """Keeps what ``build(table, *key)`` returns, for the same table and key, as long as the table lives.

    Every layer of a model reads by the same tables. Tables are compared by identity; a result must not refer to its
    table, which would then never be freed.
    """
    results: WeakKeyDictionary[Any, dict[Hashable, Result]] = WeakKeyDictionary()

    @wraps(build)
    def kept(table: Any, *key: Key.args, **named: Key.kwargs) -> Result:
        of_table = results.setdefault(table, {})
        full_key = (*key, *named.items())
        if full_key not in of_table:
            of_table[full_key] = build(table, *key, **named)
        return of_table[full_key]

    return kept
