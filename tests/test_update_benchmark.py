"""benchmarks/update: which sides run where, what a record of several calls holds, and a call that goes on."""

import json
from types import SimpleNamespace

import pytest
from shared_data import shape_file

from benchmarks.update import __main__ as update
from benchmarks.update import merging, workloads
from harts_hf.bench.sides import COLLAPSED, PACKED, SORTED, STOCK, TREE

SHAPES = shape_file("tot_game24").parent


def row(step, seconds, *, passed=True, **more):
    """A step of ``miniswe_b_drop`` as JSON."""
    return {
        "model": "m", "workload": "miniswe_b_drop", "variant": "plain", "step": step, "groups": [f"g{step}"],
        "trajectories": 3, "tokens": 100 * (step + 1), "unique_tokens": 10, "seconds": seconds, "planner_share": 0.01,
        "peak_memory": 5, "sides": {}, **more,
        "parity": {
            "differences": {"packed 4": {"gradients": 0.03, "entropy": 0.0}}, "reference": "packed 8", "flips": {},
            "from_packed": {"packed 4": 0.03, "tree 8": 0.1 if passed else 0.2}, "passed": passed, "failures": [],
        },
    }  # fmt: skip


def part(commit, *rows):
    """A result file."""
    return {"device": "d", "versions": {}, "commit": commit, "failures": {}, "rows": list(rows)}


def test_sides_of_a_step():
    """Long sides run where the workload says."""
    assert workloads.kinds_of(workloads.Task("miniswe_b_drop", 0)) == (STOCK, SORTED, PACKED, TREE)
    assert workloads.kinds_of(workloads.Task("miniswe_b_drop", 1)) == (PACKED, TREE)
    assert workloads.kinds_of(workloads.Task("vmcts_dafny_bst", 2)) == (TREE,)
    assert workloads.kinds_of(workloads.Task("tot_game24", 0)) == (PACKED, COLLAPSED, TREE)
    wide, plain = (workloads.steps_in(SHAPES, "tot_game24", dry=False, variant=name)[0] for name in ("three", "plain"))
    assert (len(wide), len(plain)) == (9, 3) and [group.name for group in wide[:3]] == [group.name for group in plain]


def test_tasks_by_name():
    """A workload, a step, or steps from one to another; others are named."""
    found = workloads.tasks_of(["anyswe_a", "vmcts_dafny_bst:0@adamw"], SHAPES, dry=False)
    assert found == [*(workloads.Task("anyswe_a", n) for n in (0, 1)), ("vmcts_dafny_bst", 0, "adamw")]
    with pytest.raises(SystemExit, match=r"expected a variant of plain, .*, got 'sgd'"):
        workloads.tasks_of(["anyswe_a@sgd"], SHAPES, dry=False)
    assert [task.step for task in workloads.tasks_of(["miniswe_b_drop:2-4"], SHAPES, dry=False)] == [2, 3, 4]
    with pytest.raises(SystemExit, match=r"expected a workload of miniswe_b_drop, .*, got 'swe'"):
        workloads.tasks_of(["swe"], SHAPES, dry=False)
    with pytest.raises(SystemExit, match="steps of anyswe_a from 0 to 1, got 1-2"):
        workloads.tasks_of(["anyswe_a:1-2"], SHAPES, dry=False)


