"""Fixtures for all tests."""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports huggingface_hub, which reads it then: nothing is fetched, and a name that is no folder is
# refused at once, not after the 45 seconds of a hub that does not answer.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# CI must not depend on the luck of a draw or on how busy the machine is; `--hypothesis-profile explore` draws anew.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False, print_blob=True)
settings.load_profile("repeatable")


# What `make test-fast` keeps of tests that run once per family: `support.models.OF_EACH_KIND`.
FAST_FAMILIES = ("bailing_hybrid", "qwen3_5_text")


def pytest_configure(config: pytest.Config) -> None:
    """One server of forks for all workers, which are its first (support/launching.py)."""
    if hasattr(config, "workerinput"):
        sys.executable = os.environ["HARTS_TESTS_PYTHON"]  # what tests start is no fork unless they say so
        return
    folder = os.environ["HARTS_TESTS_FORK_FOLDER"] = tempfile.mkdtemp(prefix="forks")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if tx := getattr(config.option, "tx", None):  # of xdist: how each worker is started
        from support.launching import write_python

        os.environ["HARTS_TESTS_PYTHON"] = sys.executable
        python = write_python(Path(folder) / "python", "packages")
        config.option.tx = [f"popen//python={python}" if one == "popen" else one for one in tx]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the first file is imported; the process that only hands out tests starts without torch."""
    if session.config.pluginmanager.hasplugin("dsession"):
        return
    import torch

    # Before anything imports Triton, which reads it then: without a GPU, kernels run in Triton's interpreter.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from support.quicker import make_trainings_quicker

    make_trainings_quicker()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks further parameters as exhaustive: those that `essential` does not name, and further families."""
    named, found = set(), set()
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None:
            continue
        test = item.nodeid.removesuffix(f"[{callspec.id}]")
        found.add((test, callspec.id))
        if essential := item.get_closest_marker("essential"):
            named |= {(test, name) for name in essential.args}
            further = callspec.id not in essential.args
        else:
            further = callspec.params.get("family", FAST_FAMILIES[0]) not in FAST_FAMILIES
        if further:
            item.add_marker("exhaustive")
    # A name that no parameters have any more must not make `make test-fast` smaller in silence.
    if (unknown := named - found) and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"expected essential parameters that exist, got {sorted(unknown)}")


def pytest_collection_finish() -> None:
    """What is imported stays: no collection has to look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
