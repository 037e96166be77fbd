"""`trainer: sft` in recipes: its report, the forms of its rows, what is refused."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from harts_hf.cli.main import main as harts
from harts_hf.cli.recipe import parse
from harts_hf.cli.train import build_trainer

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "tiny_sft.yaml")
FOLDER = ROOT / "recipes" / "tiny_sft"


@pytest.fixture(autouse=True)
def _process_settings(monkeypatch):
    """Recipes are started in the folder above theirs; what they set for the process is undone."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rows(tmp_path):
    """A file of prompts and completions, one of which is longer than the others."""
    path = tmp_path / "rows.jsonl"
    pairs = [("lamp wanted", " look lamp"), ("lamp wanted look lamp s3 listed", " go s3"), ("cup wanted", " look cup")]
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    return str(path)


def test_it_reports_losses(tmp_path, capsys):
    """Lines, files and summary are those of rewards, with the loss in their place; the model that it leaves loads."""
    steps = ["--max_steps", "6", "--logging_steps", "1", "--save_strategy", "no"]
    assert harts(["train", TINY, "--output_dir", str(tmp_path), *steps]) == 0
    said = capsys.readouterr().out
    logs = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [log["step"] for log in logs] == list(range(1, 7)) and logs[-1]["loss"] < logs[0]["loss"] - 0.5
    assert f"step     1/6  loss  {logs[0]['loss']:.3f}  accuracy {logs[0]['mean_token_accuracy']:.3f}" in said
    assert summary["last_mean_loss"] == pytest.approx(sum(log["loss"] for log in logs) / 6)
    assert summary["sharing_ratio"] > 2
    assert (tmp_path / "loss.png").is_file() and not (tmp_path / "reward.png").exists()
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "tokenizer.json").is_file()


def test_rows_in_trl_forms(rows, tmp_path):
    """A data set's prompts and completions, with an evaluation on its test split."""
    options = [
        "--recorded_rollouts",
        "",
        "--recorded_kwargs",
        "{}",
        "--dataset_name",
        rows,
        "--eval_strategy",
        "steps",
    ]
    trainer = build_trainer(*parse([TINY, "--output_dir", str(tmp_path), *options]))
    assert len(trainer.train_dataset) == len(trainer.eval_dataset) == 3
    batch = trainer.data_collator([trainer.train_dataset[1]])
    trained = trainer.processing_class.decode(batch["labels"][batch["labels"] != -100])
    assert trained == "go s3 <end>"
    assert trainer.processing_class.padding_side == "right"


@pytest.mark.exhaustive
def test_the_best_rollouts_alone(tmp_path):
    """Weights by name or by dotted path: fewer rows than without."""
    counts = {}
    for weight in ("best", "reward", "operator:eq", None):
        given = "{}" if weight is None else json.dumps({"weight": weight})
        arguments, training, model = parse([TINY, "--output_dir", str(tmp_path), "--recorded_kwargs", given])
        if weight == "operator:eq":  # of a reward and a list
            with pytest.raises(ValueError, match="another weight than 0"):
                build_trainer(arguments, training, model)
            continue
        counts[weight] = len(build_trainer(arguments, training, model).train_dataset)
    assert counts["best"] < counts["reward"] <= counts[None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--environment", "a:b", "--recorded_rollouts", "", "--recorded_kwargs", "{}"],
         "dataset_name or recorded_rollouts with trainer 'sft' (rows that are there already), got environment"),
        (["--reward_funcs", "a:b"], "expected no reward_funcs with trainer 'sft', got ['a:b']"),
        (["--dataset_name", "some"], "expected either dataset_name or recorded_rollouts with trainer 'sft', got both"),
        (["--recorded_rollouts", "", "--recorded_kwargs", "{}"], "with trainer 'sft', got neither"),
        (["--recorded_kwargs", '{"logprobs": "rescored"}'], "recorded_kwargs do not fit supervised_dataset"),
        (["--recorded_kwargs", '{"weight": "worst"}'], "expected recorded_kwargs.weight to be the dotted path of"),
        (["--eval_strategy", "steps"], "expected dataset_name to evaluate on (its dataset_test_split)"),
        (["--tokenizer", ""], "expected tokenizer, a folder or name, for a model_type with trainer 'sft'"),
        (["--packing", "true"], "got packing=True"),
        (["--num_generations", "4"], "unknown key 'num_generations'"),
    ],
)  # fmt: skip
def test_refusals(options, message, tmp_path, capsys):
    """In a training and in its dry run, each in one line."""
    for dry in ([], ["--dry-run"]):
        assert harts(["train", TINY, "--output_dir", str(tmp_path / "out"), *options, *dry]) in (1, 2)
        output = capsys.readouterr()
        assert message in " ".join((output.out + output.err).split())
        assert "Traceback" not in output.err


def test_columns_of_no_form(tmp_path, capsys):
    """They are named, and so are the forms."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    given = ["--recorded_rollouts", "", "--recorded_kwargs", "{}", "--dataset_name", str(path)]
    assert harts(["train", TINY, "--output_dir", str(tmp_path / "out"), *given]) == 2
    said = capsys.readouterr().err
    assert "'prompt' and 'completion' or 'text'" in said and "got ['question', 'answer']" in said


def test_the_recipe_s_data_are_what_its_script_writes(tmp_path, monkeypatch):
    """Byte by byte: rewards are the environment's."""
    spec = importlib.util.spec_from_file_location("play", FOLDER / "play.py")
    play = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(play)
    monkeypatch.setattr(play, "FOLDER", tmp_path)
    play.main()
    for name in ("conversations.jsonl", "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name
