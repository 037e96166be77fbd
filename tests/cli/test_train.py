"""`harts train`: recipes, overrides, what a run leaves behind, and what is refused before a step is lost."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from harts_hf.cli.main import main as harts
from harts_hf.cli.recipe import parse
from harts_hf.cli.train import build_trainer
from harts_hf.cli.train_report import TrainReport

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "tiny_grpo.yaml")
# Four trees of four leaves a step: a run of seconds.
SMALL = ["--branching", "2", "2", "1", "--num_generations", "4", "--per_device_train_batch_size", "16"]


@pytest.fixture(autouse=True)
def _process_settings(monkeypatch):
    """What a recipe sets for its process is undone afterwards."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def refused(capsys, *arguments):
    """The message of a command that is refused."""
    assert harts(["train", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_run_leaves_everything_in_its_folder(tmp_path, capsys):
    """Three steps logged as two and one: checkpoint with tokenizer, metrics, pictures, summary, lines of progress."""
    arguments = [TINY, *SMALL, "--max_steps", "3", "--logging_steps", "2", "--output_dir", str(tmp_path)]
    assert harts(["train", *arguments]) == 0
    progress = capsys.readouterr().out
    assert [line.split()[1] for line in progress.splitlines() if line.startswith("step")] == ["2/3", "3/3"]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoint-3", "model.safetensors", "config.json", "tokenizer.json"} <= names
    assert {"metrics.jsonl", "reward.png", "tree.png", "summary.json"} <= names
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == [2, 3]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 3
    for name in ("forward", "backward", "expanded"):
        first, last = (entry[f"tree/{name}_tokens"] for entry in metrics)  # means over the steps of a log
        assert summary[f"{name}_tokens"] == 2 * first + last
    assert summary["expanded_tokens"] > summary["forward_tokens"] > 0
    assert summary["sharing_ratio"] > 1.2
    # Both windows span the whole run, each step counted once.
    mean = (2 * metrics[0]["reward"] + metrics[1]["reward"]) / 3
    assert summary["first_mean_reward"] == summary["last_mean_reward"] == pytest.approx(mean)
    assert summary["seconds"] > 0
    assert f"mean reward {mean:.3f} in " in progress  # one mean, as both are of all steps

    # The model that it saved can be trained on, by its path.
    again = [TINY, *SMALL, "--model_type", "", "--model_name_or_path", str(tmp_path), "--max_steps", "1"]
    trainer = build_trainer(*parse([*again, "--output_dir", str(tmp_path / "again")]))
    assert trainer.model.config.model_type == "bailing_hybrid"


@pytest.mark.essential("reroll")
@pytest.mark.parametrize(
    "options",
    [
        ["--early_ends", "reroll"],
        ["--fork_policy", "entropy", "--fork_roots", "3"],
        ["--fork_policy", "budget", "--fork_budget", "20"],
        ["--fork_policy", "none"],
    ],
    ids=lambda options: options[-1],
)
def test_each_fork_policy_trains(options, tmp_path, capsys):
    """A step, its tree drawn; forks of the recipe that another policy does not use are named."""
    assert harts(["train", TINY, *SMALL, *options, "--max_steps", "1", "--output_dir", str(tmp_path)]) == 0
    assert (tmp_path / "tree.png").stat().st_size > 5000
    unused = f"fork_policy {options[1]} does not use branching" in capsys.readouterr().err
    assert unused == (options[0] == "--fork_policy")


def read_metrics(folder):
    """The entries of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
def test_metrics_of_runs_that_are_resumed_or_begun_again(tmp_path, capsys):
    """A resumed run goes on from its checkpoint's metrics and counts them in; a new one begins a new file."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    arguments = [TINY, *SMALL, "--logging_steps", "1", "--save_steps", "1", "--save_total_limit", "9"]
    assert harts(["train", *arguments, "--max_steps", "3", "--output_dir", str(folder)]) == 0
    before = read_metrics(folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # the run was killed here
    resume = [*arguments, "--resume_from_checkpoint", str(folder / "checkpoint-2"), "--max_steps", "4"]

    assert harts(["train", *resume, "--output_dir", str(folder)]) == 0
    after = read_metrics(folder)
    assert [entry["step"] for entry in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2] and after[2] != before[2]
    for name in ("seconds", "cpu_seconds"):
        assert 0 < after[0][name] < after[1][name] < after[2][name] < after[3][name]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["counted_from_step"] == 0 and summary["steps"] == 4
    assert summary["forward_tokens"] == sum(entry["tree/forward_tokens"] for entry in after)

    (folder / "checkpoint-9").mkdir()  # begun, and nothing else
    (folder / "checkpoint-9" / "harts_checkpoint.json").write_text('{"complete": false}')
    newest = [*arguments, "--resume_from_checkpoint", "true", "--max_steps", "5", "--output_dir", str(folder)]
    assert harts(["train", *newest]) == 0
    assert [entry["step"] for entry in read_metrics(folder)] == [1, 2, 3, 4, 5]
    said = capsys.readouterr().err
    assert f"resuming from {folder / 'checkpoint-4'}; passed over checkpoint-9: it is half-written" in said

    assert harts(["train", *resume, "--output_dir", str(elsewhere)]) == 0
    assert [entry["step"] for entry in read_metrics(elsewhere)] == [3, 4]
    summary = json.loads((elsewhere / "summary.json").read_text())
    assert summary["counted_from_step"] == 2 and summary["steps"] == 4
    assert summary["forward_tokens"] == sum(entry["tree/forward_tokens"] for entry in read_metrics(elsewhere))

    assert harts(["train", *arguments, "--max_steps", "1", "--output_dir", str(folder)]) == 0
    assert [entry["step"] for entry in read_metrics(folder)] == [1]


def test_an_error_of_user_code_shows_where_it_was(tmp_path, monkeypatch, capsys):
    """While training, an exception of a reward function is printed whole: exit status 1, and no old summary stays."""
    (tmp_path / "my_rewards.py").write_text("def broken(**columns):\n    return 1 + 'a'\n")
    (tmp_path / "summary.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = [
        TINY,
        *SMALL,
        "--max_steps",
        "1",
        "--reward_funcs",
        "my_rewards:broken",
        "--output_dir",
        str(tmp_path),
    ]
    assert harts(["train", *arguments]) == 1
    message = capsys.readouterr().err
    assert "my_rewards.py" in message and "return 1 + 'a'" in message
    assert not (tmp_path / "summary.json").exists()


USER_CODE = """
import numpy as np
from harts_hf.rollouts.environments.shelf import ShelfEnvironment

def none(completions, **columns):
    return [None] * len(completions)

def some(completions, **columns):
    some.calls = getattr(some, "calls", 0) + 1
    return [None if some.calls == 2 else 0.5] * len(completions)

def pipe(completions, **columns):
    raise BrokenPipeError("a judge that has died")

def leave(completions, **columns):
    raise SystemExit(0)

class Leaves(ShelfEnvironment):
    def step(self, action):
        raise SystemExit

class LeavesAtOnce(ShelfEnvironment):
    def __init__(self):
        raise SystemExit(0)

class Stops(ShelfEnvironment):
    def step(self, action):
        raise StopIteration

class Nan(ShelfEnvironment):
    @property
    def reward(self):
        return np.nan
"""


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    """A module of a user; a run of three steps with it."""
    (tmp_path / "user_code.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_code", raising=False)
    folder = tmp_path / "out"
    steps = ["--max_steps", "3", "--logging_steps", "1", "--save_strategy", "no", "--output_dir", str(folder)]
    yield lambda *options: harts(["train", TINY, *SMALL, *steps, "--tree_credit", "trajectory", *options])
    sys.modules.pop("user_code", None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("reward", "means"), [("none", [None] * 3), ("some", [0.5, None, 0.5])])
def test_steps_in_which_nothing_can_be_scored(reward, means, user_code, tmp_path, capsys):
    """TRL takes None for a reward and logs None: it is shown, and means are those of the other logs."""
    assert user_code("--reward_funcs", f"user_code:{reward}") == 0
    output = capsys.readouterr().out
    assert ("none" in output) and [entry["reward"] for entry in read_metrics(tmp_path / "out")] == means
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["first_mean_reward"] == summary["last_mean_reward"] == means[0]
    assert (tmp_path / "out" / "reward.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward_funcs", "user_code:pipe"], "BrokenPipeError: a judge that has died"),
        (
            ["--reward_funcs", "user_code:leave"],
            "expected environments, agents and reward functions to return, got SystemExit(0)",
        ),
        (["--environment", "user_code:Leaves", "--environment_kwargs", "{}"], "(16 raised); the first: SystemExit"),
        (["--environment", "user_code:Stops", "--environment_kwargs", "{}"], "StopIteration"),
        (["--environment", "user_code:LeavesAtOnce", "--environment_kwargs", "{}"], "to return, got SystemExit(0)"),
        (
            ["--environment", "user_code:Nan", "--environment_kwargs", "{}"],
            "expected Nan.reward to be a finite number",
        ),
    ],
)
def test_user_code_that_ends_the_run(options, message, user_code, tmp_path, capsys, caplog):
    """Whatever it raises is an error with its traceback, once, then a line; exit status 1, never a quiet end."""
    assert user_code(*options) == 1
    error = capsys.readouterr().err
    assert (error + caplog.text).count("Traceback (most recent") == 1 and message in error.splitlines()[-1]
    assert not (tmp_path / "out" / "summary.json").exists()


