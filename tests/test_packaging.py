"""What is shipped, and the notices that users do not get."""

import os
import subprocess
import sys
import tarfile

import pytest
from support.launching import write_python
from support.pages import ROOT

# In a fresh process; the variable is TRL's switch, which must not be needed.
QUIET = {key: value for key, value in os.environ.items() if key != "TRL_EXPERIMENTAL_SILENCE"}


def run(code, python=sys.executable, **options):
    """What an interpreter printed on stderr."""
    command = [python, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=QUIET, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.exhaustive
def test_source_distribution(tmp_path):
    """It holds what README's commands need, and no part of the tests."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    source = tmp_path / "source"
    for name in files:
        if name.split("/")[0] not in ("tests", "benchmarks", ".ci"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    (source / "tests").mkdir()
    (source / "tests" / "test_something.py").touch()
    build = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    run(build, cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    needed = {
        name for name in files if name.startswith(("harts_hf/", "examples/", "recipes/", "docs/")) or "/" not in name
    }
    assert needed - held <= {".gitignore"}
    assert not [name for name in held if name.startswith("tests/")]


FIRST_IMPORTS = """
import sys, warnings
for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
    del sys.modules[name]
warnings.simplefilter("always")
sys.modules["starlette"] = sys.modules["uvicorn"] = None
# First: collectors import a part of TRL that imports its experimental part, and says nothing.
from harts_hf import TreeGRPOTrainer, TreePPOTrainer, TreeRLOOTrainer, TreeSFTTrainer
from harts_hf.rollouts import *
from harts_hf.rollouts import Environment, StepResult
TreeRolloutCollector, environment_reward
try: from harts_hf.rollouts import AgentRolloutCollector
except ImportError: pass
else: assert False
print("the experimental part", file=sys.stderr)
from harts_hf import TreeGMPOTrainer
"""


@pytest.mark.exhaustive
def test_first_imports(tmp_path):
    """Environments do without the web server of agents, and whoever imports the trainers is told nothing about TRL's
    experimental part, which only GMPO needs."""
    said = run(FIRST_IMPORTS, write_python(tmp_path / "python", "packages"))
    assert "xperimental" not in said.partition("the experimental part")[0] and "the experimental part" in said


def test_collectors_are_no_experiment(monkeypatch):
    """TRL's switch is thrown for collectors of this package alone, and only while a trainer is made."""
    from harts_hf.rollouts import NoForks
    from harts_hf.trainers.experimental import own_collectors

    monkeypatch.delenv("TRL_EXPERIMENTAL_SILENCE", raising=False)
    for function, is_on in ((NoForks(), True), (print, False), (None, False)):
        with own_collectors(function):
            assert ("TRL_EXPERIMENTAL_SILENCE" in os.environ) == is_on
        assert "TRL_EXPERIMENTAL_SILENCE" not in os.environ
