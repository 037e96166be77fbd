"""`harts train --dry-run`: it counts what a training has, and says at once all that a training would refuse."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.multimodal import multimodal_checkpoint
from support.recorded import rollouts_of, tokenizer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from harts_hf.cli.dry_run import memory
from harts_hf.cli.dry_run.planning import plan_step
from harts_hf.cli.dry_run.rollouts import PlannedRollouts, made_up_rollouts
from harts_hf.cli.launching import find_launch
from harts_hf.cli.main import main as harts
from harts_hf.cli.recipe import parse
from harts_hf.cli.train import build_trainer
from harts_hf.cli.train_arguments import TrainArguments
from harts_hf.planner import PlannerConfig, plan_window
from harts_hf.runtime.planning import WindowPlanner

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "tiny_grpo.yaml")
FSDP2 = str(ROOT / "recipes" / "accelerate" / "fsdp2_8gpu.yaml")


@pytest.fixture(autouse=True)
def _process_settings(monkeypatch):
    """Recipes are started in the folder above theirs; what they set for the process is undone."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def dry_run(capsys, tmp_path):
    """Runs a dry run; its status and its text, on one line."""

    def dry_run(*options, recipe=TINY):
        status = harts(["train", recipe, "--output_dir", str(tmp_path / "out"), *map(str, options), "--dry-run"])
        output = capsys.readouterr()
        return status, " ".join((output.out + output.err).split())

    return dry_run


def test_everything_that_is_refused_is_said_at_once(dry_run):
    """Numbers, files, the backend and sampling under it: one run names them all, and the exit status is 1."""
    status, said = dry_run(
        "--learning_rate", "-1", "--resume_from_checkpoint", "nowhere", "--accelerate_config", FSDP2,
        "--num_processes", "4",
    )  # fmt: skip
    assert status == 1
    for message in (
        f"expected num_processes 8, as {FSDP2} says, got 4",
        "expected learning_rate to be a finite number of at least 0, got -1.0",
        "expected resume_from_checkpoint to be a checkpoint's folder",
        "got FSDP: serve the policy with vLLM",
    ):
        assert message in said
    assert "verdict 4 refused" in said


def test_unknown_keys_hide_nothing(dry_run, tmp_path):
    """Of the recipe and of the command line, beside what else is refused."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Path(TINY).read_text() + "lerning_rate: 1\n")
    status, said = dry_run("--lr", "1", "--weight_decay", "-1", recipe=str(recipe))
    assert status == 1 and "verdict 2 refused" in said
    assert "unknown key 'lerning_rate' (did you mean 'learning_rate'?), 'lr'" in said
    assert "expected weight_decay to be a finite number of at least 0, got -1.0" in said


def test_all_values_that_a_field_refuses(dry_run, tmp_path):
    """In one message, with the key that is not known."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lerning_rate: 1\nmax_steps: many\nlearning_rate: fast\n")
    status, said = dry_run(recipe=str(recipe))
    assert status == 2 and "unknown key 'lerning_rate' (did you mean 'learning_rate'?); expected max_steps" in said
    assert "expected learning_rate to be a number, got 'fast'" in said


