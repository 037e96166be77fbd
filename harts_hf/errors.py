"""Errors and warnings that the package raises on bad input."""


class UnsupportedModelError(ValueError):
    """A model, setting or library version that tree training would compute wrongly; the message names it."""


class RolloutFileError(ValueError):
    """A rollout file that cannot be read; the message names the file and the line."""


class AllFailedError(RuntimeError):
    """Every episode of a collection failed: nothing can be learned from it, and nothing will come of another.

    The log has the traceback of the first failure of each kind.
    """


# What comes with which extra of pyproject.toml.
_EXTRAS = {
    "openai": "agents",
    "starlette": "agents",
    "uvicorn": "agents",
    "peft": "peft",
    "minigrid": "environments",
    "gymnasium": "environments",
    "textarena": "environments",
    "deepspeed": "deepspeed",
    "fla": "gpu",
    "triton": "gpu",
}


class MissingExtraError(ImportError):
    """Something that needs an extra which is not installed.

    Args:
        what: needs it, in the singular; None for the module itself.
        module: that is not there, one of an extra of this package.
    """

    def __init__(self, what: str | None, module: str) -> None:
        extra = _EXTRAS[module]
        needs = f"{what} needs {module}" if what else f"{module} is not installed"
        super().__init__(f'{needs}, of the extra {extra}: in the clone, pip install -e ".[{extra}]"', name=module)


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The same error with what to install; None for a module that comes with no extra."""
    # Of a distribution that Transformers did not find the name is a sentence.
    words = (error.name or "").replace(".", " ").replace("'", " ").replace(">", " ").split()
    module = next((word for word in words if word in _EXTRAS), None)
    return None if module is None else MissingExtraError(None, module)


class HartsWarning(UserWarning):
    """Something legal that costs sharing, memory or speed, or input that is left aside; never a wrong result."""
