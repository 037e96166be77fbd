"""The GPU benchmarks on a machine without a GPU: they import, their commands parse, and the record refuses."""

import argparse
import ast
import copy
import importlib
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.launching import run_processes

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "gpu"
SHAPES = ("--shapes", ROOT / "examples" / "shapes")
FILES = sorted(FOLDER.rglob("*.py"))
BARE = {path.stem for path in FILES} | {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
HELP = """
import contextlib, io, sys
from benchmarks.gpu.__main__ import COMMANDS, command_line
for words in [(), *{(command,) for command, _ in COMMANDS}, *COMMANDS]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            command_line().parse_args([*words, "--help"])
        except SystemExit as end:
            assert not end.code
    assert "usage:" in shown.getvalue()
assert "torch" not in sys.modules
"""
# In a fork of a process that has imported harts_hf, and with it Triton, as Transformers does where it is installed.
MODULES = """
import importlib, sys
from benchmarks.gpu.__main__ import COMMANDS

KERNELS = ("triton", "fla", "flash_attn", "cutlass")
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in KERNELS:
            raise ModuleNotFoundError(name)
for name in [name for name in sys.modules if name.split(".")[0] in KERNELS]:
    del sys.modules[name]
sys.meta_path.insert(0, Missing())
for name in sys.argv[1:]:
    importlib.import_module(name)
for command in COMMANDS.values():
    assert callable(importlib.import_module(f"benchmarks.gpu.{command.module}").main)
"""


@pytest.mark.exhaustive
def test_imports_without_a_gpu(tmp_path: Path) -> None:
    """Every module imports without Triton, FLA and FlashAttention, every command has a module and explains itself."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES if path.stem != "__init__"]
    result = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    script = tmp_path / "modules.py"
    script.write_text(MODULES)
    run_processes(script, *names, count=1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_imports_are_absolute(path: Path) -> None:
    """Nothing comes from tests, and nothing from a sibling by its bare name."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        for name in names:
            first = name.split(".")[0]
            assert first not in ("tests", "support"), f"{path} imports {name}"
            assert first in sys.stdlib_module_names or first not in BARE, f"{path} imports {name}"


def test_shell_only_unpacks() -> None:
    """The order of work is in Python."""
    assert [path.name for path in FOLDER.rglob("*.sh")] == ["unpack_site.sh"]


def command(*words: object) -> None:
    """``python -m benchmarks.gpu`` with these words, in this process."""
    from benchmarks.gpu.__main__ import COMMANDS, command_line

    options = command_line().parse_args(list(map(str, words)))
    importlib.import_module(f"benchmarks.gpu.{COMMANDS[options.command, options.what].module}").main(options)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the package that need no torch."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.gpu import gates, processes, record, recorder

    return SimpleNamespace(gates=gates, processes=processes, record=record, recorder=recorder)


def test_records_pass_their_gates_and_extend(gpu: Any) -> None:
    """Merging nothing new changes nothing; a new row takes the old one's place; a failed check is refused."""
    old = gpu.record.read(gpu.record.RESULTS / "kernels_h200.json")
    gpu.gates.check_kernels(old)
    row = {**next(row for row in old["rows"] if row["op"] == "linear"), "tree_ms": 1.0}
    parity = old["parity"]["linear"]
    part = {"device": "d", "versions": {"torch": "v"}, "commit": "c", "seed": 0, "failures": {}, "rows": [row]}
    merged = gpu.recorder.extend_kernels(old, gpu.recorder.collect_kernels(parity, [part]))
    changed = [(a, b) for a, b in zip(old["rows"], merged["rows"], strict=True) if a != b]
    assert [new["tree_ms"] for _, new in changed] == [1.0] and changed[0][1]["commit"] == "c"
    assert merged["parity"] == old["parity"] and merged["versions"]["attention"] == old["versions"]["attention"]
    gpu.gates.check_kernels(merged)
    for kind, key in (("attention", "128"), ("linear", "rules")):
        broken = copy.deepcopy(merged)
        entry = next(iter(broken["parity"][kind][key].values()))
        next(iter(entry["errors"].values()))["ratio"] = 1.2
        if kind == "linear":
            broken["parity"][kind]["passes"] = gpu.gates.linear_passes(broken["parity"][kind])
        with pytest.raises(SystemExit, match=kind):
            gpu.gates.check_kernels(broken)


def test_linear_rows_need_their_own_check(gpu: Any, tmp_path: Path) -> None:
    """The record's earlier parity does not stand for code that is measured now."""
    part = tmp_path / "linear.json"
    gpu.record.write(part, {"rows": [], "failures": {}})
    record = gpu.record.RESULTS / "kernels_h200.json"
    options = argparse.Namespace(what="kernels", parity=None, parts=[part], record=record)
    with pytest.raises(SystemExit, match="--parity"):
        gpu.recorder.main(options)


def test_speed_needs_its_verdict(gpu: Any, tmp_path: Path) -> None:
    """Neither a run nor the record reports a speed of a family whose verdict is missing, failed or of other code."""
    old = gpu.record.read(gpu.record.RESULTS / "whole_h200.json")
    gpu.gates.check_whole(gpu.recorder.extend_whole(old, {"rows": []}))
    family = next(row["family"] for row in old["rows"] if row["op"] == "speed")
    failed = {"rows": [{"op": "verify", "family": family, "passed": False}]}
    with pytest.raises(SystemExit, match=family):
        gpu.gates.check_whole(gpu.recorder.extend_whole(old, failed))
    for verdict, reported in (({"commit": "a"}, True), ({"commit": "b"}, False), ({"passed": False}, False)):
        gpu.record.write(tmp_path / "kimi_linear-verify.json", {"commit": "a", "passed": True, **verdict})
        gpu.record.write(tmp_path / "kimi_linear-speed.json", {"commit": "a", "device": "d"})
        found = gpu.gates.merge_whole(tmp_path, {})
        assert ("speed" in {row["op"] for row in found["rows"]}) is reported
        assert bool(found["failures"]) is not reported and found["device"] == "d"


# As torchrun, which begins its workers in sessions of their own.
SLEEPER = """
import pathlib, subprocess, time
worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path(__file__).with_name(f"{worker.pid}.pid").write_text(str(worker.pid))
time.sleep(60)
"""


def runs(pid: int) -> bool:
    """Whether a process runs; an ended one that nobody has waited for does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.exhaustive
def test_jobs_end_in_time_and_go_on(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that hangs is killed with what it has begun, one that this commit has done is not run again, one too late
    is not begun."""
    monkeypatch.setenv("HARTS_COMMIT", "now")
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    environment = {"PYTHONPATH": str(tmp_path)}
    for commit in ("before", "now"):
        gpu.record.write(tmp_path / f"{commit}.json", {"commit": commit, "failures": {}})
    hangs = gpu.processes.Job("hangs", "s", 2.5, (), module="sleeper")
    done = gpu.processes.Job("done", "s", 0.5, (), (tmp_path / "now.json",), module="sleeper")
    stale = gpu.processes.Job("stale", "s", 2.5, (), (tmp_path / "before.json",), module="sleeper")
    arguments = (tmp_path, environment, lambda: None)
    wrong = gpu.processes.run_jobs([hangs, done, stale], 3, time.monotonic() + 60, *arguments)
    assert set(wrong) == {"hangs", "stale"} and set(wrong.values()) <= {"exit -9", "exit -10"}
    begun = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert begun and not any(map(runs, begun))
    assert gpu.processes.run_jobs([hangs, done], 3, time.monotonic() + 1, *arguments) == {
        "hangs": "not begun: no time left"
    }


def test_breakdown_of_a_step() -> None:
    """Kernels by kind, launches and waits inside forwards and backwards and outside, and time without a kernel."""
    from benchmarks.gpu.whole.breakdown import INSIDE, Event, breakdown

    ms = 1_000_000
    events = [
        Event(INSIDE, False, 10 * ms, 50 * ms),
        Event(INSIDE, True, 12 * ms, 40 * ms),
        Event("cudaLaunchKernel", False, 11 * ms, ms),
        Event("cuLaunchKernelEx", False, 12 * ms, ms),
        Event("cudaLaunchKernel", False, 70 * ms, ms),
        Event("cudaStreamSynchronize", False, 20 * ms, ms),
        Event("cudaStreamSynchronize", False, 80 * ms, ms),
        Event("cudaMemcpyAsync", False, 81 * ms, ms),
        Event("nvjet_sm90_tst_128x248", True, 10 * ms, 4 * ms),
        Event("_fused_norm_backward", True, 12 * ms, 4 * ms),  # beside the product, on another stream
        Event("chunk_kda_bwd_kernel_intra", True, 20 * ms, 3 * ms),
        Event("cutlass::GemmUniversal<GroupProblemShape>", True, 23 * ms, 2 * ms),
        Event("who_knows", True, 25 * ms, 1 * ms),
    ]
    found = breakdown(events)
    assert found["kernels_ms"] == {"rule": 3, "fused": 4, "grouped products": 2, "products": 4, "other": 1}
    assert (found["kernel_ms"], found["span_ms"], found["idle_ms"]) == (14, 16, 4)
    assert (found["launches"], found["launches_inside"]) == (3, 2)
    assert (found["synchronisations"], found["synchronisations_inside"], found["copies"]) == (2, 1, 1)
    assert list(found["other"]) == ["who_knows"]


def test_floor_of_a_step() -> None:
    """Products of a forward, its recomputation and a backward; bytes of what stands between; one accumulation."""
    from benchmarks.gpu.whole.floor import Machine, PerRow, floor_seconds

    found = floor_seconds(
        PerRow(operations=100, bytes=10, head=1000), Machine(operations=1e6, bytes=1e5),
        rows=50, labels=7, microbatches=2, parameters=300, checkpointing=True, measured=0.25,
    )  # fmt: skip
    assert found["products"] == pytest.approx((4 * 100 * 50 + 4 * 1000 * 7) / 1e6)
    assert found["bytes"] == pytest.approx((4 * 10 * 50 + 2 * 300 * 4) / 1e5)
    assert found["total"] == pytest.approx(found["products"] + found["bytes"] + 0.25)


@pytest.mark.exhaustive
def test_a_step_in_dry_form(gpu: Any, tmp_path: Path) -> None:
    """A step runs on the CPU, shared and not, and the record takes its rows unless their losses differ."""
    out, rows = tmp_path / "step.json", ["0-together", "0-never", "1-old-kept"]
    command("step", "ling-3.0-tiny", "--out", out, "--dry-run", "--host", *SHAPES, "--fused", "auto", "--rows", *rows)
    found = gpu.record.read(out)
    assert not found["failures"] and [row["sharing"] for row in found["rows"]] == ["always", "never", "always"]
    assert found["rows"][0]["rows_per_batch"] == 4 and found["rows"][2]["scoring_kept"] == 1
    row = found["rows"][0]
    assert row["seconds"] >= row["forward_backward_seconds"] > 0 and row["floor_seconds"] > 0
    assert row["host"]["own"] and row["microbatches"] == 1
    record = gpu.recorder.collect_step(found)
    gpu.gates.check_step(record)
    with pytest.raises(SystemExit, match="nothing is reported"):
        gpu.gates.check_step({**record, "rows": [*record["rows"], {**row, "entropy": 2 * row["entropy"]}]})
    assert gpu.recorder.extend_step(record, record)["rows"] == record["rows"]
