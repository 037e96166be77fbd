"""Pages that say what the code has: metrics, error messages, configuration, API. Each is whole, and nothing else."""

import ast
import importlib
import re
import runpy
from typing import get_args

import pytest
from support.pages import ROOT

import harts_hf
from harts_hf import rollouts
from harts_hf.rollouts.environments.failures import FAILURE_KINDS
from harts_hf.rollouts.gateway.agents import FailureKind
from harts_hf.trainers.skipping import OTHER_LOG_PROBS

PACKAGE = ROOT / "harts_hf"
METRICS = ROOT / "docs" / "metrics.md"
# Names in tree_metrics that are taken out again before it returns.
INTERNAL = {"seconds", "slowest"}


def functions(path, *names):
    """Functions of a module, by name."""
    found = [node for node in ast.walk(ast.parse((PACKAGE / path).read_text())) if isinstance(node, ast.FunctionDef)]
    return [node for node in found if node.name in names]


def keys_of(node):
    """Texts that are keys of dictionaries in a function: of displays, and of assignments by subscript."""
    for inner in ast.walk(node):
        keys = []
        if isinstance(inner, ast.Dict):
            keys = inner.keys
        elif isinstance(inner, ast.Assign):
            keys = [target.slice for target in inner.targets if isinstance(target, ast.Subscript)]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def tree_metrics_of_the_code():
    """Names below `tree/`."""
    names = {key for node in functions("trainers/metrics.py", "tree_metrics") for key in keys_of(node)} - INTERNAL
    for path, function in (
        ("expert_load", "note"),
        ("routing_replay", "routing_metrics"),
        ("fitting", "metrics"),
        ("old_logprobs", "metrics"),
    ):
        names |= {key for node in functions(f"trainers/{path}.py", function) for key in keys_of(node)}
    runtime = "\n".join(path.read_text() for path in sorted((PACKAGE / "runtime").glob("*.py")))
    seconds = re.findall(r'seconds\["(\w+)"\]', runtime)
    for display in re.findall(r"seconds = \{(.*)\}", runtime):
        seconds += re.findall(r'"(\w+)":', display)
    return names | {f"{name}_seconds" for name in {*seconds, "planning"}}


def test_tree_metrics():
    """Every `tree/*` of the code has its row, and every row is one of the code's."""
    rows = set(re.findall(r"^\| `tree/(\w+)` \|", METRICS.read_text(), re.MULTILINE))
    assert rows == tree_metrics_of_the_code()


def test_reasons_to_score():
    """What `tree/scoring_needed_by/` may be followed by."""
    named = set(re.findall(r'"(\w+)"', ast.unparse(functions("trainers/skipping.py", "reason_to_score")[0])))
    # Attributes of trainers are read by name there, too.
    reasons = {*OTHER_LOG_PROBS, "custom_loss"} | {
        element.elts[0].value
        for element in ast.walk(functions("trainers/skipping.py", "reason_to_score")[0])
        if isinstance(element, ast.Tuple) and len(element.elts) == 2 and isinstance(element.elts[0], ast.Constant)
    }
    table = METRICS.read_text().partition("### Why scoring was needed")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`(?=[^|]*\|[^|]*\|$)", table, re.MULTILINE)) == reasons, named


@pytest.mark.parametrize("prefix", ["agent", "environment"])
def test_metrics_of_collectors(prefix):
    """Every `agent/*` and `environment/*` that the package writes out stands on the page."""
    text = METRICS.read_text().replace("`.../", f"`{prefix}/failed/")
    source = "\n".join(path.read_text() for path in (PACKAGE / "rollouts").rglob("*.py"))
    names = set(re.findall(rf'"({prefix}/[a-z_/]+)"', source))
    kinds = FAILURE_KINDS if prefix == "environment" else get_args(FailureKind)
    names |= {f"{prefix}/failed/{kind}" for kind in kinds}
    assert len(names) > 4
    assert not [name for name in names if f"`{name}`" not in text]


def messages():
    """All texts of the package, those with fields in them with a gap for each."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(parts))
    return found


# How the first column of a table begins where it quotes a message of this package.
BEGINNINGS = ("expected", "has no", "linear", "computes", "unknown", "keys", "this window", "processes", "accelerate",
              "throughout", "bf16", "an uncompiled", "Here", "rows of", "messages")  # fmt: skip


def test_messages_of_troubleshooting():
    """Each message in the first column of a table, `...` standing for fields, is one that the code has."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## It runs, but")[0]
    cells = re.findall(r"^\| `([^`|]*)`", text, re.MULTILINE)
    quoted = [cell for cell in cells if cell.startswith(BEGINNINGS)]
    assert len(quoted) > 35
    known = messages()
    patterns = {one: ".*?".join(re.escape(part) for part in one.split("...")) for one in quoted}
    missing = [one for one, pattern in patterns.items() if not any(re.search(pattern, text, re.S) for text in known)]
    assert not missing


def test_configuration_page():
    """docs/configuration.md is what the code says; `make docs-pages` writes it."""
    tool = runpy.run_path(str(ROOT / "docs" / "tools" / "configuration.py"))
    assert tool["page"]() == tool["PAGE"].read_text()


def test_api_page():
    """What docs/reference.md names exists and has a docstring; every public name of the package is there."""
    named = re.findall(r"^::: (\S+)", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    for name in named:
        module, _, attribute = name.rpartition(".")
        parent = importlib.import_module(module)
        assert (getattr(parent, attribute).__doc__ or "").strip(), name
    # Configurations and errors are on the page as modules and on docs/configuration.md.
    public = {name for name in {*harts_hf.__all__, *rollouts.__all__} if not name.endswith(("Config", "Error"))}
    missing = public - {name.rpartition(".")[2] for name in named}
    assert not missing, f"expected lines `::: harts_hf.NAME` in docs/reference.md for {sorted(missing)}"