def test_only_the_first_process_writes(tmp_path):
    """A report on another process leaves no file and prints nothing."""
    report = TrainReport(SimpleNamespace(last_rollouts=[]))
    state = TrainerState(is_world_process_zero=False, global_step=1, max_steps=1)
    arguments = SimpleNamespace(output_dir=str(tmp_path))
    report.on_train_begin(arguments, state, TrainerControl(), model=torch.nn.Linear(1, 1))
    report.on_log(arguments, state, TrainerControl(), logs={"reward": 1.0})
    report.on_train_end(arguments, state, TrainerControl())
    assert not list(tmp_path.iterdir())


def test_first_and_last_mean_are_shown_where_they_differ(tmp_path, capsys):
    """A line with both means, of the steps that they are of; a resumed run begins where it was resumed."""
    for first, said in ((0, "0.000 (steps up to 20) -> 1.000 (last 20 steps)"), (30, "0.000 (steps up to 35) -> 1")):
        report = TrainReport(SimpleNamespace(last_rollouts=[]))
        arguments = SimpleNamespace(output_dir=str(tmp_path / str(first)), seed=0, device=torch.device("cpu"))
        state = TrainerState(is_world_process_zero=True, global_step=first, max_steps=first + 40)
        report.on_train_begin(arguments, state, TrainerControl(), model=torch.nn.Linear(1, 1))
        for state.global_step in range(first + 5, first + 41, 5):
            report.on_log(arguments, state, TrainerControl(), logs={"reward": float(state.global_step > first + 20)})
        report.on_train_end(arguments, state, TrainerControl())
        assert f"mean reward {said}" in capsys.readouterr().out


