"""Links of all pages lead somewhere, and every page of docs/ is in the site."""

import re

import pytest
import yaml
from support.pages import PAGES, ROOT, name_of, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page):
    """What headings are called in links, as GitHub and the site have it."""
    names = [re.sub(r"[`*]|\[|\]\([^)]*\)", "", line.lstrip("#").strip()) for line in prose(page).splitlines() if
             line.startswith("#")]  # fmt: skip
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    """Files that are there, and headings that their pages have."""
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)}: {link}; there are {sorted(anchors(target))}"


def test_a_broken_link_is_found():
    """The check itself: headings with code, punctuation and capitals."""
    assert "what-is-refused-by-name" in anchors(ROOT / "docs" / "troubleshooting.md")
    assert "harts-verify-says-fail" in anchors(ROOT / "docs" / "troubleshooting.md")
    assert "no-such-heading" not in anchors(ROOT / "README.md")


def pages_of(nav):
    """Leaves of the site's navigation."""
    for entry in nav:
        for value in entry.values():
            yield from pages_of(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_site():
    """Each once; those that lie elsewhere by the names that docs/tools/build_site.py gives them."""
    nav = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(nav) == len(set(nav))
    assert {page.name for page in ROOT.glob("docs/*.md")} <= set(nav)
    source = (ROOT / "docs" / "tools" / "build_site.py").read_text()
    for page in set(nav) - {page.name for page in ROOT.glob("docs/*.md")}:
        assert f'"{page}"' in source, page


def test_index_names_every_page():
    """docs/index.md leads to all of docs/ for those who read it in a clone."""
    linked = {link.partition("#")[0] for link in LINK.findall(prose(ROOT / "docs" / "index.md"))}
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"} == {
        link for link in linked if "/" not in link
    }