@pytest.mark.parametrize(("name", "reason"), [("file/out", "Not a directory"), ("file", "Not a directory")])
def test_the_output_folder_is_tried(name, reason, tmp_path, capsys):
    """Whether it could be made and written; nothing is made."""
    (tmp_path / "file").write_text("")
    assert harts(["train", TINY, "--output_dir", str(tmp_path / name), "--dry-run"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "expected output_dir to be a folder that can be written" in said and reason in said


def test_what_follows_from_a_missing_model_is_not_said(dry_run):
    """No tokenizer of an agent is asked for where a model is named that is not there."""
    status, said = dry_run("--model_name_or_path", "nowhere", recipe="recipes/qwen3_5_grpo_1gpu.yaml")
    assert (
        status == 1
        and "expected model_name_or_path to be a model's folder or name, got 'nowhere'" in said
        and "verdict 1 refused" in said
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--environment", "no.such:Thing"], "cannot import 'no.such'"),
        (["--environment_kwargs", '{"num_items": 99}'], "expected num_items in"),
        (["--model_config.hiden_size", "8"], "unknown key 'model_config.hiden_size'"),
        (["--model_type", "", "--model_name_or_path", "nowhere"], "expected model_name_or_path to be a model"),
        (["--num_processes", "3", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2",
          "--steps_per_generation", "1"], "must be divisible by num_generations"),
        (["--dry_run_rollouts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--optim", "lomo"], "got optim=OptimizerNames.LOMO"),
        (["--optim", "lomo", "--accelerate_config", FSDP2], "got FSDP: serve the policy with vLLM"),
        (["--optim", "lomo"], "not checked the model, its memory and the trainer's other settings"),
        (["--collector_kwargs.chat", "true"], "expected a tokenizer with a chat template"),
        (["--fp16", "true"], "expected bf16 or fp32 training"),
        (["--use_vllm", "true", "--vllm_mode", "colocate"], "expected vllm_mode 'server' for environments and agents"),
    ],
)  # fmt: skip
def test_each_kind_of_refusal(options, message, dry_run):
    """None ends the dry run with a traceback."""
    status, said = dry_run(*options)
    assert status in (1, 2) and message in said and "Traceback" not in said


@pytest.mark.parametrize(
    "options", [["--dry-run"], ["--dry_run", "--seed", "1"], ["--dry_run=true"], ["--dry-run", "true", "--seed", "1"]]
)
def test_however_it_is_asked_for(options, tmp_path, capsys):
    """No spelling of it trains."""
    assert harts(["train", TINY, "--output_dir", str(tmp_path / "out"), *options]) == 0
    assert "nothing is trained" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_it_may_come_before_the_recipe(tmp_path, capsys):
    """As options of most commands may."""
    assert harts(["train", "--dry-run", TINY, "--output_dir", str(tmp_path / "out")]) == 0
    assert "nothing is trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("raise RuntimeError('no license')", "RuntimeError: no license"),
        ("class Mine:\n    pass\n\n\nassert False", "AssertionError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(content, message, dry_run, tmp_path, monkeypatch):
    """With its file and line: the message alone may be a number, or nothing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"broken_{len(content)}"
    (tmp_path / f"{name}.py").write_text(content)
    status, said = dry_run("--environment", f"{name}:Mine")
    assert status == 1 and message in said and re.search(rf"{name}\.py,\s+line {len(content.splitlines())}\)", said)


def test_a_folder_without_a_tokenizer(dry_run, tmp_path):
    """Transformers makes one of a special token alone of it, which reads every text as nothing."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    status, said = dry_run("--model_type", "", "--model_name_or_path", tmp_path)
    assert status == 1 and "expected a tokenizer with a vocabulary" in said


@pytest.mark.parametrize("name", ["gmpo", "rloo"])
def test_other_trainers(name, dry_run, tmp_path):
    """Completions of prompts that TRL samples, with a reference model, of a folder without weights."""
    folder = multimodal_checkpoint("qwen3_5", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    tokenizer().save_pretrained(tmp_path / "words")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "t3 t4 t5"}\n' * 16)
    (tmp_path / "recipe.yaml").write_text(
        f"trainer: {name}\nmodel_name_or_path: {folder}\ndataset_name: {tmp_path / 'prompts.jsonl'}\nbeta: 0.1\n"
        "reward_funcs: [builtins:len]\nnum_generations: 4\nper_device_train_batch_size: 4\nmax_completion_length: 9\n"
        f"gradient_accumulation_steps: 2\naccelerate_config: {FSDP2}\nreport_to: none\n"
        f"tokenizer: {tmp_path / 'words'}\n"
    )
    status, said = dry_run(recipe=str(tmp_path / "recipe.yaml"))
    assert status == 0, said
    assert f"trainer {name}; rollouts from TRL's own generation" in said and "= reference model" in said
    # Two prompts of three tokens, four completions of nine each.
    assert f"plan {2 * 4 * (3 + 9)} tokens on the process with the most work" in said
    assert f"{2 * (3 + 4 * 9)} of them unique" in said or "shared 1.00x" in said


def test_parameters_and_memory_are_those_of_the_trainer(dry_run, tmp_path):
    """The same numbers as of the model that the recipe builds, which a dry run does not build."""
    status, said = dry_run()
    assert "; 4 prompts to train on" in said  # the shelf's own, which the data set repeats
    trainer = build_trainer(*parse([TINY, "--output_dir", str(tmp_path / "real")]))
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert status == 0 and f"bailing_hybrid, {count:,} parameters in float32, {count:,} of them trained" in said
    assert not (tmp_path / "out").exists()
    schedule = plan_window(made_up(branching=[4, 2, 2]), trainer._tree.planner.config)
    launch = find_launch(None, None, 1)
    found = memory.memory_of(trainer.model, trainer.args, launch, with_reference=True)
    parts = {p.name: p for p in found.parts(schedule)}
    weights = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    assert parts["weights"].bytes == parts["gradients"].bytes == parts["reference model"].bytes == weights
    trainer.create_optimizer()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    states = [v for one in trainer.optimizer.state.values() for v in one.values() if v.numel() > 1]
    # A parameter of one number has states of one number, as counters are.
    single = 8 * sum(parameter.numel() == 1 for parameter in trainer.model.parameters())
    assert parts["optimizer"].bytes == sum(v.numel() * v.element_size() for v in states) + single
    assert parts["handed states"].bytes == schedule.memory_counts(0).handed_bytes.max()
    assert found.states_bytes < found.peak(schedule) < sum(part.bytes for part in parts.values())
    assert "limits auto: 16,384 rows a microbatch (the default on a CPU)" in said


def test_limits_that_fit_are_planned(dry_run):
    """Of a GPU's memory; where nothing is left, the error says what would be needed, and no plan is shown."""
    small = ("--use_cpu", "false", "--dry_run_memory", "350MB")
    status, said = dry_run(*small)
    rows = int(re.search(r"limits auto: ([\d,]+) rows a microbatch, graphs of", said)[1].replace(",", ""))
    assert status == 0 and 64 <= rows < 65_536 and "fits into 0.3 GB, 10% of which are left alone" in said
    assert int(re.search(r"([\d,]+) rows at most", said)[1].replace(",", "")) <= rows
    _, said = dry_run(*small, "--tree_max_tokens_per_microbatch", "128")
    assert "limits auto" not in said
    status, said = dry_run(*small[:3], "100MB")
    assert status == 1 and "beside weights, gradients and optimizer" in said and "rows at most" not in said
    assert dry_run("--dry_run_memory", "much")[0] == 2


def test_shards_of_each_backend(tmp_path):
    """A parameter's bytes over 8 processes: AdamW in float32, and DeepSpeed's bfloat16 with float32 masters."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(100, 100, bias=False)] * 1)})
    args = SimpleNamespace(bf16=True, fp16=False, optim="adamw_torch")
    ds = tmp_path / "ds.json"
    for stage, expected in ((1, (2, 4, 12 / 8)), (2, (2, 4 / 8, 12 / 8)), (3, (2 / 8, 4 / 8, 12 / 8))):
        ds.write_text(json.dumps({"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "fp32"}}))
        launch = find_launch(
            written(tmp_path, "DEEPSPEED", deepspeed_config={"deepspeed_config_file": str(ds)}), None, 1
        )
        assert launch.backend == f"ZeRO-{stage}" and launch.num_processes == 8
        assert tuple(p.bytes / 10_000 for p in memory._states(model, args, launch, False)) == expected
    fsdp = find_launch(written(tmp_path, "FSDP", fsdp_config={"fsdp_version": 2}), None, 1)
    assert tuple(p.bytes / 10_000 for p in memory._states(model, args, fsdp, False)) == (4 / 8, 4 / 8, 8 / 8)
    ddp = find_launch(None, 8, 1)
    assert [p.name for p in memory._working(model, args, ddp)] == ["buckets"]
    assert tuple(p.bytes / 10_000 for p in memory._states(model, args, ddp, False)) == (4, 4, 8)


def written(folder, kind, **more):
    """A launch file of 8 processes."""
    path = folder / "launch.json"
    common = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "use_cpu": False, "debug": False}
    path.write_text(json.dumps({**common, "distributed_type": kind, "num_processes": 8, **more}))
    return str(path)


def test_launch_files_that_do_something_else(tmp_path):
    """MULTI_CPU starts one process, FSDP1 and stage 0 are refused, a file that is none is an error."""
    (message,) = find_launch(written(tmp_path, "MULTI_CPU"), None, 1).refused
    assert "`accelerate launch` starts one for it" in message
    (message,) = find_launch(written(tmp_path, "FSDP", fsdp_config={"fsdp_version": 1}), None, 1).refused
    assert "expected FSDP2 (fsdp_version: 2), got version 1" in message
    (message,) = find_launch(written(tmp_path, "DEEPSPEED", deepspeed_config={"zero_stage": 0}), None, 1).refused
    assert "expected ZeRO stage 1, 2 or 3, got 0" in message
    with pytest.raises(ValueError, match="that Accelerate reads, got 'nowhere': no such file, seen from /"):
        find_launch("nowhere", None, 1)


def made_up(rows=16, size=16, **options):
    """Trees of a step, for prompts of 5 tokens and completions of 64."""
    arguments = TrainArguments(environment="a:b", max_turns=4, **options)
    training = SimpleNamespace(
        per_device_train_batch_size=rows, gradient_accumulation_steps=1, num_generations=size, max_completion_length=64
    )
    return made_up_rollouts(arguments, training, 5).trees


@pytest.mark.parametrize(
    ("options", "unique"),
    [
        ({"branching": [4, 2, 2]}, 5 + 16 * (4 + 8 + 16 + 16)),  # turns of 16 tokens
        ({"branching": [4, 4], "fork_turns": [0, 3]}, 5 + 16 * (4 * 3 + 16)),
        ({}, 5 + 64 * 16),
        ({"fork_policy": "none"}, 5 + 64 * 16),
        ({"fork_policy": "entropy", "fork_roots": 5}, 5 + 16 * (2 * 5 + 2 * 16)),
        ({"fork_policy": "budget", "fork_budget": 9}, 5 + 16 * (2 * 1 + 2 * 16)),
    ],
)
def test_made_up_trees(options, unique):
    """Their unique tokens, counted by hand; every leaf is as long as the recipe allows."""
    (tree,) = made_up(**options)
    assert tree.num_tokens == unique
    assert tree.num_trajectories == 16 and set(tree.trajectory_lengths.tolist()) == {69}
    tree.check()


def test_all_processes_as_one_forest():
    """Placed over four processes by estimate; each row once, where a lone process runs only its own."""
    rollouts = PlannedRollouts(trees=made_up(size=8, rows=8), others=made_up(size=4, rows=8), said="")
    planner = WindowPlanner(config=PlannerConfig(max_tokens_per_microbatch=128))
    plans = {
        placement: plan_step(planner, rollouts, num_processes=4, placement=placement, skips=[False, True]).schedule
        for placement in ("local", "global")
    }
    assert [plans[name].config.world_size for name in plans] == [1, 4]
    own, other = made_up(size=8, rows=8)[0].num_expanded_tokens, made_up(size=4, rows=8)[0].num_expanded_tokens
    assert plans["local"].tree.num_expanded_tokens == own
    assert plans["global"].tree.num_expanded_tokens == own + 3 * other
    auto = plan_step(planner, rollouts, num_processes=4, placement="auto", skips=[False])
    assert auto.schedule.estimated_seconds <= plans["local"].estimated_seconds


def test_groups_larger_than_a_step():
    """Of 16 rollouts, 40 rows a process: two whole trees and 8 of a third."""
    assert [tree.num_trajectories for tree in made_up(rows=40)] == [16, 16, 8]


def test_rollouts_of_a_file_on_a_multimodal_checkpoint(dry_run, tmp_path):
    """Its text model; the largest of the file's groups are planned."""
    rows = []
    for name in ("p1", "p2", "p3"):
        group = rollouts_of(name)
        for prompt, completion in zip(group["prompt_ids"], group["completion_ids"], strict=True):
            rows.append({"group": name, "token_ids": prompt + completion, "reward": 0.0})
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expanded = {
        name: sum(len(row["token_ids"]) for row in rows if row["group"] == name) for name in ("p1", "p2", "p3")
    }
    folder = multimodal_checkpoint("qwen3_5", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    status, said = dry_run(
        "--model_type", "", "--model_name_or_path", folder, "--dry_run_rollouts", file, "--beta", "0.1",
        "--per_device_train_batch_size", "16", "--num_processes", "2",
    )  # fmt: skip
    assert status == 0, said
    assert "qwen3_5_text" in said and "reference model" in said and "processes 2, DDP (num_processes)" in said
    assert "1 of 3 groups, those with the most tokens" in said
    planned = int(re.search(r"plan ([\d,]+) tokens", said)[1].replace(",", ""))
    assert planned in expanded.values() and planned >= np.median(list(expanded.values()))


def test_deepspeed_by_a_key(dry_run, tmp_path):
    """It is said that the file is not read; it does not build the model for processes that do not run."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    file = tmp_path / "zero3.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, **dict.fromkeys(sizes, "auto")}))
    status, said = dry_run("--deepspeed", file, "--num_processes", "2")
    assert status == 0 and "nothing is refused" in said
    assert "not checked the recipe's keys deepspeed and fsdp" in said
    assert not is_deepspeed_zero3_enabled()
