"""benchmarks/ranks: which calls there are, what result files allow to say, and jobs in dry form over gloo."""

import copy
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shared_data import shape_file
from support.launching import run_processes
from torch import nn

from benchmarks.gpu import processes
from benchmarks.ranks import __main__ as ranks
from benchmarks.ranks import calls, judging, model, recorder
from benchmarks.ranks.jobs import BACKENDS, Job, jobs_for, waves_of
from benchmarks.ranks.rows import rows_at_once
from benchmarks.ranks.sketches import difference, gradient_of, moved, size, sketch, value_of

SHAPES = shape_file("tot_game24").parent
SCRIPT = Path(__file__).parent / "distributed" / "run_ranks_job.py"


# ---- jobs and calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_jobs_of_a_machine(gpus, capsys):
    """What a row is judged by runs before it or beside it, its proof before; no GPU has two jobs at once."""
    jobs = jobs_for(gpus)
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names) and [Job.parse(name) for name in names] == jobs
    waves = waves_of(jobs, gpus)
    wave_of = {job.name: number for number, wave in enumerate(waves) for job in wave}
    assert sum(map(len, waves)) == len(jobs) and wave_of.keys() == set(names)
    for wave in waves:
        assert sum(job.processes for job in wave) <= gpus
        assert len(wave) == 1 or all(job.kind != "kill" for job in wave)
    for job in jobs:
        assert job.kind in ("kill", "large", "stock") or wave_of[job.one.name] <= wave_of[job.name]
        if job.kind == "time" and job.backend != "one":
            assert wave_of[f"parity-{job.backend}-{job.processes}-miniswe1"] < wave_of[job.name]
    assert names[0].startswith("parity-one") and {job.backend for job in jobs} == set(BACKENDS)
    ranks.main(["plan", "--gpus", str(gpus)])
    printed = capsys.readouterr().out
    assert all(name in printed for name in names) and "none of these jobs has run on GPUs" in printed
    with pytest.raises(ValueError, match="expected 2, 4 or 8 GPUs, got 3"):
        jobs_for(3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fsdp2", "expected a job such as"),
        ("speed-fsdp2-8-tau50", "expected a kind of parity, .*, got 'speed'"),
        ("time-fsdp-8-tau50", "expected a backend of one, .*, got 'fsdp'"),
        ("time-fsdp2-8-tau", "expected a workload of .*, got 'tau'"),
        ("time-fsdp2-3-tau50", "expected 2, 4 or 8 processes, or one-1"),
        ("time-one-2-tau50", "expected 2, 4 or 8 processes, or one-1"),
        ("kill-one-1-miniswe1", "expected several processes for kill"),
        ("large-ddp-8-miniswe1", "expected zero3 or fsdp2"),
    ],
)
def test_no_such_job(name, said):
    """It is said what was expected."""
    with pytest.raises(ValueError, match=said):
        Job.parse(name)


def test_a_call_goes_on_where_one_ended(tmp_path, monkeypatch, capsys):
    """Side by side, each on GPUs of its own; not what another host has done, nor what time is too short for."""
    begun = []

    def run_jobs(jobs, at_once, end, logs, environment, save):
        begun.append({job.name: (at_once, job.variables["CUDA_VISIBLE_DEVICES"]) for job in jobs})
        for job in jobs[:1]:
            job.results[0].write_text(json.dumps({"job": job.name, "commit": "c"}))
        save()
        return {job.name: "exit 1" for job in jobs[1:]}

    monkeypatch.setenv("HARTS_COMMIT", "c")
    monkeypatch.setattr(calls.signal, "signal", lambda *_: None)  # this process's stays
    monkeypatch.setattr(processes, "run_jobs", run_jobs)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    done = [{"job": "parity-one-1-miniswe1", "commit": "c"}, {"job": "kill-ddp-4-miniswe1", "commit": "b"}]
    (tmp_path / "earlier.json").write_text(json.dumps({"parts": done}))
    command = ["call", "--gpus", "4", "--shapes", str(SHAPES), "--out", str(tmp_path / "out")]
    command += ["--work", str(tmp_path / "work"), "--earlier", str(tmp_path / "earlier.json")]
    jobs = ["parity-one-1-miniswe1", "parity-ddp-2-miniswe1", "time-ddp-4-tau50", "parity-zero3-2-miniswe1"]
    with pytest.raises(SystemExit):
        ranks.main([*command, *jobs, "--seconds", "150"])
    assert begun == [{"parity-ddp-2-miniswe1": (2, "0,1"), "parity-zero3-2-miniswe1": (2, "2,3")}]
    found = [part["job"] for part in json.loads((tmp_path / "out" / "ranks_jobs.json").read_text())["parts"]]
    assert found == ["parity-ddp-2-miniswe1", "parity-one-1-miniswe1"]
    assert "left for a later call: time-ddp-4-tau50" in capsys.readouterr().out
    ranks.main([*command, *jobs])
    assert begun[1:] == [{"time-ddp-4-tau50": (1, "0,1,2,3")}, {"parity-zero3-2-miniswe1": (1, "0,1")}]