def test_what_is_left_of_the_time(tmp_path, monkeypatch, capsys):
    """Steps of this run so far say how long the others take; those before a checkpoint do not count."""
    clock = iter([100.0, 101.0, 125.0, 125.0])
    report = TrainReport(SimpleNamespace())
    state = TrainerState(is_world_process_zero=True, global_step=10, max_steps=40)
    arguments = SimpleNamespace(output_dir=str(tmp_path), world_size=8)
    monkeypatch.setattr("harts_hf.cli.train_report.time.perf_counter", lambda: next(clock))
    report.on_train_begin(arguments, state, TrainerControl(), model=torch.nn.Linear(1, 1))
    assert "for 40 steps on 8 processes," in capsys.readouterr().out
    report.on_log(arguments, state, TrainerControl(), logs={"reward": 1.0})
    assert "ETA unknown" in capsys.readouterr().out  # no step yet
    state.global_step = 15
    report.on_log(arguments, state, TrainerControl(), logs={"reward": 1.0})
    assert "ETA 0:02:05" in capsys.readouterr().out  # 25 s for 5 steps, 25 steps to go


def test_the_command_line_overrides_the_recipe():
    """Values of the command line win, dictionaries are JSON, and the rest stays the recipe's."""
    arguments, training, _ = parse(
        [TINY, "--learning_rate", "0.5", "--environment_kwargs", '{"num_items": 2}', "--branching", "4", "4"]
    )
    assert training.learning_rate == 0.5
    assert arguments.environment_kwargs == {"num_items": 2}
    assert arguments.branching == [4, 4]
    assert training.num_generations == 16 and arguments.max_turns == 4


