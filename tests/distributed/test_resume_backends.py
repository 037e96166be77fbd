"""Two processes are killed anywhere, or end, and go on from a checkpoint as if nothing had been, on each backend.

Equal means bit for bit: sums of two numbers over gloo do not depend on the order. With another number of processes
rows lie in other micro-batches: parameters agree to 1e-6, where training moves them by more than 1e-3 (budget: see
test_ranks.py).
"""

import json
from pathlib import Path

import pytest
import torch
from support.launching import made_once, run_processes
from support.models import shallow_model
from support.trainer_runs import TIMED

SCRIPT = Path(__file__).parent / "train_resumed.py"
FAMILY = {"ddp": "bailing_hybrid", "fsdp2": "bailing_hybrid"}  # whose checkpoints have names of their own
GROUP = {"per_device_train_batch_size": 2}
# A group on each process in each generation batch, which lasts four optimizer steps.
LONG = {
    **GROUP,
    "max_steps": 5,
    "save_steps": 3,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "num_iterations": 2,
}
# AdamW with so large an epsilon makes rounding no larger.
BOUNDARY = {
    **GROUP,
    "max_steps": 3,
    "save_steps": 1,
    "optim": "adamw_torch",
    "adam_epsilon": 1.0,
    "learning_rate": 0.5,
}
SGD = {**GROUP, "max_steps": 3, "save_steps": 1, "lr_scheduler_type": "linear"}
WRAPPERS = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel"),
    "fsdp2": ("FSDP", "FSDPBailingHybridForCausalLM"),
    "fsdp2-lora": ("FSDP", "FSDPPeftModel"),
    "zero": ("DEEPSPEED", "DeepSpeedEngine"),
}
KILLED = ["ddp", "fsdp2"]  # which are resumed after a kill
CASES = ["fsdp2-lora", "zero2", "zero3"]
MORE_CASES = ["ddp-lora", "zero3-lora"]
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def job(folder, case, name, **more):
    """A job of train_resumed.py."""
    backend, _, lora = case.partition("-")
    options = more.pop("options", LONG)
    if case == "zero3-lora":  # for which TRL makes checkpointing reentrant
        options = {**options, "gradient_checkpointing": False}
    family = FAMILY.get(case, "qwen3_5_text")
    common = {"name": name, "backend": backend, "family": family, "lora": bool(lora), "options": options}
    return {**common, "folder": str(folder / name), **more}


def run(folder, jobs, **how):
    """What both processes have after each job."""
    path = folder / f"{jobs[0]['name']}.json"
    path.write_text(json.dumps(jobs))
    run_processes(SCRIPT, path, **how)
    return found_of(folder, jobs, **how)


def found_of(folder, jobs, count=2):
    """What all processes had after each job."""
    return {one["name"]: [torch.load(folder / f"{one['name']}-{r}.pt") for r in range(count)] for one in jobs}


def whole_and_resumed(folder, case):
    """The two jobs of a case."""
    checkpoint = str(folder / case / "checkpoint-3")
    options = {**LONG, "save_strategy": "no"}
    return [job(folder, case, case), job(folder, case, f"{case}-resumed", options=options, resume=checkpoint)]


def jobs_of(folder):
    """Of each case an uninterrupted training, and of `CASES` one that goes on from its first checkpoint."""
    jobs = []
    for case in (*KILLED, *CASES):
        jobs += whole_and_resumed(folder, case)[: 1 if case in KILLED else 2]
        if case == "fsdp2":
            jobs += [job(folder, "ddp", "ddp-boundary", options=BOUNDARY)]
            jobs += [job(folder, "fsdp2", "fsdp2-boundary", options=BOUNDARY, sharded=True)]
            checkpoint = str(folder / "fsdp2-sgd" / "checkpoint-1")
            jobs += [job(folder, "fsdp2", "fsdp2-sgd", options=SGD)]
            jobs += [job(folder, "fsdp2", "fsdp2-sgd-resumed", options=SGD, resume=checkpoint)]
            bf16 = {**GROUP, "max_steps": 1, "save_strategy": "no", "bf16": True}
            jobs += [job(folder, "fsdp2", "fsdp2-bf16", options=bf16, keep_log_probs=True)]
    return jobs


@pytest.fixture(scope="module")
def folder():
    """Of all runs here."""
    return made_once("resumed", lambda folder: run(folder, jobs_of(folder)))


@pytest.fixture(scope="module")
def left(folder):
    """What both processes have after each of these jobs."""
    return found_of(folder, jobs_of(folder))


def assert_equal(got, expected, *, steps):
    """Bit for bit: parameters, and every metric of the last steps."""
    assert got["error"] is None, got["error"]
    assert got["parameters"].keys() == expected["parameters"].keys()
    for name, value in expected["parameters"].items():
        assert torch.equal(got["parameters"][name], value), name
    assert len(got["logs"]) == len(expected["logs"])
    for expected_log, log in zip(expected["logs"][-steps - 1 : -1], got["logs"][-steps - 1 : -1], strict=True):
        for name, value in expected_log.items():
            if not name.endswith((*TIMED, "_seconds")):
                assert log[name] == value, name


