"""Launchers that start fewer processes than they were asked for, or processes that know nothing of one another."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from support.launching import launch, run_processes

from harts_hf.errors import HartsWarning, UnsupportedModelError
from harts_hf.trainers.refusals import check_processes

SCRIPT = Path(__file__).parent / "train_alone.py"
# accelerate launch with distributed_type MULTI_CPU.
ACCELERATE_CPU = ("-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1", "--mixed_precision", "no",
                  "--dynamo_backend", "no")  # fmt: skip


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_processes_that_know_nothing_of_one_another(tmp_path):
    """In torchrun's environment, without a GPU and without ``use_cpu=True``: the error ends the job."""
    said = r"UnsupportedModelError: expected 2 processes \(WORLD_SIZE\), got one that knows of no other"
    with pytest.raises(AssertionError, match=said):
        run_processes(SCRIPT, tmp_path, "trainer")


@pytest.mark.distributed
def test_a_launcher_that_starts_one(tmp_path):
    """Accelerate starts a single process for MULTI_CPU: a trainer warns, `harts train` of two processes refuses and
    says what starts two."""
    options = ["--num_processes", 2, SCRIPT, tmp_path, "trainer", "command"]
    done = launch(tmp_path, *options, launcher=ACCELERATE_CPU)
    warned = "HartsWarning: accelerate launch set an address for several processes and started one"
    assert warned in done.stderr, done.stderr[-2000:]
    assert "expected 2 processes (num_processes), got 1: start them with `accelerate launch" in done.stderr
    assert done.returncode != 0


def trainer(world, fsdp=False, kind=DistributedType.NO):
    """What is looked at of a trainer."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=world, distributed_type=kind), args=SimpleNamespace(fsdp=fsdp)
    )


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_number_of_processes(name, monkeypatch):
    """As many as were asked for are fine, and so is one."""
    monkeypatch.setenv(name, "4")
    check_processes(trainer(4))
    with pytest.raises(UnsupportedModelError, match=f"expected 4 processes \\({name}\\), got one"):
        check_processes(trainer(1))
    monkeypatch.setenv(name, "1")
    check_processes(trainer(1))


def test_fsdp_that_does_not_run():
    """On a CPU Accelerate runs DDP instead."""
    check_processes(trainer(2, fsdp=True, kind=DistributedType.FSDP))
    with pytest.raises(UnsupportedModelError, match="expected FSDP, as fsdp=True asks for, got MULTI_CPU"):
        check_processes(trainer(2, fsdp=True, kind=DistributedType.MULTI_CPU))


def test_traces_of_accelerate_launch(monkeypatch):
    """An address without a rank; with a rank, or without an address, there is nothing to say."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    check_processes(trainer(1))
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.warns(HartsWarning, match="started one"):
        check_processes(trainer(1))
    monkeypatch.setenv("RANK", "0")
    check_processes(trainer(1))
