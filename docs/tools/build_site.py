"""Builds the documentation's site into site/: `make docs`. Nothing is fetched.

Pages lie where their links work in a clone (docs/, README.md, CONTRIBUTING.md, ...). For the site they are laid side
by side in build/docs, and links follow; a link to a file that is no page (a script, a recipe) becomes its text.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build" / "docs"
PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "examples/shapes/README.md": "shapes.md",
    "benchmarks/gpu/README.md": "gpu-benchmarks.md",
}
# A role of Sphinx that docs/tools/docstrings.py has left.
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?:<code>|`)")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def sources() -> dict[str, str]:
    """Where each page and picture lies in the site, by its path in the repository."""
    found = {str(path.relative_to(ROOT)): path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    pictures = [*(ROOT / "docs" / "images").iterdir(), *(ROOT / "benchmarks" / "results").glob("*.png")]
    found |= {str(path.relative_to(ROOT)): f"images/{path.name}" for path in sorted(pictures)}
    return {**found, **{name: page for name, page in PAGES.items() if (ROOT / name).is_file()}}


def relinked(text: str, source: str, places: dict[str, str]) -> str:
    """A page's text with its links as they are in the site."""

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.group(1), match.group(2), match.group(3), match.group(4) or ""
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        place = places.get(os.path.normpath(os.path.join(os.path.dirname(source), target)))
        return words if place is None else f"{picture}[{words}]({place}{anchor})"

    # Not in blocks of code.
    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def stage() -> None:
    """Lays the pages out."""
    shutil.rmtree(STAGE, ignore_errors=True)
    (STAGE / "images").mkdir(parents=True)
    places = sources()
    for source, place in places.items():
        path = ROOT / source
        if path.suffix == ".md":
            (STAGE / place).write_text(relinked(path.read_text(), source, places))
        else:
            shutil.copyfile(path, STAGE / place)


def main() -> int:
    """The command line; the exit status is the builder's, which fails at a link that leads nowhere, or 1."""
    stage()
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--clean", "--strict"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    raw = [path for path in sorted((ROOT / "site").rglob("*.html")) if ROLE.search(path.read_text())]
    for path in raw:
        print(f"expected links and code, got roles of Sphinx as text: {path.relative_to(ROOT)}", file=sys.stderr)
    return status or int(bool(raw))


if __name__ == "__main__":
    sys.exit(main())