def assert_resumed(left, case):
    """Both runs of a case were real ones, and equal."""
    for whole, resumed in zip(left[case], left[f"{case}-resumed"], strict=True):
        wrapper = WRAPPERS.get(case) or WRAPPERS["zero" if case.startswith("zero") else "ddp"]
        for one in (whole, resumed):
            assert (one["world_size"], one["distributed_type"], one["wrapper"]) == (2, *wrapper)
            assert one["layers_gathered_at_once"] == (2 if case == "zero3" else 0)  # a frozen base has none
        assert_equal(resumed, whole, steps=2)


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_the_uninterrupted_one(case, left):
    """From the middle of a generation batch, with AdamW."""
    assert_resumed(left, case)


@pytest.mark.exhaustive
def test_more_resumed_runs(folder):
    """Those of which a part was seen above."""
    left = run(folder, [one for case in MORE_CASES for one in whole_and_resumed(folder, case)])
    for case in MORE_CASES:
        assert_resumed(left, case)


def test_optimizer_without_state(left):
    """Of which torch fails to load a whole state dict into FSDP2; the learning rate falls on."""
    for whole, resumed in zip(left["fsdp2-sgd"], left["fsdp2-sgd-resumed"], strict=True):
        assert_equal(resumed, whole, steps=2)


def killed(folder, case, die):
    """A job of which one process kills itself, in the file that it returns; and the one that goes on from there."""
    one = job(folder, case, f"{case}-killed", die=die)
    path = folder / f"{one['name']}.json"
    path.write_text(json.dumps([one]))
    return path, {**job(folder, case, f"{case}-again", resume=True), "folder": one["folder"]}


def test_killed_in_a_save(folder, left):
    """A half-written checkpoint is passed over, by name. (What a launcher does: test_ranks_benchmark.py.)"""
    path, again = killed(folder, "ddp", die=[0, "save", 5])
    with pytest.raises(AssertionError, match="process 0 failed"):
        run_processes(SCRIPT, path)
    resumed = run(folder, [again])["ddp-again"]
    assert_resumed({**left, "ddp-resumed": resumed}, "ddp")
    for found in resumed:
        said = [text for text in found["warnings"] if "passed over" in text]
        assert len(said) == 1 and "checkpoint-3" in said[0] and "checkpoint-5: it is half-written" in said[0]


@pytest.mark.exhaustive
def test_killed_between_saves(folder, left):
    """In the rollouts of the second epoch."""
    path, again = killed(folder, "fsdp2", die=[1, "rollouts", 4])
    with pytest.raises(AssertionError, match="process 1 failed"):
        run_processes(SCRIPT, path)
    resumed = run(folder, [again])["fsdp2-again"]
    assert_resumed({**left, "fsdp2-resumed": resumed}, "fsdp2")
    assert not any("passed over" in text for found in resumed for text in found["warnings"])


def test_another_number_of_processes(folder, left):
    """Checkpoints of two processes at the end of a generation batch go on in one that does the work of both."""
    both = {**BOUNDARY, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
    jobs = [
        job(
            folder,
            case,
            f"{case}-one",
            options=both,
            resume=str(folder / f"{case}-boundary" / "checkpoint-1"),
            sharded=True,
        )
        for case in ("ddp", "fsdp2")
    ]
    jobs.append(job(folder, "ddp", "fewer-prompts", options=BOUNDARY, resume=jobs[0]["resume"]))
    found = run(folder, jobs, count=1)
    for case in ("ddp", "fsdp2"):
        whole, (one,) = left[f"{case}-boundary"][0], found[f"{case}-one"]
        assert one["error"] is None and one["world_size"] == 1
        start = dict(shallow_model(FAMILY[case], seed=1).named_parameters())
        moved = [(whole["parameters"][name] - start[name]).abs().max().item() for name in start]
        assert max(moved) > 1e-3
        for name, value in whole["parameters"].items():
            assert (one["parameters"][name] - value).abs().max() < 1e-6, name
        assert one["logs"][1]["reward"] == pytest.approx(whole["logs"][1]["reward"], abs=1e-6)
    assert "expected 2 prompts per optimizer step" in found["fewer-prompts"][0]["error"]


def test_answers_are_float32_under_fsdp2_in_bfloat16(left):
    """Accelerate's policy alone rounds log-probs and entropies to bfloat16: see trainers/precision.py."""
    for rank in left["fsdp2-bf16"]:
        assert rank["distributed_type"] == "FSDP"
        for log_probs, entropies in rank["kept"]:
            for value in (log_probs, entropies):
                assert value.dtype == torch.float32
                assert (value != value.bfloat16().float()).float().mean() > 0.5