def test_what_a_call_refuses(tmp_path, monkeypatch):
    """Fewer GPUs than asked for, shapes that are not there, a folder that another call writes to; before it starts."""
    monkeypatch.setattr(calls, "run", lambda *_: pytest.fail("a job was started"))
    command = ["call", "--gpus", "4", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--shapes"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match=r"expected 4 GPUs \(--gpus\), got 2"):
        ranks.main([*command, str(SHAPES)])
    with pytest.raises(SystemExit, match=r"expected miniswe_b_drop\.jsonl\.gz, tau_airline_b\.jsonl\.gz in "):
        ranks.main([*command, str(tmp_path), "--dry-run"])
    for folder in ("work", "out"):
        with calls.alone_in(tmp_path / folder), pytest.raises(SystemExit, match=f"{folder}: another call runs"):
            ranks.main([*command, str(SHAPES), "--dry-run"])


# ---- sketches -------------------------------------------------------------------------------------------------------


def test_sketches_tell_how_far_tensors_are_apart():
    """All together, and kind by kind: a small kind's error is seen; what moved is a difference of sketches."""
    torch.manual_seed(0)
    names = {"layers.0.big.weight": (300, 200), "layers.1.big.weight": (300, 200), "layers.0.small": (50,)}
    before = [(name, nn.Parameter(torch.randn(shape))) for name, shape in names.items()]
    after = [(name, nn.Parameter(one.detach() + 0.01 * torch.randn(one.shape))) for name, one in before]
    assert gradient_of(before[0][1]) is None
    first, second = sketch(before, value_of), sketch(after, value_of)
    assert list(first) == ["layers.big.weight", "layers.small"]
    assert size(first) == pytest.approx(math.sqrt(120_050), rel=0.3)
    assert difference(second, first)[0] == pytest.approx(0.01, rel=0.5)
    assert size(moved(first, second)) == pytest.approx(0.01 * math.sqrt(120_050), rel=0.3)
    with torch.no_grad():
        before[2][1].mul_(1.5)  # 0.2 % of all together
    apart, kind = difference(sketch(before, value_of), first)
    assert kind == "layers.small" and apart == pytest.approx(0.5, rel=1e-6)
    assert difference({"layers.small": first["layers.small"]}, first) == (math.inf, "layers.big.weight")
    broken = {**first, "layers.small": [math.nan, *first["layers.small"][1:]]}
    assert difference(broken, first) == (math.inf, "layers.small")


# ---- judging --------------------------------------------------------------------------------------------------------


def step(side, role, seconds, ops=(), **more):
    """A step of a result file."""
    return {
        "side": side, "kind": side.split()[0], "role": role, "seconds": seconds, "inside": [0.9 * s for s in seconds],
        "peaks": [5 if side.startswith("tree") else 7] * len(seconds), "ops": ops, "op_seconds": [[]] * len(seconds),
        "held": [1], "with_gradients": [2], "loss": -0.02, "entropy": 11.0, "grad_norm": 8.0,
        "tree": {"planning_seconds": 0.01, "exchanged_bytes": 100.0, "exchange_seconds": 0.02}, **more,
    }  # fmt: skip


def part(job, steps, **more):
    """A result file."""
    found = Job.parse(job)
    return {
        "job": job, "kind": found.kind, "backend": found.backend, "processes": found.processes, "device": "d",
        "model": "m", "layers": 4, "dtype": "bfloat16", "workload": found.workload, "shapes": "s", "groups": [0],
        "trajectories": 8, "tokens": 2000, "unique_tokens": 100, "bounds": {"mean": 1.0, "path": 1.2}, "commit": "c",
        "versions": {}, "finished": True, "failures": {}, "gradients": {}, "parameters": {}, "steps": steps, **more,
    }  # fmt: skip


def parity_part(job, gradient=1.0, parameter=1.0, **more):
    """A parity job whose sketches are scaled."""
    gradients = {"tree 1": {"a": [gradient, 2.0], "b": [1e-4, 0.0]}, "packed 1": {"a": [1.0, 2.0], "b": [1e-4, 0.0]}}
    parameters = {"before": {"a": [10.0, 10.0], "b": [1.0, 0.0]}, "after": {"a": [10.0, 11.0], "b": [parameter, 0.5]}}
    steps = [step("tree 1", "moved", [1.0])] * 3
    return part(job, steps, gradients=gradients, parameters=parameters, dtype="float32", **more)


@pytest.fixture
def parts():
    """One process, and two of FSDP2, which take 0.6 of its time; a rank has a dummy and waits."""
    ops = [[(1.0, False), (2.0, False)], [(1.0, False), (1.0, True)]]
    return [
        parity_part("parity-one-1-miniswe1"),
        parity_part("parity-fsdp2-2-miniswe1"),
        part("time-one-1-tau50", [step("tree 32768", "timed", [10.0], [[(3.0, False)]])]),
        part("time-fsdp2-2-tau50", [
            *[step("tree 32768", "timed", [5.0, seconds], ops) for seconds in (6.0, 7.0, 4.0)],
            step("packed 32768", "timed", [60.0, 66.0], ops), step("packed 65536", "timed", [90.0, 90.0], ops),
        ]),
        {"job": "kill-fsdp2-2-miniswe1", "kind": "kill", "seconds": 4.0, "passed": True},
    ]  # fmt: skip


def test_rows_beside_the_best_without_sharing_and_one_process(parts):
    """Speed-up, scaling over what the longest path allows, lost time, shares; bars that are met and that are not."""
    found = judging.judged(parts)
    one, two = found["rows"]
    assert "scaling" not in one and (two["seconds"], two["baseline"], two["speedup"]) == (6.0, "packed 32768", 11.0)
    assert two["gain"] == pytest.approx(10 / 6) and two["scaling"] == pytest.approx(10 / 6 * 1.2 / 2)
    assert two["lost"] == pytest.approx(1 - 2 / 3) and two["lost_by_rank"] == pytest.approx([0, 2 / 3])
    assert two["dummies"] == [0, 1] and two["exchanged_bytes"] == 100 and two["sharing_ratio"] == 20
    assert two["planner_share"] == pytest.approx(0.01 / 6)
    assert two["bars"] == {
        "speedup": True, "scaling": True, "lost": False, "planner_share": True, "peak_memory": True
    }  # fmt: skip
    assert found["parity"][0]["failures"] == [] and found["killed"][0]["seconds"] == 4.0


def test_stock_beside_trees(parts):
    """Of the same workload and number of processes, whatever its backend."""
    stock = part("stock-ddp-2-tau50", [step("stock 1", "timed", [120.0, 120.0])])
    rows = judging.judged([*parts, stock])["rows"]
    assert rows[1]["speedup_stock"] == 20.0 and "speedup_stock" not in rows[0]


@pytest.mark.parametrize(
    ("place", "broken", "said"),
    [
        (1, {"gradient": 1.01}, "gradients of tree 1 differ by 4.5e-03"),
        (1, {"parameter": 1.01}, r"parameters differ by 2.0e-02 \(b\) after 3 steps"),
        (1, {"gradient": math.nan}, "gradients of tree 1 differ by inf"),
        (0, {"gradient": 1.2}, "one process's own gradients differ"),
    ],
)
def test_another_gradient_is_refused(parts, place, broken, said):
    """So is one whose measure, one process's own, is too wide."""
    parts[place] = parity_part(parts[place]["job"], **broken)
    with pytest.raises(SystemExit, match=f"parity-fsdp2-2-miniswe1: .*{said}.*nothing is reported"):
        judging.judged(parts)


def test_bfloat16_parameters_are_compared_where_they_moved():
    """Half of a rounding apart is fine; further apart is not, nor weights that hardly moved."""
    one = {**parity_part("parity16-one-1-miniswe1"), "dtype": "bfloat16"}
    two = {**parity_part("parity16-ddp-2-miniswe1", parameter=1.02), "dtype": "bfloat16"}
    (found,) = judging.judged([one, two])["parity"]
    assert found["parameters"][0] == pytest.approx(0.02 / math.sqrt(201))
    two["parameters"]["after"]["b"] = [1.2, 0.5]
    with pytest.raises(SystemExit, match=r"parameters differ by 1.4e-02 \(all\)"):
        judging.judged([one, two])
    for which in (one, two):
        which["parameters"]["after"] = {"a": [10.0, 10.01], "b": [1.0, 0.0]}
    with pytest.raises(SystemExit, match="too little to compare"):
        judging.judged([one, two])


def test_no_row_without_what_proves_it(parts):
    """Without parity of its backend and number of processes, or before a timed step, it is left out, others are not;
    other metrics and a kill that left something are refused."""
    unfinished = [parts[0], {**parts[1], "finished": False}, *parts[2:]]
    for some in (parts[2:], parts[1:], unfinished):
        found = judging.judged(some)
        assert [row["job"] for row in found["rows"]] == ["time-one-1-tau50"] and not found["parity"]
        assert found["left_out"][-1] == "time-fsdp2-2-tau50: no parity-fsdp2-2 beside it that passed"
    assert found["left_out"][0] == "parity-fsdp2-2-miniswe1: it or parity-one-1-miniswe1 did not end"
    for place, other in ((2, 3), (3, 2)):
        begun = copy.deepcopy(parts)
        begun[place]["steps"] = [{**begun[place]["steps"][0], "role": "warm"}]
        found = judging.judged(begun)
        assert [row["job"] for row in found["rows"]] == [parts[other]["job"]] and "scaling" not in found["rows"][0]
        assert found["left_out"] == [f"{parts[place]['job']}: it ended before a timed step"]
    for place, said in ((2, "other metrics than t"), (3, "packed 32768 has other metrics than tree")):
        for metric, value in (("entropy", 11.1), ("loss", -0.021), ("grad_norm", 9.0), ("grad_norm", math.nan)):
            broken = copy.deepcopy(parts)
            broken[place]["steps"][-2 if place == 3 else -1][metric] = value
            with pytest.raises(SystemExit, match=said):
                judging.judged(broken)
    with pytest.raises(SystemExit, match=r"kill-fsdp2-2-miniswe1.*nothing is reported"):
        judging.judged([*parts[:4], {**parts[4], "passed": False}])
    in_float32 = [{**one, "dtype": "float32"} for one in parts[2:4]]
    for one, gradient in zip(in_float32, (1.0, 1.1), strict=True):
        one["gradients"] = {"tree 32768": {"a": [gradient]}}
    with pytest.raises(SystemExit, match="time-fsdp2-2-tau50: gradients of tree 32768 differ"):
        judging.judged([*parts[:2], *in_float32])


def test_record(parts, tmp_path, capsys):
    """Jobs lie beside what the record has, each as measured last; the picture is drawn; devices are not mixed."""
    record = tmp_path / "ranks.json"
    earlier = json.loads(ranks.RECORD.read_text())
    record.write_text(json.dumps({**earlier, "device": "d", "jobs": {}}))
    files = [tmp_path / "one.json", tmp_path / "call.json"]
    for file, content in zip(files, (parts[0], {"parts": parts[1:]}), strict=True):
        file.write_text(json.dumps(content))
    command = ["record", *map(str, files), "--record", str(record)]
    ranks.main(command)
    ranks.main(command)
    found = json.loads(record.read_text())
    assert found["rows"] == earlier["rows"]
    assert [len(found["jobs"][kind]) for kind in recorder.KINDS] == [2, 1, 1, 0, 0]
    printed = capsys.readouterr().out
    assert "not measured: parity-zero3-2-miniswe1, time-one-1-miniswe20, " in printed
    assert "bars not met: lost" in printed and "11.00x" in printed and (tmp_path / "ranks_scaling.png").exists()
    with pytest.raises(SystemExit, match="results of one kind of device, got d, e"):
        recorder.merged({}, [*parts, {**parts[0], "device": "e"}])
    with pytest.raises(SystemExit, match="results of one kind of device, got d, e"):
        recorder.merged({"device": "e"}, parts)


def test_predictions_of_the_page_are_the_record_s():
    """Layers that fit, and the planner's model of 64 GPUs; nobody says that four or eight were measured."""
    page = (Path(__file__).parents[1] / "docs" / "ranks.md").read_text()
    jobs = json.loads(ranks.RECORD.read_text())["jobs"]
    fits = {fit["gpus"]: fit for fit in jobs["fit"]}
    for backend, label in (("zero3", "ZeRO-3"), ("fsdp2", "FSDP2")):
        found = [(fits[gpus][backend]["layers"], fits[gpus][backend]["predicted_peak"] / 1e9) for gpus in (2, 4, 8)]
        cells = [f"{layers} ({peak:.0f} GB)" for layers, peak in found]
        assert f"| {label} | {' | '.join(cells)} |".replace(" (", " of 42 layers (", backend == "zero3") in page
    for row, words in zip(fits[8]["simulated"], ("{:.1f}x on 8 GPUs", "{:.1f}x on 64", "{:.1f}x on 64"), strict=True):
        assert words.format(row["speedup"]) in page and f"({row['of_bound']:.3f}" in page.replace("\n", " ")
    measured = [row for kind in ("rows", "parity", "killed", "large") for row in jobs[kind]]
    assert ("have not been tried" in page) == (max((row["processes"] for row in measured), default=2) <= 2)


def test_two_gpus_of_the_page_are_the_record_s():
    """How far gradient norms are from one GPU's, and what a step has outside forwards and backwards."""
    rows = json.loads(ranks.RECORD.read_text())["rows"]
    one = {(row["workload"], row["execution"]): row for row in rows if row["processes"] == 1}
    two = [row for row in rows if row["processes"] == 2 and row["variant"] == "plain"]
    norms = [(row["grad_norm"], one[row["workload"], row["execution"]]["grad_norm"]) for row in two]
    furthest = max(abs(a / b - 1) for pair in norms for a, b in zip(*pair, strict=True))
    apart = max(max(row["grad_norm"]) / min(row["grad_norm"]) - 1 for row in one.values())
    outside = [row["seconds"] - row["forward_backward_seconds"] for row in two if row["trajectories"] == 158]
    page = " ".join((Path(__file__).parents[1] / "docs" / "gpu.md").read_text().split())
    assert f"within {furthest:.2%} in every step (steps of one process differ by up to {apart:.1%})" in page.replace(
        " %", "%"
    )
    assert f"has {min(outside):.1f} to {max(outside):.1f} s outside forwards and backwards on two GPUs" in page


def test_what_the_model_says(tmp_path, capsys):
    """Every row says that it is an estimate; the bars are judged; the page has the table of the record."""
    ranks.main(["model", "--dry-run", "--shapes", str(SHAPES), "--out", str(tmp_path / "model.json")])
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2, 4] * 2 and (tmp_path / "model.png").exists()
    assert {row["said"] for row in rows} == {
        "estimated, not measured"
    } and "estimated, not measured: 4 plans on" in printed
    for row in rows:
        assert row["scaling"] == pytest.approx(
            row["gain"] / row["ranks"] * max(1, row["path_seconds"] / row["mean_seconds"]), rel=1e-3
        )
        assert row["bars"]["scaling"] == (row["scaling"] >= 0.9)
        assert ("lost" in row["bars"]) == (row["path_seconds"] <= row["mean_seconds"])
    recorded = json.loads(ranks.MODEL_RECORD.read_text())["rows"]
    page = (Path(__file__).parents[1] / "docs" / "ranks.md").read_text()
    assert model.table_of(recorded) in page
    for name, words in (("scaling", "plans on several"), ("lost", "of them lose"), ("planner_share", "meet the bar")):
        # One rank alone loses nothing and gains its all: counted, it would flatter the planner.
        judged = [row["bars"][name] for row in recorded if row["ranks"] > 1 and name in row["bars"]]
        assert f"{sum(judged)} of {len(judged)} {words}" in " ".join(page.split())
    with pytest.raises(SystemExit, match="expected shape files"):
        ranks.main(["model", "--shapes", str(tmp_path), "--out", str(tmp_path / "none.json")])


