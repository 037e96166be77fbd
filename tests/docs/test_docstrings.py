"""The API pages of the site: docstrings become Markdown, and none of Sphinx's marks is left to be read as text."""

import ast
import runpy

import pytest
import yaml
from support.pages import ROOT

TOOL = ROOT / "docs" / "tools" / "docstrings.py"
TREE = "harts_hf.tree.RolloutTree"


@pytest.fixture(scope="module")
def tool():
    """The extension's names."""
    pytest.importorskip("griffe")
    return runpy.run_path(str(TOOL))


def test_no_mark_is_left(tool):
    """In any docstring of the package: neither roles nor blocks that two colons announce."""
    texts = []
    for path in sorted((ROOT / "harts_hf").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                texts.append(ast.get_docstring(node) or "")
    marked = [text for text in texts if tool["ROLE"].search(text) or "::\n" in text]
    assert len(marked) > 100
    shown = tool["places"]()
    changed = [tool["markdown"](text, "", shown) for text in marked]
    assert not [text for text in changed if tool["ROLE"].search(text) or "::\n" in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":class:`~harts_hf.RolloutTree`", f"[`RolloutTree`][{TREE}]"),
        ("(:func:`harts_hf.patch`)", "(`patch`)"),  # not among those given as shown
        (":meth:`harts_hf.RolloutTree.digest`", f"[`RolloutTree.digest`][{TREE}]"),
        (":meth:`digest` or :func:`digest`", f"[`digest`][{TREE}] or `digest`"),  # a member, and a function
        ("So::\n\n    f(\n        1)\n\n    g()\n\nThen.", "So:\n\n```python\nf(\n    1)\n\ng()\n```\n\nThen."),
        ("Example::\n\n    f()", "Example:\n\n```python\nf()\n```\n"),
    ],
)
def test_markdown(tool, text, expected):
    """Links to what the page shows, code for all else; blocks lose their indentation."""
    assert tool["markdown"](text, TREE, {"RolloutTree": TREE}) == expected


def test_the_site_uses_it():
    """mkdocs.yml names the extension, and it changes what griffe reads."""
    griffe = pytest.importorskip("griffe")
    (handler,) = [entry["mkdocstrings"] for entry in
                  yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"] if "mkdocstrings" in entry]  # fmt: skip
    names = handler["handlers"]["python"]["options"]["extensions"]
    extensions = griffe.load_extensions(*(str(ROOT / name) for name in names))
    code = {"__init__.py": '"""A :class:`harts_hf.RolloutTree`."""\nclass A:\n    """As :meth:`B.f` does."""\n'}
    with griffe.temporary_visited_package("shown", code, extensions=extensions) as package:
        assert package.docstring.value == f"A [`RolloutTree`][{TREE}]."
        assert package["A"].docstring.value == "As `B.f` does."
