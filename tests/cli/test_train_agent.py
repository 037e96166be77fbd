"""`harts train` with agents: where rollouts come from, and a run whose tree is of an agent's samples."""

import json
import sys
from pathlib import Path

import pytest
import torch

from harts_hf.cli.main import main as harts

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


def test_without_its_extra_agents_are_refused(tmp_path, capsys, monkeypatch):
    """The web server is no dependency of those who train on environments."""
    monkeypatch.setitem(sys.modules, "harts_hf.rollouts.gateway", None)
    assert harts(["train", TINY, "--output_dir", str(tmp_path)]) == 2
    assert "agents need the extra 'agents'" in capsys.readouterr().err


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
