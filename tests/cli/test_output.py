"""What is printed and written: no control characters, no half files, no input overwritten."""

import json
import os
import warnings

import pytest
from support.models import tiny_model

from harts_hf.cli.checks import check_output_file, refuse_to_overwrite
from harts_hf.cli.main import main as harts
from harts_hf.cli.output import printable, printable_lines, replacing, warnings_in_lines, write_json
from harts_hf.errors import HartsWarning

NAME = "a\n\x1b[31m\x07\x9b\u202e\ud800$\\frac$é"


@pytest.fixture
def rollouts(tmp_path):
    """A rollout file whose group has a hostile name."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({"group": NAME, "token_ids": [1, 2, 3]}) + "\n")
    return path


def test_printable():
    """What a terminal might obey is an escape; what it shows stays."""
    assert printable(NAME) == r"a\n\x1b[31m\x07\x9b\u202e\ud800$\frac$é"
    assert printable_lines("one\ntwo\x1b") == "one\ntwo\\x1b"


def test_warnings_of_this_package_are_lines():
    """While `harts train` runs and no longer; those of others stay as Python shows them."""
    seen = []

    @warnings_in_lines()
    def command():
        for category in (HartsWarning, UserWarning):
            seen.append(warnings.formatwarning("said\x1b", category, "file.py", 1))

    command()
    assert seen == ["harts: warning: said\\x1b\n", "file.py:1: UserWarning: said\x1b\n"]
    assert "file.py:1" in warnings.formatwarning("said", HartsWarning, "file.py", 1)


def test_names_are_printed_without_control_characters(rollouts, tmp_path, capsys):
    """In the table and the picture of `harts plan`, in names of files and in errors."""
    out = tmp_path / "out\x1b[31m.png"
    assert harts(["plan", str(rollouts), "--plot", str(out)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and r"a\n\x1b[31m\x07" in text and r"out\x1b[31m.png" in text
    assert out.stat().st_size > 1000
    assert harts(["plan", str(tmp_path / "none\x1b[31m.jsonl")]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error and r"none\x1b[31m.jsonl" in error


def names_of(path, tmp_path):
    """The same file by several names."""
    os.symlink(path, tmp_path / "symbolic.json")
    os.link(path, tmp_path / "hard.json")
    return [path, os.path.relpath(path), tmp_path / "symbolic.json", tmp_path / "hard.json"]


def test_no_input_is_overwritten(rollouts, tmp_path, capsys):
    """By no name and by no option, and before anything is done."""
    before = rollouts.read_bytes()
    for name in names_of(rollouts, tmp_path):
        assert harts(["plan", str(rollouts), "--json", str(name)]) == 2
        assert f"expected an output that is no input, got {str(name)!r}" in capsys.readouterr().err
        assert rollouts.read_bytes() == before
    picture = tmp_path / "rollouts.png"
    os.symlink(rollouts, picture)
    assert harts(["plan", str(rollouts), "--plot", str(picture)]) == 2
    assert harts(["plan", str(rollouts), "--plot", str(tmp_path / "x.png"), "--json", str(tmp_path / "x.png")]) == 2
    assert rollouts.read_bytes() == before


def test_no_model_is_overwritten(tmp_path, capsys):
    """Files that are there in a model's folder are inputs too; a new one is none."""
    tiny_model("qwen3_5_text").config.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    before = config.read_bytes()
    for model in (config, tmp_path / "model"):
        assert harts(["bench", "--fit-cost", "--model", str(model), "--out", str(config)]) == 2
        assert "expected an output that is no input" in capsys.readouterr().err
    assert config.read_bytes() == before
    refuse_to_overwrite(str(tmp_path / "model" / "cost.json"), str(tmp_path / "model"), None, "some/model")
    refuse_to_overwrite(None, str(config))


def test_a_run_does_not_overwrite_its_model_or_recipe(tmp_path, capsys):
    """The folder of a model is no output folder, and a recipe is none of the files that a run writes."""
    (tmp_path / "summary.json").write_text(
        json.dumps({"environment": "harts_hf.rollouts.environments.shelf:ShelfEnvironment", "bf16": False})
    )
    recipe = str(tmp_path / "summary.json")
    for options in (
        ["--output_dir", str(tmp_path)],
        ["--output_dir", str(tmp_path / "out"), "--model_name_or_path", str(tmp_path / "out")],
    ):
        assert harts(["train", recipe, *options]) == 2
        assert "expected an output that is no input" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_is_whole_or_not_there(tmp_path):
    """An error leaves the old file and nothing beside it; permissions and links stay."""
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    path.write_text("as before")
    path.chmod(0o640)
    link.symlink_to(path)
    with pytest.raises(RuntimeError), replacing(link) as new:
        new.write_text("half of")
        raise RuntimeError
    with pytest.raises(TypeError):
        write_json(link, {"a": object()})
    with replacing(link):
        pass  # nothing to write
    assert path.read_text() == "as before"
    write_json(link, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1} and link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_devices_are_written_to_as_they_are(rollouts, capsys):
    """Replacing one would take it from the machine."""
    check_output_file("--json", os.devnull)
    assert harts(["plan", str(rollouts), "--json", os.devnull]) == 0
    assert not os.path.isfile(os.devnull)
    if os.path.exists("/dev/full"):
        assert harts(["plan", str(rollouts), "--json", "/dev/full"]) == 2
        assert "No space left on device" in capsys.readouterr().err
