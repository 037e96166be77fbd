"""Every Python block of every page runs, here or in the test that the table names, or says why it does not."""

import sys

import pytest
import torch
from datasets import Dataset
from support.models import tiny_model
from support.pages import PAGES, ROOT, blocks, name_of
from support.scripted import chat_tokenizer

TRACES = str(ROOT / "examples" / "traces.jsonl")
CPU = 'output_dir="out", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,'
# Pages whose blocks other tests run.
ELSEWHERE = {
    "README.md": "tests/docs/test_snippets.py",  # the end of examples/grpo.py, which runs
    "docs/custom-trainers.md": "tests/docs/test_snippets.py",
    "docs/environments.md": "tests/docs/test_environments_page.py",
    "docs/hub-checkpoint.md": "tests/docs/test_hub_page.py",
    "docs/losses.md": "tests/docs/test_losses_page.py",
    "docs/model-families.md": "tests/docs/test_snippets.py",
    "docs/quickstart.md": "tests/newcomer/test_transcripts.py",
}
NOT_RUN = {
    ("docs/agents.md", 2): "arguments of the reader's: examples/agent_by_url.py is such a script",
    ("docs/ppo.md", 0): "rollouts and a reward of the reader's: examples/ppo.py is such a script",
    ("docs/resuming.md", 0): "a line: tests/trainers/test_checkpoints.py resumes",
    ("docs/rollouts.md", 0): "an agent of the reader's: examples/grpo.py is such a function",
}


def architecture(run):
    """Gradients of both losses reach the model, those of the second the new head."""
    model = tiny_model("qwen3_5_text")
    slices = [[[5, 6, 7, 8], [5, 6, 9]], [[5, 6, 7, 9, 10]]]
    names = run(model=model, slices=slices, torch=torch)
    assert names["model"].critic.weight.grad.abs().max() > 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def engines(run):
    """Four continuations, no longer than asked for."""
    tokenizer = chat_tokenizer()
    turns = run(model=tiny_model("qwen3_5_text", vocab_size=len(tokenizer)), tokenizer=tokenizer)["turns"]
    assert len(turns) == 4 and all(1 <= len(turn.token_ids) == len(turn.logprobs) <= 64 for turn in turns)


def forks(run):
    """Three steps, each on trees."""
    logs = [log for log in run()["trainer"].state.log_history if "loss" in log]
    assert len(logs) == 3 and all(log["tree/sharing_ratio"] > 1 for log in logs)


def kernels(run):
    """It compares by itself; a kernel that is wrong is found."""
    run()
    with pytest.raises(AssertionError, match="not close"):
        run(changed=("scale=0.25", "scale=0.25 if backend == 'reference' else 0.26"))


def planner(run):
    """A plan for four ranks."""
    schedule = run(trajectories=[[1, 2, 3, 4], [1, 2, 5]] * 8)["schedule"]
    assert schedule.config.world_size == 4


def recorded(run):
    """On the traces that come along: every group is trained, in both epochs."""
    trained = run(
        changed=[
            ("path/to/the/model", str(run.model)),
            ("results.jsonl.gz", TRACES),
            ('output_dir="trained",', CPU),
        ]
    )["trainer"]
    assert trained.state.num_train_epochs == 2 and trained.state.global_step >= 2


def sft(run):
    """A row for each answer, with what was before it."""
    user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    rows = run(conversations=[[user, assistant, user, assistant]], Dataset=Dataset)["dataset"]
    assert [len(row["prompt"]) for row in rows] == [1, 3]


def agents_function(run):
    """It is defined; an endpoint is needed to call it."""
    pytest.importorskip("openai")
    assert callable(run()["agent"])


def agents_command(run):
    """No process starts before an episode does."""
    assert type(run()["agent"]).__name__ == "CommandAgent"


def agents_format(run):
    """A collector that takes it."""
    pytest.importorskip("starlette")
    from harts_hf.rollouts import AgentRolloutCollector

    names = run(agent=lambda task, *, base_url: 1.0, AgentRolloutCollector=AgentRolloutCollector)
    assert isinstance(names["collector"], AgentRolloutCollector)


def babyai(run, capsys):
    """It prints the mission and what is seen after the turn."""
    pytest.importorskip("minigrid")
    run()
    assert len(capsys.readouterr().out.splitlines()) >= 2


def textarena(run):
    """The game goes on after the guess."""
    pytest.importorskip("textarena")
    game = run()["game"]
    assert game.reward is not None


HERE = {
    ("docs/agents.md", 0): agents_function,
    ("docs/agents.md", 1): agents_command,
    ("docs/agents.md", 3): agents_format,
    ("docs/architecture.md", 0): architecture,
    ("docs/engines.md", 0): engines,
    ("docs/environment-packages.md", 0): babyai,
    ("docs/environment-packages.md", 1): textarena,
    ("docs/forks.md", 0): forks,
    ("docs/kernel-backends.md", 0): kernels,
    ("docs/planner.md", 0): planner,
    ("docs/recorded.md", 0): recorded,
    ("docs/sft.md", 0): sft,
}


def test_every_block_has_its_place():
    """A new block needs a line in one of the tables; the tests that the first names are there."""
    found = {(name_of(page), number) for page in PAGES for number in range(len(blocks(page, "python")))}
    assert {block for block in found if block[0] not in ELSEWHERE} == set(HERE) | set(NOT_RUN)
    assert set(ELSEWHERE) <= {page for page, _ in found}
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())


@pytest.mark.parametrize("place", HERE, ids=lambda place: f"{place[0]}-{place[1]}")
def test_block(place, tmp_path, monkeypatch, request):
    """What the page takes for granted is given; what is of the reader's (a path, a folder) is changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    page, number = place
    text = blocks(ROOT / page, "python")[number]

    def run(changed=(), **given):
        code = text
        for before, after in [changed] if changed and isinstance(changed[0], str) else changed:
            assert before in code
            code = code.replace(before, after)
        names = {"__name__": "shown", **given}
        exec(compile(code, page, "exec"), names)
        return names

    if HERE[place] is recorded:
        monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "examples")])
        from tiny import save_tiny

        run.model = tmp_path / "tiny"
        save_tiny(run.model)
    needs_output = HERE[place] is babyai
    HERE[place](run, *([request.getfixturevalue("capsys")] if needs_output else []))
