"""Functions of a test that count as another package's."""

from types import FunctionType


def as_of(module: str, function: FunctionType) -> FunctionType:
    """The same function, defined in a module of that name."""
    names = {**function.__globals__, "__name__": module}
    found = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    found.__module__ = module
    return found