def test_rows_of_a_batch():
    """As many as divide a rank's and have their losses computed on the CPU, the same on every rank."""
    masks = [[1] * 300_000, *[[1]] * 23]
    found = [rows_at_once(SimpleNamespace(token_ids=[[0]] * 24, masks=masks), world) for world in (1, 2, 4, 8)]
    assert found == [3, 3, 3, 3]
    masks[0] = [1] * 50
    assert rows_at_once(SimpleNamespace(token_ids=[[0]] * 24, masks=masks), 8) == 3
    assert rows_at_once(SimpleNamespace(token_ids=[[0]] * 24, masks=[[1] * 2**21] * 24), 1) == 1


# ---- jobs in dry form -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
def test_parity_of_two_processes_and_a_planted_bug(tmp_path):
    """FSDP2's shards, put together, are one process's gradients and parameters; those of a rank that misses what
    another one computed are not."""
    files = [tmp_path / f"{name}.json" for name in ("one", "two", "wrong")]
    ranks.main(["run", "parity-one-1-miniswe1", "--dry-run", "--shapes", str(SHAPES), "--out", str(files[0])])
    for file, bugs in ((files[1], []), (files[2], ["values_of_a_rank_missing"])):
        run_processes(SCRIPT, "parity-fsdp2-2-miniswe1", SHAPES, file, *bugs)
    one, two, wrong = (json.loads(file.read_text()) for file in files)
    assert two["finished"] and two["steps"][0]["tree"]["global_placement"] and len(two["steps"][0]["ops"]) == 2
    (found,) = judging.judged([one, two])["parity"]
    # Measured: gradients 1e-6 of their kind's size, parameters' changes 8e-6.
    assert max(apart for apart, _ in found["gradients"].values()) < 1e-5 and found["parameters"][0] < 5e-5
    wrong = {**two, "gradients": {**two["gradients"], **wrong["gradients"]}}
    with pytest.raises(SystemExit, match="gradients of tree 64 differ by"):
        judging.judged([one, wrong])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_process_ends_all(tmp_path):
    """Real torchrun: an error, soon, and nobody is left; a job that ends well does not pass for one."""
    command = ["call", "--gpus", "2", "--dry-run", "--shapes", str(SHAPES), "--work", str(tmp_path / "work")]
    ranks.main([*command, "--out", str(tmp_path), "--seconds", "500", "kill-ddp-2-miniswe1"])
    (found,) = json.loads((tmp_path / "ranks_jobs.json").read_text())["parts"]
    assert found["passed"] and found["returncode"] == 1 and found["seconds"] < calls.KILL_LIMIT
    assert not found["left"] and not list(tmp_path.rglob("*.pid"))
    ends_well = processes.Job("j", "ranks", 60, (), (tmp_path / "j.json",), {}, "this")
    environment = {**os.environ, "PYTHONPATH": str(SHAPES)}
    (tmp_path / "work" / "logs" / "j.log").touch()
    wrong = calls.killed(
        Job.parse("kill-ddp-2-miniswe1"), ends_well, tmp_path / "work" / "logs", environment, math.inf
    )
    assert not wrong["passed"] and wrong["returncode"] == 0 and wrong["failures"]
