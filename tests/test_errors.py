"""Modules of extras that are missing."""

import importlib.metadata
import tomllib
from pathlib import Path

from harts_hf.errors import _EXTRAS, missing_extra

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


def test_a_missing_module_is_named_with_its_extra():
    """A submodule, a distribution that Transformers asks for, a module of somebody else's."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert set(_EXTRAS.values()) <= set(extras)
    error = missing_extra(ModuleNotFoundError("No module named 'starlette.routing'", name="starlette.routing"))
    assert str(error).endswith('of the extra agents: in the clone, pip install -e ".[agents]"')
    sentence = "The 'deepspeed>=0.9.3' distribution was not found and is required by this application."
    assert "the extra deepspeed" in str(missing_extra(importlib.metadata.PackageNotFoundError(sentence)))
    assert missing_extra(ModuleNotFoundError("No module named 'my_judge'", name="my_judge")) is None
