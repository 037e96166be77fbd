"""The pages of the documentation, and what stands in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(page):
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page, kind):
    """The blocks of code of one kind, in order."""
    return [text for found, text in BLOCK.findall(Path(page).read_text()) if found == kind]


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"^( *)```.*?^ *```", "", Path(page).read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page):
    """Lines of the blocks that are for a shell, continued lines joined, comments and prompts left out."""
    lines = []
    for text in [*blocks(page, "bash"), *blocks(page, "text"), *blocks(page, "")]:
        lines += re.sub(r"\\\n\s*", "", text).splitlines()
    lines = [line.removeprefix("$ ") for line in lines if line.strip() and not line.startswith("#")]
    return [line.split(" #")[0].strip() for line in lines]
