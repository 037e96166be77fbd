"""Code of all pages: it compiles, its names exist, its recipes parse, its commands have the options that they use.

What can run is run: `test_blocks_run.py` has the list of all Python blocks, and says of each where.
"""

import ast
import dataclasses
import importlib.util
import re
import shlex
import tomllib

import pytest
import yaml
from support.pages import PAGES, ROOT, blocks, commands, name_of
from support.trainer_runs import run_trainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.cli.main import main as harts
from harts_hf.cli.train_arguments import PolicyArguments, TrainArguments
from harts_hf.cli.trainer_kinds import TRAINERS
from harts_hf.modeling.families import FAMILIES

COMMANDS = ("plan", "verify", "train", "bench")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_names_exist(page):
    """Every Python block compiles, and what it imports of this package is there."""
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "harts_hf":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{name_of(page)}: {node.module}.{alias.name}"


def test_readme_ends_as_the_example():
    """README's script is the end of examples/grpo.py (which tests/examples runs)."""
    script = (ROOT / "examples" / "grpo.py").read_text().rstrip()
    (shown,) = [block for block in blocks(ROOT / "README.md", "python") if "trainer.train()" in block]
    assert script.endswith("\n" + shown.rstrip())


def recipes():
    """YAML blocks that are recipes: those that name an output folder."""
    found = [(page, block) for page in PAGES for block in blocks(page, "yaml") if "output_dir:" in block]
    return [pytest.param(block, id=f"{name_of(page)}-{number}") for number, (page, block) in enumerate(found)]


def fields_of(trainer):
    """Keys that a recipe of a trainer may have."""
    kinds = (TrainArguments, TRAINERS[trainer].config, PolicyArguments)
    return {field.name for kind in kinds for field in dataclasses.fields(kind)} | {"env"}


@pytest.mark.parametrize("recipe", recipes())
def test_recipes_have_known_keys(recipe):
    """Every key is one that `harts train` knows."""
    keys = yaml.safe_load(recipe)
    assert not set(keys) - fields_of(keys.get("trainer", "grpo"))


def harts_commands():
    """Commands of all pages that start `harts`, or `-m harts_hf.cli`."""
    found = {}
    for page in PAGES:
        for line in filter(re.compile(r"(harts|-m harts_hf\.cli) [a-z]").search, commands(page)):
            words = shlex.split(line.replace("-m harts_hf.cli ", "; harts "), comments=True)
            for start in [number for number, word in enumerate(words) if word == "harts"]:
                rest = words[start + 1 :]
                if rest and rest[0] in COMMANDS:
                    found[f"{name_of(page)}: {' '.join(rest)}"] = rest
    return [pytest.param(words, id=name) for name, words in found.items()]


@pytest.mark.parametrize("words", harts_commands())
def test_commands_have_their_options(words, capsys):
    """Options exist; files of this repository that are named are there."""
    name, *rest = words
    if name == "train":
        known = {f"--{field}" for trainer in TRAINERS for field in fields_of(trainer)} | {"--dry-run", "--help"}
    else:
        with pytest.raises(SystemExit):
            harts([name, "--help"])
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    used = {word.split("=")[0].split(".")[0].strip("[],") for word in rest if word.startswith(("--", "[--"))}
    assert used - {"--field"} <= known, used - known
    for word in rest:
        if word.startswith(("recipes/", "examples/")) and "*" not in word:
            assert (ROOT / word).exists(), word


def test_scripts_that_are_named_exist():
    """`python examples/...`, modules of the benchmarks, extras of `pip install`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for line in commands(page):
            for module in re.findall(r"-m (benchmarks[\w.]*)", line):
                assert importlib.util.find_spec(module), f"{name_of(page)}: {module}"
            for names in re.findall(r"pip install.*(?:\.|harts_hf)\[([\w,]+)\]", line):
                assert set(names.split(",")) <= set(extras), f"{name_of(page)}: {names}"
            for path in re.findall(r"(?:python|--config_file|nproc_per_node \d+) ((?:examples|recipes)/\S+)", line):
                assert (ROOT / path).exists(), f"{name_of(page)}: {path}"


def test_the_script_of_ppo(tmp_path, monkeypatch):
    """docs/ppo.md: its first block trains, in two epochs of two minibatches."""
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(blocks(ROOT / "docs" / "ppo.md", "python")[0], names)
    logs = [entry for entry in names["trainer"].state.log_history if "value_loss" in entry]
    assert len(logs) == 4 and names["trainer"].args.num_minibatches == 2
    assert all(entry["tree/sharing_ratio"] > 1 and entry["trained_tokens"] > 0 for entry in logs)


def test_the_trainer_of_custom_trainers(tmp_path):
    """docs/custom-trainers.md: its class trains, and its loss is what was changed."""
    names = {"__name__": "my_trainer"}
    (block,) = blocks(ROOT / "docs" / "custom-trainers.md", "python")
    exec(block, names)
    options = {"max_steps": 1, "tree_sharing": "always"}
    _, changed, _ = run_trainer(names["MaxEntropy"], TreeGRPOConfig, tmp_path / "changed", **options)
    _, stock, _ = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "stock", **options)
    assert changed[0]["tree/scoring_needed_by/custom_loss"] == 1
    assert changed[0]["loss"] < stock[0]["loss"] - 0.01


def test_the_entry_of_model_families(monkeypatch):
    """docs/model-families.md: the entry is one, and counts until the process ends."""
    monkeypatch.setattr("harts_hf.modeling.families.FAMILIES", dict(FAMILIES))
    exec(blocks(ROOT / "docs" / "model-families.md", "python")[0], {})
    from harts_hf.modeling import families

    assert families.FAMILIES["my_hybrid"].module_name == "my_hybrid.modeling_my_hybrid"
    assert "my_hybrid" not in FAMILIES
