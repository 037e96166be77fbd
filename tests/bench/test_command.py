"""`harts bench` on tiny models: every side is a real trainer, and a wrong tree gets no speed."""

import json

import pytest
from support import planted
from support.chat import byte_tokenizer
from support.models import tiny_model

from harts_hf.bench.clock import StepClock
from harts_hf.bench.comparing import Comparison
from harts_hf.bench.stages import StageClock
from harts_hf.cli.main import main
from harts_hf.modeling import forwards
from harts_hf.runtime import job

SHAPE = {"parent": [-1, 0, 0, 1], "length": [40, 20, 30, 15], "sample_node": [3, 2, 1, 3]}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Two groups of four trajectories: one ends inside another, one is there twice."""
    path = tmp_path_factory.mktemp("shapes") / "shapes.jsonl"
    path.write_text("".join(json.dumps({"group": name, **SHAPE}) + "\n" for name in "ab"))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The configuration of a tiny dense hybrid."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_5_text").config.save_pretrained(folder)
    return folder


def run(capsys, *arguments):
    """Exit status and what was printed."""
    status = main(["bench", *map(str, arguments)])
    return status, capsys.readouterr()


FEW = ("--batch-sizes", 1, "--budgets", 512, "--steps", 1, "--no-checkpointing", "--max-groups", 1)


def test_messages_are_rendered_by_the_models_tokenizer(tmp_path, monkeypatch, capsys):
    """Without ``--tokenizer``; what became of the conversations is said before anything is timed."""
    config = tiny_model("qwen3_5_text").config
    tokenizer = byte_tokenizer()
    config.vocab_size = len(tokenizer)
    config.save_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "9?"}, {"role": "assistant", "content": "No."}] * 2
    (tmp_path / "m.jsonl").write_text(json.dumps({"task": "a", "messages": messages}) + "\n")
    seen = []

    def measured(step, *_, **__):
        seen.append((step.rollouts, step.tokenizer))
        raise ValueError("measured")

    monkeypatch.setattr("harts_hf.bench.measure.measure_step", measured)
    status, output = run(capsys, "--model", tmp_path / "model", tmp_path / "m.jsonl", *FEW)
    assert status == 2 and "messages need a tokenizer" in output.err and not seen
    tokenizer.save_pretrained(tmp_path / "model")
    status, output = run(capsys, "--model", tmp_path / "model", tmp_path / "m.jsonl", *FEW)
    assert status == 2 and "expected a tokenizer with a pad or an end token" in output.err and not seen
    tokenizer.eos_token = "z"
    tokenizer.save_pretrained(tmp_path / "model")
    status, output = run(capsys, "--model", tmp_path / "model", tmp_path / "m.jsonl", *FEW)
    assert status == 2 and "measured" in output.err
    assert "rollouts: 2 samples of 1 conversation (messages), one per turn; 1 group" in output.out
    ((rollouts, found),) = seen
    assert len(rollouts.token_ids) == 2 and found.get_vocab() == tokenizer.get_vocab()


@pytest.mark.slow
def test_every_side_trains_the_same_and_is_timed(model, shapes, tmp_path, capsys, monkeypatch):
    """A row names all that the speed rests on; the file and the picture are written."""
    clocks, scoring, watch, begin = [], [], StepClock.watch, StageClock.begin
    monkeypatch.setattr(StepClock, "watch", lambda self, trainer: (clocks.append(self), watch(self, trainer)))
    now = lambda: any(clock.is_preparing for clock in clocks)  # noqa: E731
    monkeypatch.setattr(StageClock, "begin", lambda self, stage: (scoring.append(now()), begin(self, stage)))
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    status, output = run(
        capsys, "--model", model, shapes, *FEW, "--batch-sizes", 1, 2, "--json", out, "--plot", plot, "--old-log-probs"
    )
    assert status == 0, output.out + output.err
    (row,) = json.loads(out.read_text())["rows"]
    sides = row["sides"]
    assert list(sides) == ["stock", "stock sorted", "packed", "collapsed", "tree"] and not row["failures"]
    assert (row["tokens"], row["unique_tokens"]) == (280, 105) and row["parity"]["passed"]
    assert set(sides["stock"]["tried"]) == {"stock 1", "stock 2"}
    # All of the others' rows at once: their losses are those of one row at a time, which stock TRL is compared in.
    assert [sides[kind]["rows_per_batch"] for kind in ("packed", "collapsed", "tree")] == [4, 4, 4]
    # Rows of the schedules: nothing shared, all but what another begins with, every token once.
    assert sides["packed"]["microbatches"] == {"packed 512": 1}
    assert row["work_ratios"]["rows"] == pytest.approx(280 / 105)
    assert row["work_ratios_collapsed"]["rows"] == pytest.approx(145 / 105)
    # Every token but the first of a row is trained: 276 labels, 143 with nested rows collapsed, 104 on the tree.
    assert row["work_ratios"]["head"] == pytest.approx(276 / 104)
    assert row["work_ratios_collapsed"]["head"] == pytest.approx(143 / 104)
    for side in sides.values():
        assert len(side["seconds_of_steps"]) == 1
        assert side["phases"]["forward_backward"] > 0 and side["phases"]["old_log_probs"] > 0
        assert sum(side["phases"].values()) == pytest.approx(side["seconds_of_steps"][0])
        assert side["clip_fraction"] == 0  # the ratio of a policy that has not moved
    assert sides["tree"]["phases"]["planning"] > 0 and sides["stock"]["phases"]["planning"] == 0
    assert row["speedup"] == pytest.approx(row["baseline_seconds"] / row["seconds"])
    assert row["efficiency"] == pytest.approx(row["speedup"] / row["ideal"])
    assert all(sides[kind]["stages"]["rule"] > 0 for kind in ("packed", "collapsed", "tree"))
    assert scoring and not any(scoring)  # stages are of the step, not of old log-probs before it
    assert row["clipping"]["stock"]["clipped"] == 0 and 0 < row["clipping"]["stock"]["rms"] < 1e-4
    # Rounding, not nothing: each side has computed its own gradient.
    assert all(0 < one["gradients"] < 1e-4 for one in row["parity"]["differences"].values())
    assert next(iter(row["parity"]["differences"])) == "stock 1, rounded again"
    assert "512 tokens" in output.out and ("1 row " in output.out or "2 rows" in output.out)
    assert "efficiency" in output.out and "parity: gradients differ from stock 1's by" in output.out
    assert plot.stat().st_size > 10_000


def lost_in_whole_steps(monkeypatch):
    """Gradients of half their size on the tree, but not on the trajectories that are compared before."""
    verdict, collect, is_timed = Comparison.verdict, job.collect, []

    def compared(*args):
        found = verdict(*args)
        is_timed.append(True)
        return found

    def lost(gradients, indices, num_rows):
        found = collect(gradients, indices, num_rows)
        return 0.5 * found if is_timed and num_rows == 105 else found

    monkeypatch.setattr(Comparison, "verdict", compared)
    monkeypatch.setattr(job, "collect", lost)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [planted.conv_over_branches, planted.one_label_per_row, lost_in_whole_steps])
def test_no_speed_of_a_tree_that_trains_something_else(plant, model, shapes, tmp_path, monkeypatch, capsys):
    """Exit status 1, the reason, and no speed-up anywhere."""
    plant(monkeypatch)
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    status, output = run(
        capsys, "--model", model, shapes, *FEW, "--sides", "packed", "stock", "tree", "--json", out, "--plot", plot
    )
    assert status == 1 and "REFUSED" in output.out and "x" not in output.out.split("REFUSED")[1].split("\n")[0]
    (row,) = json.loads(out.read_text())["rows"]
    assert not row["parity"]["passed"] and not [key for key in row if key.startswith("speedup")]
    assert all(not side["seconds_of_steps"] for side in row["sides"].values()) and not plot.exists()


@pytest.mark.slow
def test_a_fault_that_packed_shares_with_the_tree(model, shapes, monkeypatch, capsys):
    """How far such a baseline is from stock TRL is no measure of roundings; nor is stock in batches filled up."""
    monkeypatch.setattr(forwards, "token_logprobs", scaled_logprobs(forwards.token_logprobs))
    sides = ("--sides", "stock", "packed", "tree")
    status, output = run(capsys, "--model", model, shapes, *FEW, "--batch-sizes", 1, *sides)
    assert status == 1 and "gradients of packed 280 differ from stock 1's by" in output.out
    monkeypatch.undo()
    status, output = run(capsys, "--model", model, shapes, *FEW, "--batch-sizes", 3, "--sides", "stock", "tree")
    assert status == 0 and "gradients differ from stock 1's by" in output.out


def scaled_logprobs(function):
    """Log-probs whose gradients are 2 % too small."""

    def scaled(*args, **kwargs):
        found = function(*args, **kwargs)
        return found._replace(log_prob=found.log_prob * 0.98 + found.log_prob.detach() * 0.02)

    return scaled


@pytest.mark.slow
def test_a_recipe_with_the_time_of_its_sampling(tmp_path, capsys):
    """Its rollouts are collected once; the step is told with and without the time that took."""
    out = tmp_path / "out.json"
    small = ("--num_generations", 4, "--branching", 2, 2, "--per_device_train_batch_size", 4, "--max_turns", 2)
    status, output = run(capsys, "recipes/tiny_grpo.yaml", *FEW, "--sides", "packed", "tree", "--json", out, *small)
    assert status == 0, output.out + output.err
    found = json.loads(out.read_text())
    assert found["sampling_seconds"] > 0 and found["rows"][0]["workload"] == "tiny_grpo"
    assert found["rows"][0]["sharing_ratio"] > 1
    assert "sampling took" in output.out and "with it, the step is" in output.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rollouts.jsonl",), "expected --model with a rollout file, or a recipe (.yaml), got 'rollouts.jsonl' alone"),
        (("--model", ".", "rollouts.jsonl"), "rollouts.jsonl: no such file"),
        (("--model", "nope", "rollouts.jsonl"), "expected --model to be a model's folder or name, got 'nope'"),
        (("recipes/tiny_ppo.yaml",), "expected a recipe with trainer: grpo, got 'ppo'"),
        (("recipes/tiny_grpo.yaml", "--lora", "4"), "expected --lora with --model only: a recipe has fields for it"),
        (("recipes/tiny_grpo.yaml", "--max_step", "4"), "unknown key 'max_step'"),
    ],
)
def test_recipes_that_cannot_be_benchmarked(arguments, message, capsys):
    """Refused before anything is sampled."""
    status, output = run(capsys, *arguments)
    assert status == 2 and message in output.err


def test_arguments_that_cannot_be_used(model, shapes, monkeypatch, capsys):
    """Groups that are not there, options of nothing, several processes."""
    status, output = run(capsys, "--model", model, shapes, "--groups", 0, 2)
    assert status == 2 and "expected groups from 0 to 1, got 2" in output.err
    status, output = run(capsys, "--model", model, shapes, "--groups", 1, 1)
    assert status == 2 and "expected each group once, got 1 twice" in output.err
    status, output = run(capsys, "--model", model, shapes, "--max-groups", 0)
    assert status == 2 and "expected at least one group, got 0" in output.err
    status, output = run(capsys, "--model", model, shapes, "--plot", "same.png", "--json", "same.png")
    assert status == 2 and "expected another file for --plot than for --json, got 'same.png'" in output.err
    status, output = run(capsys, "--model", model, shapes, "--sides", "tree")
    assert status == 2 and "at least one of stock, stock sorted, packed" in output.err
    # What the tree refuses, before stock trainers have run.
    status, output = run(capsys, "--model", model, shapes, "--budgets", 1)
    assert status == 2 and "at least 64" in output.err and "trying" not in output.err
    status, output = run(capsys, "--model", model, shapes, "--learning_rate", "1")
    assert status == 2 and "unrecognized arguments: --learning_rate 1" in output.err
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, output = run(capsys, "--model", model, shapes)
    assert status == 2 and "expected one process, got WORLD_SIZE=2" in output.err