def test_a_record_of_several_calls():
    """Each step as measured last with its commit, totals in front; a failed parity check refuses all.

    What stock trainers took stays where they were not run again, with the verdict of that time.
    """
    old = merging.merge([part("a", row(0, 9.0, stock_seconds=50.0, stock_peak_memory=7), row(1, 1.0))], {})
    new = merging.merge([part("b", row(0, 2.0, stock_seconds=20.0, stock_peak_memory=7))], old)
    total, first, second = new["rows"]
    assert (first["seconds"], first["commit"], second["commit"]) == (2.0, "b", "a")
    assert total["seconds"] == 3.0 and total["commits"] == ["a", "b"] and total["groups"] == ["g0", "g1"]
    assert total["speedup_stock"] == pytest.approx(20.0 * 3 / 3.0) and total["scaled"] == {"stock": ["g0"]}
    lacking = row(2, 1.0)
    lacking["parity"] |= {"differences": {"packed 8": {"gradients": 0.3, "entropy": 0.0}}, "reference": "stock 1"}
    lacking["parity"] |= {"from_packed": {"tree 8": 0.1}}
    measure = row(3, 1.0)
    measure["parity"]["differences"] = {"stock 1, rounded again": {"gradients": 0.11, "entropy": 0.0}}
    found = merging.merge([part("b", lacking, measure)], old)["rows"][3]
    assert found["step"] == 2 and found["parity"]["lent"] == {"gradients": 0.11, "sharing": 0.03}
    measure["parity"]["differences"]["stock 1, rounded again"]["gradients"] = 0.09
    with pytest.raises(SystemExit, match=r"refused: miniswe_b_drop 2: .*gradients of packed 8 differ from stock 1's"):
        merging.merge([part("b", lacking, measure)], old)
    stock = {"sides": {"stock": {}}, "stock_seconds": 50.0, "stock_peak_memory": 7}
    again = merging.merge([part("b", row(0, 2.0))], merging.merge([part("a", row(0, 9.0, **stock))], {}))["rows"][1]
    assert (again["commit"], again["seconds"], again["speedup_stock"]) == ("b", 2.0, 25.0)
    assert again["stock_of"]["commit"] == "a" and again["sides"] == stock["sides"]
    again["stock_of"]["parity"] |= {"passed": False, "failures": ["entropy"]}
    with pytest.raises(SystemExit, match=r"refused: miniswe_b_drop 0: \['entropy'\]"):
        merging.merge([part("c", row(1, 1.0))], {"rows": [again]})
    with pytest.raises(SystemExit, match=r"refused: miniswe_b_drop 0: .*sharing moves the gradient of tree 8"):
        merging.merge([part("c", row(0, 1.0, passed=False))], old)


def test_an_ideal_with_what_a_later_sweep_says_of_microbatches():
    """Time that rows were thought to take is a constant of microbatches, of which the tree has fewer."""
    side = {"setting": "packed 8", "microbatches": {"packed 8": 3}}
    found = row(
        0, 0.5, baseline_seconds=4.0, microbatch_seconds={"packed": 0.0}, work_ratios={"rows": 10.0},
        ideal_seconds={"rows": 0.3, "optimizer": 0.1, "microbatches": 0.0}, ideal=10.0, efficiency=0.8,
        sides={"packed": side, "tree": {"setting": "tree 8", "microbatches": {"tree 8": 1}}},
    )  # fmt: skip
    restated = merging.restated(found, {"packed": 0.1})
    assert restated["ideal_seconds"] == pytest.approx({"rows": 0.27, "optimizer": 0.1, "microbatches": 0.1})
    assert restated["efficiency"] == pytest.approx(0.94) and restated["ideal"] == pytest.approx(4.0 / 0.47)
    bounded = merging.with_bounds(restated)  # 3 x 0.1 s shared like rows, not 0.1 s whole
    assert (bounded["ideal_at_most"], bounded["efficiency_at_least"]) == pytest.approx((10.0, 0.8))
    assert merging.restated({**found, "microbatch_seconds": {"packed": 0.2}}, {"packed": 0.1})["ideal"] == 10.0


