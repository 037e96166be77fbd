"""examples/shapes: what ships is what its README says, holds no text, and is what README's commands read."""

import gzip
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from shared_data import SHAPE_NAMES, SHAPES, shape_file, shape_trees
from support.pages import PAGES, ROOT, commands, name_of

from harts_hf.cli.main import main
from harts_hf.planner import min_linear_calls

KEYS = {"group", "parent", "length", "sample_node", "reward", "trained"}


def table_rows():
    """Cells of the table of sets in examples/shapes/README.md, by the set's name."""
    lines = (SHAPES / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[2:] for row in rows if row[0] in SHAPE_NAMES}


def test_every_file_has_its_row():
    """The table, the names used by tests and the files are the same sets."""
    assert set(table_rows()) == set(SHAPE_NAMES)
    assert {path.name for path in SHAPES.iterdir()} == {shape_file(name).name for name in SHAPE_NAMES} | {"README.md"}


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_table_is_true(name):
    """Every number of the table is that of the file."""
    trees = shape_trees(name)
    expanded, unique = (sum(getattr(tree, key) for tree in trees) for key in ("num_expanded_tokens", "num_tokens"))
    longest = max(int(tree.trajectory_lengths.max()) for tree in trees)
    calls = max(min_linear_calls(tree) for tree in trees)
    counts = (len(trees), sum(tree.num_trajectories for tree in trees), expanded, unique)
    ratio = f"{expanded / unique:.2f}"
    assert table_rows()[name] == [*(f"{count:,}" for count in counts), ratio, f"{longest:,}", str(calls)]


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_no_text(name):
    """Arrays of numbers and short names of groups, nothing else."""
    with gzip.open(shape_file(name), "rt") as lines:
        groups = [json.loads(line) for line in lines]
    for group in groups:
        assert set(group) <= KEYS
        assert len(group["group"]) <= 40 and re.fullmatch(r"[\w-]+|\('\w+', \d+\)", group["group"])
        spans = [end for spans in group["trained"] for span in spans for end in span]
        for values in (group["parent"], group["length"], group["sample_node"], spans):
            assert np.asarray(values).dtype == np.int64
        assert all(reward is None or isinstance(reward, float) for reward in group["reward"])


def plans(page):
    """The `harts plan` commands of a page that read a file of examples/, and no model of the reader's."""
    lines = [line for line in commands(page) if line.startswith("harts plan examples/") and "path/to/" not in line]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [page for page in PAGES if plans(page)], ids=name_of)
def test_commands_run(page, tmp_path, monkeypatch, capsys):
    """The commands that a reader copies work in a clone as they stand."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for arguments in plans(page):
        assert main(arguments) == 0, capsys.readouterr().err
        if "--plot" in arguments:
            assert Path(arguments[arguments.index("--plot") + 1]).stat().st_size > 10_000


def test_pages_have_commands():
    """Those that a reader opens first."""
    assert {"README.md", "docs/quickstart.md", "examples/shapes/README.md"} <= {name_of(p) for p in PAGES if plans(p)}
