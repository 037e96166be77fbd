"""Docstrings as the site shows them: the roles of Sphinx, which editors and `help()` show well, become Markdown.

An extension of griffe, which mkdocs.yml names. ``:class:`~package.Name` `` becomes a link if docs/reference.md has the
object, or the class that it is a method of, and code otherwise. A paragraph that ends with two colons is followed by a
block of Python.
"""

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":([a-z]+):`([^`]+)`")
BLOCK = re.compile(r"::\n\n((?: {4,}.*\n|\n)*(?: {4,}.*(?:\n|$)))", re.MULTILINE)
REFERENCE = Path(__file__).parents[1] / "reference.md"


def places() -> dict[str, str]:
    """What docs/reference.md shows, by the last part of its name."""
    named = re.findall(r"^::: (\S+)", REFERENCE.read_text(), re.MULTILINE)
    return {name.rpartition(".")[2]: name for name in named}


def markdown(text: str, within: str, shown: dict[str, str]) -> str:
    """A docstring in Markdown.

    Args:
        text: the docstring, its indentation taken off.
        within: the full name of the class that it is of, or whose method it is of; "" for none.
        shown: as :func:`places` gives it.
    """

    def role(match: re.Match[str]) -> str:
        kind, target = match.groups()
        name = target.removeprefix("~")
        called = name.rpartition(".")[2] if target.startswith("~") else name.removeprefix("harts_hf.")
        before, _, last = name.rpartition(".")
        owner = before.rpartition(".")[2]
        if last in shown:
            return f"[`{called}`][{shown[last]}]"
        if owner in shown:
            return f"[`{called}`][{shown[owner]}]"
        member = kind in ("meth", "attr") and not before and within in shown.values()
        return f"[`{called}`][{within}]" if member else f"`{called}`"

    def block(match: re.Match[str]) -> str:
        return f":\n\n```python\n{textwrap.dedent(match.group(1)).strip()}\n```\n"

    return BLOCK.sub(block, ROLE.sub(role, text))


class Docstrings(griffe.Extension):
    """Changes docstrings as they are read."""

    def __init__(self) -> None:
        self._shown = places()

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """See griffe: whatever was found in the source, before anything reads its docstring."""
        if obj.docstring is not None:
            owner = obj if obj.is_class else obj.parent
            within = owner.path if owner is not None and owner.is_class else ""
            obj.docstring.value = markdown(obj.docstring.value, within, self._shown)