@pytest.mark.slow
def test_a_call_goes_on_where_another_ended(tmp_path, monkeypatch, capsys):
    """In dry form, on the CPU: a second call with the same commit runs nothing again."""
    monkeypatch.setenv("HARTS_COMMIT", "now")
    out = tmp_path / "out.json"
    command = ["run", "anyswe_a:0", "--dry-run", "--shapes", str(SHAPES), "--out", str(out), "--steps", "1"]
    update.main([*command, "--sides", "tree", "--budgets", "512"])  # timed alone, compared all the same
    (found,) = json.loads(out.read_text())["rows"]
    assert found["parity"]["passed"] and found["parity"]["reference"].startswith("packed ")
    assert found["seconds"] > 0 and "speedup" not in found and found["workload"] == "anyswe_a"
    monkeypatch.setattr(update, "measure_step", lambda *_, **__: pytest.fail("it was run again"))
    update.main(command)
    monkeypatch.setattr(update, "time", SimpleNamespace(monotonic=iter(range(0, 10**6, 1000)).__next__))
    update.main([*command[:1], "anyswe_a:1", *command[2:]])
    assert "no time left for Task(workload='anyswe_a', step=1, variant='plain')" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["rows"]) == 1
    # Of another commit: kept, and not taken for done.
    monkeypatch.setenv("HARTS_COMMIT", "later")
    monkeypatch.setattr(update, "time", SimpleNamespace(monotonic=iter(range(0, 10**6, 1000)).__next__))
    update.main(command)
    assert "no time left for Task(workload='anyswe_a', step=0" in capsys.readouterr().out
    assert [row["commit"] for row in json.loads(out.read_text())["rows"]] == ["now"]
    out.write_text('{"rows": [{"model": "m"}]}')
    for path in (out, tmp_path / "nowhere.json"):
        with pytest.raises(SystemExit, match=r"expected a result file of `benchmarks.update run`, got"):
            update.main(["record", str(path)])


def test_figures_of_the_record_in_the_documents():
    """Tables of docs/performance.md are the record's, and the README's headline too; every step passed."""
    found = json.loads(update.RESULTS.read_text())
    root = update.RESULTS.parents[2]
    page, readme = ((root / name).read_text() for name in ("docs/performance.md", "README.md"))
    assert [line for line in update.written(found) if line not in page] == []
    names = ("model", "workload", "variant", "step")
    rows = {tuple(map(row.get, names)): row for row in found["rows"]}
    total, first = (rows["ling-3.0-tiny", "miniswe_b_drop", "plain", step] for step in (None, 0))
    assert f"**{total['speedup']:.1f}x** the best" in readme and f"**{total['speedup_stock']:.0f}x** stock" in readme
    dense, mixture = (rows[name, "miniswe_b_drop", "plain", None] for name in ("qwen3.5-4b", "qwen3.5-moe-8b"))
    words = " ".join(readme.split())
    # The best without sharing ran every step; stock TRL some, whose gain, and part of the tokens, is told.
    assert set(total["scaled"]) == {"stock"} and "both timed on every group" in words
    steps = [row for row in found["rows"] if row.get("step") is not None]
    steps = [row for row in steps if all(row[name] == first[name] for name in names[:3])]
    ran = [row for row in steps if "stock_seconds" in row]
    gain = sum(row["stock_seconds"] for row in ran) / sum(row["seconds"] for row in ran)
    part = f"{sum(row['tokens'] for row in ran) / total['tokens'] * 100:.0f} % of the tokens"
    assert f"({part}: {gain:.1f}x there)" in words
    assert f"with {part}; over these the tree is {gain:.1f}x" in " ".join(page.split())
    scaling = json.loads(update.RESULTS.with_name("scaling_h200.json").read_text())
    for row in scaling["rows"]:
        sizes = f"| {row['tokens']:,} | {row['expanded_tokens']:,} | {row['microbatches']} |"
        assert f"{sizes} {row['seconds']:.2f} s |" in page
    assert scaling["parity"]["passed"] and len(scaling["rows"]) == 5
    verdict = json.loads(update.RESULTS.with_name("verify_h200.json").read_text())
    assert verdict["passed"] and f"{len(verdict['checks'])} checks, in {verdict['seconds']} s" in page
    for way, error in verdict["errors"].items():
        assert f"| {way} - float64 | {error['largest']:.2f} | {error['rms']:.3f} |" in page
    assert f"{first['speedup']:.1f}x and {first['speedup_stock']:.1f}x" in words
    assert f"on two groups {dense['speedup']:.1f}x, a mixture of 8 B {mixture['speedup']:.1f}x" in words
    assert all(row["parity"]["passed"] for row in found["rows"] if "step" in row)
    assert not any(one["parity"]["passed"] for one in found["planted"].values())
