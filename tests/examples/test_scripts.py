"""Every script of examples/ runs on the tiny model, and shares; the notebook too.

On two processes one of them runs in tests/newcomer.
"""

import importlib
import json
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
from support.pages import ROOT

from harts_hf.cli.main import main

EXAMPLES = ROOT / "examples"
TRACES = str(EXAMPLES / "traces.jsonl")
# Those that leave a trainer, with what its steps must share at least, by the shape of their rollouts.
TRAINED = {
    "grpo": ([], 1.5),  # two rows of a rollout share the question and, mostly, the answer
    "agent_by_url": ([], 1.3),
    "two_processes": ([], 1.5),  # leaves of 4 x 2
    "lora": ([], 1.5),
    "ppo": ([], 1.5),
    "recorded": ([TRACES, "task"], 4),  # turns of a conversation, each with its history
    "sft_on_traces": ([TRACES, "task"], 2),
}
# What is for the script's author to know: its own function is one of TRL's experimental features.
TOLD = {"grpo": "You are using 'rollout_func', which is an experimental feature."}
OTHERS = {"tiny", "digit", "arguments", "own_loss", "new_family"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder that `python examples/tiny.py tiny` makes."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    runpy.run_path(str(EXAMPLES / "tiny.py"))["save_tiny"](folder)
    return str(folder)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script as `python examples/NAME.py ARGUMENTS` does, but in this process; returns its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def started(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return started


def test_every_script_is_tested():
    """And stands in examples/README.md."""
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == set(TRAINED) | OTHERS
    named = set(re.findall(r"`(\w+)\.py`", (EXAMPLES / "README.md").read_text()))
    assert named == scripts


@pytest.mark.parametrize("name", [*TRAINED, "own_loss", "tiny"])
def test_usage(name, run):
    """Without arguments a script says in a line what it takes; and so that there is no such model."""
    with pytest.raises(SystemExit, match=rf"^usage: python examples/{name}\.py [^\n]+$"):
        run(name)
    if name != "tiny":
        with pytest.raises(SystemExit, match=r"^expected MODEL to be a model's folder or name, got 'nothere'"):
            run(name, "nothere", *TRAINED.get(name, ([],))[0])


@pytest.mark.parametrize(("name", "module", "extra"), [("lora", "peft", "peft"), ("agent_by_url", "openai", "agents")])
def test_scripts_name_their_extra(name, module, extra, run, monkeypatch):
    """Where it is not installed, in a line instead of a traceback."""
    importlib.import_module("harts_hf.cli.train")  # TRL's trainers look for PEFT once, when they are imported
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=rf'pip install -e "\.\[{extra}\]"'):
        run(name, "tiny")


@pytest.mark.essential("grpo", "recorded")
@pytest.mark.parametrize("name", TRAINED)
def test_script(name, tiny, run, capsys):
    """It trains: finite losses, shared tokens, no warnings of others; the adapter's run saves an adapter."""
    arguments, ratio = TRAINED[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = run(name, tiny, *arguments)["trainer"]
    told = {str(one.message) for one in seen if not str(one.message).startswith(TOLD.get(name, "nothing"))}
    assert not told, told
    logs = [entry for entry in trainer.state.log_history if "loss" in entry or "policy_loss" in entry]
    assert logs and all(abs(entry.get("loss", 0.0)) < 100 for entry in logs)
    assert sum(entry["tree/sharing_ratio"] for entry in logs) / len(logs) > ratio
    assert any(entry["grad_norm"] > 0 for entry in logs)
    if name == "recorded":
        assert capsys.readouterr().out.split("\n")[0] in (ROOT / "docs" / "quickstart.md").read_text()
    if name == "lora":
        assert json.loads((Path(trainer.args.output_dir) / "adapter_config.json").read_text())["r"] == 8


@pytest.mark.exhaustive
def test_first_verdict(tiny, capsys):
    """README's third command, with the last line that the quick start shows."""
    assert main(["verify", "--model", tiny, TRACES]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("PASS") and verdict in (ROOT / "docs" / "quickstart.md").read_text().splitlines()


def test_own_loss(tiny, run, capsys):
    """The loss falls in every step."""
    run("own_loss", tiny)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)


def test_notebook(run, monkeypatch, tmp_path):
    """Its cells run in order, in one interpreter; the log-probs that it compares are equal."""
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    (tmp_path / "examples").symlink_to(EXAMPLES)
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "outputs are left out of the repository"
            exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), names)
    assert names["worst"] < 1e-5
    assert len(names["trainer"].state.log_history) == 4
