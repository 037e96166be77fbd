"""`harts train` with agents: where rollouts come from, and a run whose tree is of an agent's samples."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from support.multimodal import multimodal_checkpoint

from harts_hf.cli.main import main as harts
from harts_hf.rollouts.agents.shelf import ShelfAgent

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny_agent.yaml")
SMALL = ["--num_generations", "4", "--per_device_train_batch_size", "8", "--logging_steps", "1"]


@pytest.fixture(autouse=True)
def _process_settings(monkeypatch):
    """What a recipe sets for its process is undone afterwards."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent", ""], "expected no agent_kwargs without agent, got {'num_items': 3"),
        (["--environment", "a:b"], "at most, got environment and agent"),
        (["--agent_command", "ls"], "got agent and agent_command"),
        (["--branching", "4", "2"], "expected no branching beside agent, got [4, 2]"),
        (["--environment_kwargs", '{"a": 1}'], "expected no environment_kwargs beside agent, got {'a': 1}"),
        (
            ["--agent", "harts_hf.rollouts.gateway:Agent"],
            "expected harts_hf.rollouts.gateway:Agent to define run, got",
        ),
        (["--agent_kwargs.mood", "good"], "agent_kwargs do not fit harts_hf.rollouts.agents.shelf:ShelfAgent"),
        (["--agent_kwargs.num_items", "99"], "expected num_items in"),
        (["--agent", "os.path:basename", "--agent_kwargs", "{}"], "expected an agent that takes a task, base_url and"),
        (["--agent", "json:nothing"], "expected agent to be the dotted path of a function, or a subclass of Agent"),
        (["--agent_timeout", "0"], "expected a timeout above 0, got 0.0"),
        (["--agent_concurrency", "0"], "expected max_concurrent of at least 1, got 0"),
        (["--agent", "", "--agent_kwargs", "{}", "--agent_command", "ls"], "CommandAgent has no tokenizer of its own"),
    ],
)
def test_settings_that_contradict_are_refused(arguments, message, tmp_path, capsys):
    """Before anything is built; exit status 2."""
    assert harts(["train", TINY, *arguments, "--output_dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_template_that_nobody_parses_is_refused_before_anything_is_sampled(tmp_path, capsys, monkeypatch):
    """By a dry run, and where the trainer is made; an agent that brings its own format has no need of a known one."""
    (tmp_path / "an_agent.py").write_text("def play(task, *, base_url, api_key):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    multimodal_checkpoint("qwen3_5", tmp_path / "model")
    ShelfAgent().tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "any"}\n')
    arguments = [
        "train", TINY, "--model_type", "", "--model_config", "{}", "--model_name_or_path", str(tmp_path / "model"),
        "--agent", "an_agent:play", "--agent_kwargs", "{}", "--dataset_name", str(tmp_path / "tasks.jsonl"),
        "--output_dir", str(tmp_path / "out"),
    ]  # fmt: skip
    for more, status in (["--dry-run"], 1), ([], 2):
        assert harts([*arguments, *more]) == status
        output = capsys.readouterr()
        assert "expected a chat template whose answers TRL can parse" in " ".join((output.out + output.err).split())


@pytest.mark.parametrize(
    ("missing", "options", "needs"),
    [
        ("uvicorn", [], "an agent by URL needs uvicorn, of the extra agents"),
        ("openai", [], "openai is not installed, of the extra agents"),
        ("peft", ["--use_peft", "true"], "use_peft needs peft, of the extra peft"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(missing, options, needs, tmp_path, capsys, monkeypatch):
    """The web server, the recipe's client and adapters are no dependencies of those who train on environments."""
    importlib.import_module("harts_hf.cli.train")  # TRL's trainers look for PEFT once, when they are imported
    for name in list(sys.modules):
        if name.startswith(("harts_hf.rollouts.gateway", "harts_hf.rollouts.agents")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("harts_hf.cli.train_arguments.find_spec", lambda name: None if name == missing else True)
    for more in ([], ["--dry-run"]):
        assert harts(["train", TINY, "--output_dir", str(tmp_path), *options, *more]) in (1, 2)
        said = capsys.readouterr()
        said = " ".join((said.out + said.err).split())
        assert f'{needs}: in the clone, pip install -e ".[' in said and "Traceback" not in said


def test_an_agents_samples_are_trained(tmp_path):
    """Two steps: several samples an episode, joined again by the tree; metrics of the agent; a picture."""
    assert harts(["train", TINY, *SMALL, "--max_steps", "2", "--output_dir", str(tmp_path)]) == 0
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(entries) == 2
    for entry in entries:
        assert entry["agent/turns"] > 2 and entry["agent/failed"] == 0
        assert entry["completions/samples_per_episode"] > 1.5
        assert entry["tree/sharing_ratio"] > 1.2 and entry["tree/forward_tokens"] < entry["tree/expanded_tokens"]
        rows = entry["completions/samples_per_episode"] * 8
        assert entry["agent/histories/forked"] == rows - 8
    assert (tmp_path / "tree.png").stat().st_size > 1000
