"""`harts verify`: passes on sound code, fails when a bug is planted, refuses what it cannot use."""

import json

import numpy as np
import pytest
from shared_data import shape_file
from support import planted, planted_windows
from support.models import SHALLOW, VOCAB, tiny_model
from support.trees import real_trajectories

from harts_hf.cli.loading import check_token_ids
from harts_hf.cli.main import main
from harts_hf.rollouts.files import read_rollout_file


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """The shapes of two real groups with random tokens, cut to size, as a rollout file."""
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    lines = []
    for name, group in (("tot_game24", 3), ("lats_webshop", 0)):
        rows = real_trajectories(name, group=group, vocab=VOCAB, max_tokens=140)
        chosen = rows[:: max(1, len(rows) // 5)][:5]
        lines += [json.dumps({"group": name, "token_ids": row.tolist()}) for row in chosen]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models by family."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("bailing_hybrid", "qwen3_5_text"):
        tiny_model(family, seed=3, **SHALLOW).save_pretrained(folder / family)
    return folder


def run(*arguments, capsys):
    """Exit status and printed lines."""
    status = main(["verify", *map(str, arguments)])
    return status, capsys.readouterr()


def test_rows_beyond_the_models_positions_are_told(models, rollouts, tmp_path, capsys):
    """In a line with the longest row and the limit, by `plan`, and by what `verify` and `bench` check a file with."""
    config = json.loads((models / "qwen3_5_text" / "config.json").read_text())
    rows = [json.loads(line)["token_ids"] for line in rollouts.read_text().splitlines()]
    longest = max(map(len, rows))
    told = f"of {longest} tokens is longer than the model's max_position_embeddings, {longest - 1}: it is computed"
    number = [len(row) for row in rows].index(longest) + 1
    for limit, expected in ((longest, 0), (longest - 1, 1)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": limit}))
        check_token_ids(read_rollout_file(rollouts), str(tmp_path / "config.json"))
        assert main(["plan", str(rollouts), "--model", str(tmp_path / "config.json")]) == 0
        error = capsys.readouterr().err
        assert error.count(f"harts: warning: line {number} (group ") == error.count(told) == 2 * expected


@pytest.mark.essential("bailing_hybrid-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["bailing_hybrid", "qwen3_5_text"])
def test_passes_on_real_rollouts(family, dtype, models, rollouts, tmp_path, capsys):
    """Exit status 0, PASS on the last line, and every figure in the JSON file; the tree is cut into microbatches."""
    report_file = tmp_path / "report.json"
    status, output = run(
        *("--model", models / family, rollouts, "--dtype", dtype, "--json", report_file),
        *("--max-tokens", 700, "--max-tokens-per-microbatch", 256, "--draws", 2),
        capsys=capsys,
    )
    assert status == 0, output.out
    assert output.out.splitlines()[-1].startswith("PASS")
    report = json.loads(report_file.read_text())
    assert report["passed"] and report["reference"] == "oracle"
    assert {kind["kind"] for kind in report["kinds"]} >= {"A_log", "dt_bias", "convolutions", "norms", "head"}
    assert all(check["value"] <= check["limit"] for check in report["checks"])
    # Nothing is compared with itself: tree and expanded differ from float64, by more than nothing.
    assert 0 < report["errors"]["tree"]["rms"] < (1e-5 if dtype == "float32" else 0.1)
    assert all(kind["errors"]["expanded"] > 0 for kind in report["kinds"])


PLANTS = [planted.sequential_positions, planted.one_label_per_row, planted.conv_over_branches]


@pytest.mark.essential("one_label_per_row-oracle-True")
@pytest.mark.parametrize(
    ("plant", "with_oracle"),
    # A token that is missing 60 positions earlier changes less than what is excused without an oracle.
    # Whichever it is, the limits without one are the same.
    [*((plant, True) for plant in (*PLANTS, planted.replay_one_token_short)), (planted.conv_over_branches, False)],
    ids=lambda value: getattr(value, "__name__", f"oracle-{value}"),
)
def test_fails_with_a_bug_planted(plant, with_oracle, models, rollouts, monkeypatch, capsys):
    """Exit status 1 and FAIL with the reason on the last line."""
    plant(monkeypatch)
    status, output = run(
        *("--model", models / "qwen3_5_text", rollouts, "--max-tokens", 700, "--draws", 1),
        *([] if with_oracle else ["--no-oracle"]),
        capsys=capsys,
    )
    assert status == 1
    assert output.out.splitlines()[-1].startswith("FAIL: ")


@pytest.mark.exhaustive
def test_a_bug_of_the_backward_alone_fails(models, rollouts, monkeypatch, capsys):
    """Where log-probs are right and gradients are not, the gradients fail."""
    planted.later_labels_scored_as_the_first(monkeypatch)
    arguments = ("--model", models / "qwen3_5_text", rollouts, "--max-tokens", 700, "--draws", 1)
    status, output = run(*arguments, "--max-tokens-per-microbatch", 150, capsys=capsys)
    assert status == 1
    last = output.out.splitlines()[-1]
    assert last.startswith("FAIL: ") and "the first: gradient" in last


@pytest.mark.exhaustive
@pytest.mark.parametrize("plant", [planted_windows.last_dependents_gradients_only, planted_windows.conv_rows_dropped])
def test_a_bug_of_the_handing_over_fails(plant, models, rollouts, monkeypatch, capsys):
    """What microbatches hand to one another is tried although a draw would fit into one of them."""
    plant(monkeypatch)
    arguments = ("--model", models / "qwen3_5_text", rollouts, "--max-tokens", 700, "--draws", 1)
    status, output = run(*arguments, capsys=capsys)
    assert status == 1, output.out
    assert "the tree in parts" in output.out.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["file", "folder"])
def test_shapes_and_configurations(form, tmp_path, capsys):
    """A shape file is filled with tokens, and a configuration with weights; groups that don't fit are cut."""
    config = tiny_model("olmo_hybrid").config
    config.vocab_size = 300
    config.save_pretrained(tmp_path)
    model = tmp_path / "config.json" if form == "file" else tmp_path
    shapes = shape_file("tot_game24")
    status, output = run("--model", model, shapes, "--max-tokens", 400, "--draws", 1, "--no-oracle", capsys=capsys)
    assert status == 0, output.out
    assert "trajectories cut to fit; tokens drawn at random" in output.out
    assert "RANDOM WEIGHTS" in output.out


def test_unsupported_models_are_named(tmp_path, rollouts, capsys):
    """Exit status 2 with the message of the UnsupportedModelError, before anything is computed."""
    tiny_model("qwen3_5_text", attention_dropout=0.1).config.save_pretrained(tmp_path)
    status, output = run("--model", tmp_path, rollouts, capsys=capsys)
    assert status == 2
    assert "expected dropout 0 everywhere, got config.attention_dropout = 0.1" in output.err


def test_input_that_cannot_be_used_is_named(models, rollouts, tmp_path, monkeypatch, capsys):
    """A missing file, a bad number of draws, token ids beyond the vocabulary: exit status 2 and what was expected."""
    model = models / "qwen3_5_text"
    assert run("--model", model, tmp_path / "none.jsonl", capsys=capsys)[0] == 2
    status, output = run("--model", model, rollouts, "--draws", 0, capsys=capsys)
    assert status == 2 and "at least one draw" in output.err
    status, output = run("--model", model, rollouts, "--device", "nowhere", capsys=capsys)
    assert status == 2 and "expected a device such as cpu or cuda, got 'nowhere'" in output.err
    large = tmp_path / "large.jsonl"
    rows = [{"group": 0, "token_ids": [1, token]} for token in (VOCAB - 1, VOCAB)]
    large.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("harts_hf.cli.verify.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    status, output = run("--model", model, large, capsys=capsys)
    assert status == 2 and f"below {VOCAB}, the vocabulary of" in output.err
    assert f"got others in line 2 (token {VOCAB})" in output.err


@pytest.mark.exhaustive
def test_report_counts_what_is_shared(models, rollouts, tmp_path, capsys):
    """A file without sharing says so."""
    rng = np.random.default_rng(0)
    rows = [[3 + i, *rng.integers(2, VOCAB, 20).tolist()] for i in range(3)]
    alone = tmp_path / "alone.jsonl"
    alone.write_text("\n".join(json.dumps({"group": 0, "token_ids": row}) for row in rows))
    arguments = ("--model", models / "qwen3_5_text", "--draws", 1, "--no-oracle")
    status, output = run(*arguments, "--json", tmp_path / "alone.json", alone, capsys=capsys)
    assert not json.loads((tmp_path / "alone.json").read_text())["passed"]
    assert status == 1 and "NOTHING IS SHARED" in output.out
    assert output.out.splitlines()[-1].startswith("NOTHING SHARED: ") and "PASS" not in output.out
    status, output = run(*arguments, rollouts, capsys=capsys)
    assert status == 0 and "NOTHING IS SHARED" not in output.out
    assert output.out.splitlines()[-1].startswith("PASS: ")


@pytest.mark.parametrize("output", ["rollouts", "model/config.json", "model", "link"])
def test_outputs_that_are_inputs(output, models, rollouts, tmp_path, monkeypatch, capsys):
    """``--json`` over the rollouts or the model's files is refused before anything is read, and they stay."""
    monkeypatch.setattr("harts_hf.cli.verify.load_model", lambda *_, **__: pytest.fail("the work has begun"))
    model = models / "qwen3_5_text"
    (tmp_path / "link").symlink_to(rollouts)
    path = {"rollouts": rollouts, "model/config.json": model / "config.json", "model": model}.get(
        output, tmp_path / "link"
    )
    before = rollouts.read_bytes(), (model / "config.json").read_bytes()
    status, printed = run("--model", model, rollouts, "--json", path, capsys=capsys)
    assert status == 2 and "expected an output that is no input" in printed.err
    assert (rollouts.read_bytes(), (model / "config.json").read_bytes()) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress(is_terminal, models, rollouts, monkeypatch, capsys):
    """A line that changes on a terminal; elsewhere the first step and one step in so many seconds."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)  # its own bar, of loading weights
    arguments = ("--model", models / "qwen3_5_text", rollouts, "--max-tokens", 300, "--no-oracle")
    monkeypatch.setattr("harts_hf.cli.verify.SECONDS_PER_LINE", 1e6)
    error = run(*arguments, "--draws", 2, capsys=capsys)[1].err
    if is_terminal:
        assert error.count("\r") >= 20 and "\rdraw 2 of 2: tree in parts" in error and "\n" not in error
    else:
        assert error.startswith("harts verify: loading ") and error.endswith(" on cpu\n") and error.count("\n") == 1
        monkeypatch.setattr("harts_hf.cli.verify.SECONDS_PER_LINE", 0)
        lines = run(*arguments, "--draws", 1, capsys=capsys)[1].err.splitlines()
        assert lines[-1].startswith("harts verify: draw 1 of 1: tree in parts (") and len(lines) == 6


def test_rollouts_that_predict_nothing_and_models_of_nan(models, rollouts, tmp_path, capsys):
    """One line and exit status 2."""
    (tmp_path / "one.jsonl").write_text('{"group": 0, "token_ids": [5]}\n')
    status, output = run("--model", models / "qwen3_5_text", tmp_path / "one.jsonl", capsys=capsys)
    assert status == 2 and "at least two tokens, got none: there is nothing to predict" in output.err
    model = tiny_model("qwen3_5_text")
    model.lm_head.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    status, output = run("--model", tmp_path / "nan", rollouts, capsys=capsys)
    assert status == 2 and "got NaN or infinity in lm_head.weight" in output.err


@pytest.mark.exhaustive
def test_router_loss(rollouts, tmp_path, monkeypatch, capsys):
    """With a router's auxiliary loss: PASS, FAIL where shared tokens count once, refused without routers."""
    tiny_model("qwen3_next", seed=3, **SHALLOW).save_pretrained(tmp_path / "experts")
    arguments = ("--model", tmp_path / "experts", rollouts, "--max-tokens", 500, "--draws", 2, "--router-loss", 50)
    status, output = run(*arguments, capsys=capsys)
    assert status == 0 and "with 50.0 times the router's" in output.out, output.out
    planted.router_counts_of_one_in_sums(monkeypatch)
    status, output = run(*arguments, capsys=capsys)
    assert status == 1 and "gradients of routers on the tree: RMS error" in output.out, output.out
    tiny_model("qwen3_5_text", seed=3).save_pretrained(tmp_path / "dense")
    status, output = run("--model", tmp_path / "dense", rollouts, "--router-loss", 1, capsys=capsys)
    assert status == 2 and "mixture of experts with router_loss=1.0" in output.err
