"""The architecture, kept by tests: imports point one way, and planning needs no torch."""

import ast
import functools
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import harts_hf
import harts_hf.rollouts

PACKAGE = Path(harts_hf.__file__).parent
# cli -> trainers, verify -> rollouts, runtime -> modeling -> kernels -> batch -> planner -> tree;
# errors and names are for all.
RANK = {
    "errors": 0,
    "names": 0,
    "tree": 1,
    "forest": 1.5,
    "planner": 2,
    "batch": 3,
    "kernels": 4,
    "modeling": 5,
    "runtime": 6,
    "rollouts": 6,
    "trainers": 7,
    "verify": 7,
    "bench": 7.5,
    "cli": 8,
}
NUMPY_ONLY = {"errors", "names", "tree", "forest", "planner"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(module: str) -> str | None:
    """The part of the package that a module name belongs to."""
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "harts_hf" and len(pieces) > 1 else None


@functools.cache
def imported_modules(path: Path, *, at_once: bool = False) -> set[str]:
    """Absolute names that a file imports anywhere in it, type-checking blocks included; or when it is imported."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("own", RANK)
def test_imports_point_one_way(own: str) -> None:
    """A part imports parts below it only; rollouts and runtime stand side by side, trainers and verify too."""
    paths = [path for path in FILES if path.relative_to(PACKAGE).parts[0].removesuffix(".py") == own]
    assert paths
    for path in paths:
        modules = imported_modules(path)
        for module in modules:
            other = part_of(module)
            if other in RANK and other != own:
                assert RANK[other] < RANK[own], f"{path} imports {module}"
        if own in NUMPY_ONLY:
            heavy = {module.split(".")[0] for module in modules} & {"torch", "transformers", "trl", "accelerate"}
            assert not heavy, f"{path} imports {heavy}"


def test_every_part_is_ranked() -> None:
    """A new folder has to take its place in the order."""
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert parts <= set(RANK)


@pytest.mark.parametrize(
    "code",
    [
        "import harts_hf; harts_hf.RolloutTree; harts_hf.plan_window; harts_hf.min_linear_calls",
        "from harts_hf.cli.main import main\ntry: main(['--help'])\nexcept SystemExit as e: assert not e.code",
        "import harts_hf.rollouts, harts_hf.rollouts.salvage",
    ],
    ids=["planning", "help", "rollouts"],
)
def test_needs_no_torch(code: str) -> None:
    """Planning and the command line's help start without torch (a fresh process)."""
    check = "\nimport sys\nassert not {'torch', 'transformers', 'trl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + check], check=True, capture_output=True)


def test_a_start_imports_no_drawing() -> None:
    """Matplotlib takes a tenth of a start: what imports it is imported when a picture is drawn, and by its like."""
    at_once = {path: imported_modules(path, at_once=True) for path in FILES}
    drawing = {path for path, names in at_once.items() if any(name.startswith("matplotlib") for name in names)}
    assert len(drawing) > 2
    names = {".".join(("harts_hf", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in drawing}
    assert not [str(path) for path, imported in at_once.items() if imported & names and path not in drawing]


@pytest.mark.parametrize("package", [harts_hf, harts_hf.rollouts], ids=lambda package: package.__name__)
def test_public_names(package) -> None:
    """Every name in __all__ resolves."""
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
    assert harts_hf.rollouts.AgentRolloutCollector.__module__.startswith("harts_hf.rollouts.gateway")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only")
def test_no_kernel_test_is_skipped() -> None:
    """Tests of Triton kernels are skipped where there is no Triton: where there can be, there must be."""
    assert find_spec("triton"), "expected triton, which the extra `test` installs"
