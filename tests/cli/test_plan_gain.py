"""The gain that `harts plan` says and draws: what each figure is, for which model, and in which steps."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from support.models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.registry import STEP_MODELS
from harts_hf.cli import plan_picture
from harts_hf.cli.main import main
from harts_hf.cli.plan_picture import drawable, plot_plan
from harts_hf.cli.plan_report import DEFAULT_ROW_BYTES, RowBytes, plan_report
from harts_hf.cli.plan_text import NOT_SHARED, factor, format_report, gigabytes, seconds
from harts_hf.modeling import handed_sizes
from harts_hf.modeling.costs import DEFAULT_WORK, count_work, scaled_cost
from harts_hf.modeling.memory import row_bytes
from harts_hf.planner import DEFAULT_COST, PlannerConfig, plan_step, plan_window
from harts_hf.rollouts import plot
from harts_hf.rollouts.recorded import Rollout, RolloutGroup, tree_of_groups
from harts_hf.runtime.ops import ops_of
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.window import TreeWindow

BYTES = RowBytes(kept=1000, running=100, running_prefix=10, source="a model")


def groups(*counts):
    """Groups of so many trajectories of 80 shared tokens and 40, 41, ... of their own."""
    made = []
    for group, count in enumerate(counts):
        rows = [[*range(80), *range(100 + 50 * i, 140 + 51 * i)] for i in range(count)]
        made.append(RolloutGroup(name=f"g{group}", rollouts=tuple(Rollout(token_ids=row) for row in rows)))
    return made


CUT = PlannerConfig(max_tokens_per_microbatch=128, sharing="always")


def test_each_figure_of_the_gain():
    """Tokens of trajectories and of the tree; seconds of the plan and of a bound; memory of the fullest moment."""
    made = groups(3, 2)
    report = plan_report(made, CUT, row_bytes=BYTES)
    gain, (schedule,) = report.gain, report.schedules
    own = [40, 41, 42, 40, 41]
    # The second group's trajectories are equal to two of the first.
    assert gain.tokens == (5 * 80 + sum(own), 80 + 40 + 41 + 42) and report.total["unique"] == gain.tokens[1]
    assert [row["unique"] for row in report.groups] == [80 + 40 + 41 + 42, 80 + 40 + 41]
    assert gain.seconds[1] == schedule.estimated_seconds < gain.seconds[0]
    # A microbatch of 128 rows is more than the longest trajectory of 122.
    assert gain.memory[0].total == 128 * 1100
    counts = schedule.memory_counts()
    peak = counts.peak_bytes({"graph_rows": 1000, "backward_rows": 100, "backward_prefix_rows": 10, "handed_bytes": 1})
    assert gain.memory[1].total == peak and gain.memory[1].kept > 0


def test_steps_of_some_groups():
    """Groups in their order, three steps of at most two; sums over steps, and the longest is shown."""
    made = groups(2, 1, 1, 1, 4)
    report = plan_report(made, CUT, groups_per_step=2)
    trees = [tree_of_groups(made[a:b]) for a, b in ((0, 2), (2, 4), (4, 5))]
    alone = [plan_step(tree, CUT, can_skip_scoring=True) for tree in trees]
    times = [schedule.estimated_seconds for schedule in alone]
    assert [schedule.digest() for schedule in report.schedules] == [schedule.digest() for schedule in alone]
    parts = [plan_report(made[a:b], CUT).gain.seconds[0] for a, b in ((0, 2), (2, 4), (4, 5))]
    assert report.gain.seconds[0] == pytest.approx(sum(parts)) and report.gain.seconds[1] == sum(times)
    assert report.schedule.estimated_seconds == max(times)
    # Before, a microbatch holds no more than a step, and a rank no more than its part of one.
    steps = [tree.num_expanded_tokens for tree in trees]
    wide = replace(CUT, max_tokens_per_microbatch=4096)
    before = plan_report(made, wide, groups_per_step=2, row_bytes=BYTES).gain.memory[0].total
    assert before == max(steps) * 1100
    two = plan_report(made, replace(wide, world_size=2), groups_per_step=2, row_bytes=BYTES).gain.memory[0].total
    assert two == -(-max(steps) // 2) * 1100
    text = format_report(report)
    assert "9 trajectories of 5 groups, trained once in 3 steps:" in text and "execution in the longest step" in text
    with pytest.raises(ValueError, match="expected --groups-per-step of at least 1, got 0"):
        plan_report(made, CUT, groups_per_step=0)


@pytest.mark.parametrize(("rows", "apart"), [(4096, False), (128, True)])
def test_one_microbatch_is_not_scored_apart(rows, apart):
    """As in training (`WindowRun`): its forward is the one that its backward uses."""
    config = PlannerConfig(max_tokens_per_microbatch=rows)
    skipped, needed = (plan_report(groups(3), config, scores=scores) for scores in (False, True))
    assert (needed.gain.seconds[1] > skipped.gain.seconds[1]) == apart
    assert ("scored before the loss" in format_report(needed)) == apart and needed.plan()["scores"] == apart
    window = TreeWindow(tree_of_groups(groups(3)), replace(config, execution="replay"))
    ops, num_scoring = ops_of(window, "train", Ranks())
    assert any(kind == "S" for kind, _ in ops[:num_scoring]) == apart


def test_words():
    """Factors say which way; digits are three; no number has the plural of another."""
    assert [factor(30, 1.5, "fewer", "more"), factor(2, 3, "less", "more"), factor(100, 100.1, "less", "more")] == [
        "20.0x fewer", "1.50x more", "the same",
    ]  # fmt: skip
    assert [seconds(0.01234), seconds(12345.6), gigabytes(7.812e9)] == ["0.0123 s", "12,346 s", "7.81 GB"]
    text = format_report(plan_report(groups(1), PlannerConfig()))
    assert text.startswith("1 trajectory of 1 group, trained once:")
    assert "1 microbatch of at most" in text and "on 1 rank," in text


@pytest.fixture(scope="module")
def models():
    """The models of the step benchmark, without weights."""
    made = {}
    for name, (family, options) in STEP_MODELS.items():
        with torch.device("meta"):
            config = AutoConfig.for_model(family, **options)
            made[name] = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made


def test_defaults_are_of_the_model_that_they_name(models):
    """Work, bytes of a row, bytes of a handed row: of Ling-3.0-tiny's configuration."""
    model = models["ling-3.0-tiny"]
    assert count_work(model) == DEFAULT_WORK and scaled_cost(model, "x").forward == DEFAULT_COST.forward
    rows, default = row_bytes(model, checkpointing=True, fused=True), DEFAULT_ROW_BYTES
    assert (rows.kept, rows.running, rows.prefix_running) == pytest.approx(
        (default.kept, default.running, default.running_prefix), abs=1
    )
    sizes = handed_sizes(model, torch.bfloat16)
    assert sizes.values["keys"] + sizes.gradients["keys"] == DEFAULT_COST.handoff_bytes_per_row


