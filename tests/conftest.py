"""Fixtures for all tests."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Before anything imports Triton, which reads it then: without a GPU, kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# CI must not depend on the luck of a draw or on how busy the machine is; `--hypothesis-profile explore` draws anew.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
