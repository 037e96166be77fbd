"""What users do to commands: interrupt them, stop reading, name files that cannot be written or are not there."""

import json
import subprocess
import sys

import pytest
from support.models import tiny_model

from harts_hf.cli.main import main


@pytest.fixture
def rollouts(tmp_path):
    """A rollout file of two trajectories."""
    path = tmp_path / "rollouts.jsonl"
    rows = [{"group": "a", "token_ids": [1, 2, 3, last]} for last in (4, 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def model(tmp_path):
    """A configuration of a tiny model."""
    tiny_model("qwen3_5_text").config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(capsys, *arguments):
    """The message of a command that is refused, which is never a traceback."""
    assert main([*map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert not output.out and "Traceback" not in output.err
    return output.err


def test_an_interrupted_command_has_no_traceback(monkeypatch, capsys):
    """Ctrl-C is a line and exit status 130, also while the command's module is being imported."""

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("harts_hf.cli.main.import_module", interrupted)
    assert main(["plan", "rollouts.jsonl"]) == 130
    assert capsys.readouterr().err == "\nharts: interrupted\n"


def test_an_interrupt_says_where_rollouts_were_saved(monkeypatch, capsys):
    """The note of the salvage, which no traceback shows."""

    def interrupted(name):
        error = KeyboardInterrupt()
        error.add_note("2 rollouts are in out/salvaged/\x1bstep0.jsonl")
        raise error

    monkeypatch.setattr("harts_hf.cli.main.import_module", interrupted)
    assert main(["plan", "rollouts.jsonl"]) == 130
    assert capsys.readouterr().err == "\nharts: interrupted\n2 rollouts are in out/salvaged/\\x1bstep0.jsonl\n"


def test_a_reader_that_goes_away_has_no_traceback(rollouts):
    """`harts plan ROLLOUTS | head -1` ends quietly, as a program that SIGPIPE ended."""
    command = [sys.executable, "-m", "harts_hf.cli", "plan", str(rollouts)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def commands_that_write(rollouts, model):
    """Each command with the option that names its output, and what comes after the output's name."""
    return [
        ("plan", rollouts, "--json"),
        ("plan", rollouts, "--plot"),
        ("verify", "--model", model, rollouts, "--json"),
        ("bench", "--fit-cost", "--model", model, "--out"),
        ("bench", "--model", model, rollouts, "--json"),
    ]


def test_outputs_that_cannot_be_written_are_refused_before_the_work(rollouts, model, tmp_path, monkeypatch, capsys):
    """A folder that is not there and a name that is a folder: named with the option, and nothing was read."""
    (tmp_path / "folder.png").mkdir()
    for module in ("plan.read_rollouts", "verify.load_model", "bench.load_model", "bench_cost.load_model"):
        monkeypatch.setattr(f"harts_hf.cli.{module}", lambda *_, **__: pytest.fail("the work has begun"))
    for command in commands_that_write(rollouts, model):
        for name, reason in (("none/out.png", "No such file or directory"), ("folder.png", "Is a directory")):
            message = refused(capsys, *command, tmp_path / name)
            assert f"expected {command[-1]} to be a file that can be written, got '{tmp_path / name}'" in message
            assert reason in message


def test_a_refused_command_leaves_no_output(rollouts, tmp_path, capsys):
    """Checking that a file can be written does not make it, nor change one that is there."""
    out, kept = tmp_path / "out.json", tmp_path / "kept.png"
    kept.write_text("as before")
    assert "chunk_size" in refused(capsys, "plan", rollouts, "--chunk-size", 0, "--json", out, "--plot", kept)
    assert not out.exists() and kept.read_text() == "as before"


@pytest.mark.parametrize("name", ["tree.foo", "tree"])
def test_pictures_of_an_unknown_kind(name, rollouts, tmp_path, capsys):
    """The suffixes that work are listed."""
    message = refused(capsys, "plan", rollouts, "--plot", tmp_path / name)
    assert "expected --plot to end in one of" in message and ".png" in message and ".svg" in message


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_tokenizers_are_not_looked_for_on_the_network(command, model, tmp_path, monkeypatch, capsys):
    """A name that is neither a folder nor cached is refused as that, where a row needs it."""
    rollouts = tmp_path / "messages.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rollouts.write_text(json.dumps({"group": 0, "messages": turns}))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was tried"))
    arguments = ["--model", model] if command == "verify" else []
    message = refused(capsys, command, *arguments, rollouts, "--tokenizer", "nope")
    assert "expected --tokenizer to be a folder with a tokenizer, or a name in the local" in message
    assert "got 'nope': no such folder" in message


@pytest.mark.parametrize("device", ["nowhere", "meta", "cuda:7", ""])
def test_devices_that_are_not_here(device, rollouts, model, capsys):
    """Named before a model is loaded."""
    for command in (("verify", "--model", model, rollouts), ("bench", "--fit-cost", "--model", model)):
        assert "expected a device" in refused(capsys, *command, "--device", device)


@pytest.mark.parametrize("seed", ["-1", str(2**32), "one"])
def test_seeds_that_no_generator_takes(seed, rollouts, model, capsys):
    """An error that names the option and what it takes."""
    for command in (("verify", "--model", model, rollouts), ("bench", "--fit-cost", "--model", model)):
        message = refused(capsys, *command, "--seed", seed)
        assert f"argument --seed: expected an integer of at least 0 and less than 2**32, got '{seed}'" in message


@pytest.mark.parametrize(
    "content", ["{", "[1]", "{}", '{"model_type": "nope"}', '{"model_type": "qwen3", "hidden_size": "x"}']
)
def test_models_that_cannot_be_loaded(content, rollouts, tmp_path, capsys):
    """Whatever Transformers raises is one error that names the option and the model."""
    (tmp_path / "model.json").write_text(content)
    for command in (("verify", rollouts), ("bench", "--fit-cost")):
        message = refused(capsys, *command, "--model", tmp_path / "model.json")
        assert f"configuration or name, got '{tmp_path / 'model.json'}': " in message


@pytest.mark.parametrize("content", ["{", "[1]", '{"format": "harts_hf.cost"}'])
def test_cost_models_that_cannot_be_read(content, rollouts, tmp_path, capsys):
    """The file is named."""
    (tmp_path / "cost.json").write_text(content)
    message = refused(capsys, "plan", rollouts, "--cost", tmp_path / "cost.json")
    assert f"expected a cost model that harts bench --fit-cost wrote, got '{tmp_path / 'cost.json'}'" in message


def test_a_broken_pipe_of_somebody_else_is_an_error(rollouts, monkeypatch, capsys):
    """Only a stdout that nobody reads ends a command in silence."""

    def broken(*_):
        raise BrokenPipeError(32, "Broken pipe of a judge")

    monkeypatch.setattr("harts_hf.cli.plan.read_rollouts", broken)
    assert "harts plan: [Errno 32] Broken pipe of a judge" in refused(capsys, "plan", rollouts)


def test_memory_that_is_not_there_is_a_line(rollouts, monkeypatch, capsys):
    """As where a shape file asks for a tree of terabytes."""

    def too_much(*_):
        raise MemoryError("Unable to allocate 15 TiB")

    monkeypatch.setattr("harts_hf.cli.plan.read_rollouts", too_much)
    assert refused(capsys, "plan", rollouts) == "harts plan: out of memory: Unable to allocate 15 TiB\n"


def test_lengths_of_a_shape_that_wrap_around(tmp_path, capsys):
    """Their sum is checked before it is one of 64 bits."""
    row = {"group": "a", "parent": [-1, 0], "length": [2**62, 2**62], "sample_node": [1]}
    (tmp_path / "shape.jsonl").write_text(json.dumps(row))
    message = refused(capsys, "plan", tmp_path / "shape.jsonl")
    assert f"line 1: expected lengths of at most 1,099,511,627,776 tokens in all, got {2**63}" in message


def test_numbers_of_thousands_of_digits(tmp_path, capsys):
    """Python's limit on them is one more way not to be JSON."""
    (tmp_path / "r.jsonl").write_text('{"group": "a", "token_ids": [' + "9" * 5000 + "]}")
    assert "line 1: expected a JSON object, got invalid JSON (Exceeds the limit" in refused(
        capsys, "plan", tmp_path / "r.jsonl"
    )
