"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest
import torch


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