def test_unknown_keys_are_named(tmp_path, capsys):
    """A misspelt key is refused wherever it stands, with the nearest known one."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Path(TINY).read_text() + "\nlearning_rat: 1\n")
    assert "unknown key 'learning_rat' (did you mean 'learning_rate'?)" in refused(capsys, recipe)
    assert "unknown key 'max_turn'" in refused(capsys, TINY, "--max_turn", "3")
    groups = ["--num_generations", "7"]  # which TRL's configuration refuses before all keys are read
    assert "unknown key 'learning_rat' (did" in refused(capsys, recipe, *groups)
    assert "gradient_accumulation_steps" in refused(capsys, TINY, *groups)
    assert "unknown key 'model_config.hiden_size'" in refused(capsys, TINY, "--model_config", '{"hiden_size": 8}')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--branching", "4,2"],
            "integers after --branching, with spaces between them, as in --branching 4 2, got",
        ),
        (["--branching", "[4, 2]"], "got '[4, 2]'"),
        (["--branching"], "expected one or more values after --branching, got none"),
        (["--max_steps=four"], "expected --max_steps to be an integer, got 'four'"),
        (["--fork_policy", "x"], "expected --fork_policy to be one of turn, entropy, budget, none, got 'x'"),
        (["--learning_rate"], "expected a value after --learning_rate, got none"),
        (["--branching", "4", "0"], "branching factors of at least 1, got [4, 0]"),
        (["--fork_turns", "0", "1"], "as many fork turns as branching factors"),
        (["--fork_budget", "100"], "expected fork_budget with fork_policy budget only, got turn"),
        (["--fork_roots", "2"], "expected fork_roots with fork_policy entropy or budget only, got turn"),
        (["--fork_policy", "budget"], "expected fork_budget, a number of tokens, with fork_policy budget, got none"),
        (["--fork_policy", "entropy", "--fork_roots", "17"], "at most 16, the episodes of a prompt, got 17"),
        (
            ["--model_name_or_path", "some/model"],
            "got some/model and bailing_hybrid (--model_type '' unsets it)",
        ),
        (
            ["--environment", "harts_hf.rollouts:Nothing"],
            "dotted path of a subclass of Environment, package.module:Name",
        ),
        (["--environment", "harts_hf.rollouts:Nothing"], "has no 'Nothing'"),
        (["--environment", "..shelf:ShelfEnvironment"], "expected a dotted path such as package.module:Name"),
        (["--environment", "json:loads"], "expected environment to be a subclass of Environment"),
        (
            ["--environment", "harts_hf.rollouts:Environment"],
            "to define reset and reward and step, got a class without",
        ),
        (["--environment_kwargs", '{"shelves": 3}'], "environment_kwargs do not fit"),
        (["--environment_kwargs", "{"], "expected environment_kwargs to be JSON"),
        (["--environment_kwargs", "[1]"], "expected environment_kwargs to be a mapping, got list"),
        (["--environment_kwargs", '{"num_items": 99}'], "expected num_items in"),
        (["--reward_funcs", "no.such.reward"], "cannot import 'no.such'"),
        (["--reward_funcs", "no.such.reward"], "expected reward_funcs to be the dotted path of a function"),
        (["--reward_funcs", "harts_hf.cli.main:COMMANDS"], "expected reward_funcs to name functions, got {"),
        (["--resume_from_checkpoint", "nowhere"], "expected resume_from_checkpoint to be a checkpoint's folder"),
        (["--resume_from_checkpoint", "true"], "expected a whole checkpoint in output_dir="),
        (["--output_dir", TINY], f"expected output_dir to be a folder that can be written, got '{TINY}': File exists"),
        (["--model_config", '{"hidden_size": "x"}'], "expected model_config to be fields of a bailing_hybrid config"),
        (["--beta", "0.1"], "expected beta 0 for random weights (model_type)"),
        (["--num_generations", "0"], "expected num_generations to be an integer of at least 1, got 0"),
        (["--use_vllm", "true"], "vLLM is not available"),
        (["--cpu_threads", "0"], "expected cpu_threads of at least 1, got 0"),
        (["--max_steps", "-1"], "expected max_steps of at least 1 where no dataset is named, got -1"),
        (["--tree_max_tokens_per_microbatch", "10"], "got 10"),
        (["--learning_rate", "nan"], "expected learning_rate to be a finite number of at least 0, got nan"),
        (["--learning_rate", "-1"], "expected learning_rate to be a finite number of at least 0, got -1.0"),
        (["--adam_beta2", "1"], "expected adam_beta2 to be a number in [0, 1), got 1.0"),
    ],
)
def test_settings_that_cannot_work(arguments, message, capsys):
    """Each is refused with what was expected and what came, before a step is lost."""
    assert message in refused(capsys, TINY, *arguments)


def test_a_model_that_deepspeed_does_not_build(monkeypatch, capsys):
    """Its own reasons are no fault of the recipe's model_config."""

    def fails(*given, **options):
        raise AssertionError("Check batch related parameters.")

    monkeypatch.setattr("harts_hf.cli.policy.is_deepspeed_zero3_enabled", lambda: True)
    monkeypatch.setattr("harts_hf.cli.policy.AutoModelForCausalLM.from_config", fails)
    said = refused(capsys, TINY)
    assert "expected DeepSpeed to build a bailing_hybrid in parts" in said
    assert "got AssertionError: Check batch related parameters." in said and "to be fields of" not in said


