"""Whose code a trainer's method is: what is left out where it is TRL's would be missed by a user's own."""

from typing import Any

# Decorators of PyTorch stand around methods of anybody.
_DECORATORS = "torch"


def is_from(method: Any, *packages: str) -> bool:
    """Whether all code of a method, and of what it is wrapped around, is of these packages.

    ``functools.wraps`` gives a wrapper the name and module of what it wraps, so these say nothing: looked at is where
    each function was defined.

    Args:
        method: a function or method; anything else is not known to be of a package.
        packages: names of top-level packages.
    """
    function = getattr(method, "__func__", method)
    while function is not None:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] not in (*packages, _DECORATORS):
            return False
        function = getattr(function, "__wrapped__", None)
        function = getattr(function, "__func__", function)
    return True
