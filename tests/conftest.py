"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest
import torch

# Before anything imports Triton, which reads it then: without a GPU, kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real rollouts; missing data fails under CI and skips elsewhere."""
    folder = Path(os.environ.get("HARTS_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"no data at {folder}: set HARTS_DATA")
        pytest.skip(f"no data at {folder}: set HARTS_DATA")
    return folder


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