def test_a_recipe_must_be_there_and_a_mapping(tmp_path, capsys):
    """Files that are no recipe are named."""
    assert "nowhere.yaml" in refused(capsys, tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "list.yaml must contain a YAML mapping" in refused(capsys, tmp_path / "list.yaml")


def test_neither_recipe_nor_gpu(capsys):
    """A command without arguments asks for a recipe; bf16 where torch finds no GPU names both fields that help."""
    assert "expected a recipe, as in `harts train recipes/tiny_grpo.yaml`" in refused(capsys)
    if not torch.cuda.is_available():
        said = refused(capsys, TINY, "--use_cpu", "false", "--bf16", "true")
        assert "To train on the CPU: use_cpu: true and bf16: false" in said
        assert harts(["train", TINY, "--use_cpu", "false", "--bf16", "true", "--dry-run"]) == 0
        assert "torch finds none here (to train" in " ".join(capsys.readouterr().out.split())


def test_too_few_prompts_for_a_batch(tmp_path, capsys):
    """An error of the recipe, without a traceback, and of its dry run."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "3 1 2"}\n')
    arguments = [
        TINY,
        *SMALL,
        "--dataset_name",
        str(tmp_path / "prompts.jsonl"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    said = refused(capsys, *arguments)
    assert "expected at least 4 rows of train_dataset" in said and "Traceback" not in said
    assert harts(["train", *arguments, "--dry-run"]) == 1
    assert "REFUSED      expected at least 4 rows of train_dataset" in capsys.readouterr().out


def test_help_names_every_field(capsys):
    """Own fields, TRL's and the tree options are in the help."""
    with pytest.raises(SystemExit) as stop:
        harts(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in ("--environment", "--branching", "--learning_rate", "--tree_credit", "--model_name_or_path"):
        assert field in text
