"""Errors and warnings that the package raises on bad input."""


class UnsupportedModelError(ValueError):
    """A model, setting or library version that tree training would compute wrongly; the message names it."""


class RolloutFileError(ValueError):
    """A rollout file that cannot be read; the message names the file and the line."""


class AllFailedError(RuntimeError):
    """Every episode of a collection failed: nothing can be learned from it, and nothing will come of another.

    The log has the traceback of the first failure of each kind.
    """


class HartsWarning(UserWarning):
    """Something legal that costs sharing, memory or speed, or input that is left aside; never a wrong result."""