def test_work_of_another_model(models):
    """Of Qwen3.5-4B, by hand: the layers' weights, 8 layers of 16 heads of 256, 24 of 32 states of 128 x 128."""
    work = count_work(models["qwen3.5-4b"])
    mlp = 3 * 2560 * 9216
    attention = 2560 * (2 * 16 * 256 + 2 * 4 * 256) + 16 * 256 * 2560  # queries with gates, keys and values, output
    linear = 2560 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 32 * 128 * 2560  # q, k; v, z; a, b; output
    assert work.per_row == 32 * mlp + 8 * attention + 24 * linear
    assert (work.per_pair, work.per_linear_row) == (8 * 16 * 2 * 256, 24 * 32 * 128 * 128)
    cost = scaled_cost(models["qwen3.5-4b"], "qwen")
    assert cost.backward.rows == pytest.approx(DEFAULT_COST.backward.rows * work.per_row / DEFAULT_WORK.per_row)
    assert cost.source == "qwen, scaled from Ling-3.0-tiny on an H200"


def test_a_models_own_figures(tmp_path, capsys):
    """`--model` reads a configuration alone; figures are its own, measured times take the place of its."""
    config = tiny_model("qwen3_5_text").config
    config.save_pretrained(tmp_path / "tiny")
    row = {"group": "a", "token_ids": list(range(200))}
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    DEFAULT_COST.save(tmp_path / "cost.json")
    said = []
    for more in ([], ["--cost", str(tmp_path / "cost.json")]):
        options = ["--model", str(tmp_path / "tiny"), "--json", str(tmp_path / "out.json"), *more]
        assert main(["plan", str(tmp_path / "r.jsonl"), *options]) == 0
        said.append((capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())))
    text, content = said[0]
    assert "time: for tiny, scaled from Ling-3.0-tiny on an H200" in text and "memory: for tiny in bfloat16" in text
    assert f"tiny: qwen3_5_text, {tiny_model('qwen3_5_text').num_parameters():,} parameters" in text
    rows = row_bytes(tiny_model("qwen3_5_text").bfloat16(), checkpointing=True, fused=True)
    assert content["gain"]["memory_bytes"]["before"]["activations"] == 200 * (rows.kept + rows.running)
    assert content["gain"]["seconds"]["after"] < said[1][1]["gain"]["seconds"]["after"]
    assert "time: for Ling-3.0-tiny on an H200" in said[1][0] and NOT_SHARED not in said[1][0]
    rows = [{"group": "a", "token_ids": [*range(70 * turn), 0]} for turn in range(1, 12)]  # many calls, little saved
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main(["plan", str(tmp_path / "r.jsonl"), "--model", str(tmp_path / "tiny"), "--memory", "141GB"])
    assert f"the same\n  {NOT_SHARED}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere", "no such folder or file"), ("empty", "config"), ("llama.json", "expected a model of")],
)
def test_models_that_cannot_be_planned_for(name, reason, tmp_path, capsys):
    """No configuration, or one of no family that is known."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "llama.json").write_text('{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32}')
    (tmp_path / "r.jsonl").write_text('{"group": "a", "token_ids": [1, 2]}\n')
    assert main(["plan", str(tmp_path / "r.jsonl"), "--model", str(tmp_path / name)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world_size", "execution"), [(1, "replay"), (2, "nested"), (20, "auto")])
def test_picture(world_size, execution, tmp_path):
    """Names in any script, without a warning of a missing glyph."""
    config = PlannerConfig(max_tokens_per_microbatch=128, world_size=world_size, execution=execution)
    made = groups(3, 2)
    made[0] = RolloutGroup(name="問題 $x^2 \x1b\ud800\U0001f600", rollouts=made[0].rollouts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_plan(plan_report(made, config, groups_per_step=1), made[0], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 20_000


def test_bars_are_as_long_as_the_gain():
    """Two bars per quantity; that of memory on trees in two parts."""
    report = plan_report(groups(3, 2), CUT, row_bytes=BYTES)
    figure = Figure()
    plan_picture.draw_gain(figure, report)
    tokens, times, memory = ([bar.get_width() for bar in axes.patches] for axes in figure.axes)
    assert tokens[:2] == list(report.gain.tokens) and times[:2] == list(report.gain.seconds)
    before, after = report.gain.memory
    assert memory == [before.total, after.activations, after.kept]


@pytest.mark.parametrize("execution", ["replay", "nested", "keep"])
def test_brackets_of_trunks(execution):
    """From the first forward of a trunk or a dependent to the trunk's backward; dependents' backwards lie inside."""
    tree = tree_of_groups(groups(3, 2))
    schedule = plan_window(tree, replace(CUT, execution=execution, world_size=2))
    brackets = [one for rank in range(2) for one in plan_picture.trunk_brackets(schedule, rank)]
    trunks = sorted(trunk for microbatch in schedule.microbatches for trunk in set(microbatch.trunks))
    assert trunks and len(brackets) == len(set(trunks))
    for rank, level, first, last in brackets:
        ops = schedule.ops(rank)
        kind, trunk = ops[last]
        assert kind == "B" and level == len(schedule.microbatches[trunk].trunks)
        family = [trunk, *(one.id for one in schedule.microbatches if trunk in one.trunks)]
        inside = ops[first : last + 1]
        assert ops[first][0] == "F" and all(("F", one) in inside and ("B", one) in inside for one in family)


def test_each_thing_has_a_colour_of_its_own():
    """Of bars, trees, ops and kept states."""
    colours = [plan_picture.BEFORE, plan_picture.AFTER, plan_picture.KEPT, plan_picture.DUMMY_COLOUR]
    colours += [*plan_picture.OP_COLOURS.values(), plot.SHARED, plot.UNSHARED]
    assert len(set(map(to_hex, colours))) == len(colours) == 9


def test_drawable():
    """What the font lacks is an escape; long names are cut."""
    assert drawable("Grüße, 問 \x07") == "Grüße, \\u554f \\x07"
    assert len(drawable("x" * 100)) == 60
