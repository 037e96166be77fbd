"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest
import torch
from shared_data import data_folder

# Before anything imports Triton, which reads it then: without a GPU, kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real rollouts; missing data fails under CI and skips elsewhere."""
    return data_folder()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
