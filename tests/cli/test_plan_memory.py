"""`harts plan --model M --memory SIZE`: the limits that fit."""

import re

import pytest
from shared_data import shape_file
from transformers import AutoConfig

from benchmarks.gpu.registry import FAMILIES
from harts_hf.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The configuration of four layers of Ling-3.0-tiny's widths."""
    folder = tmp_path_factory.mktemp("model")
    AutoConfig.for_model("bailing_hybrid", **FAMILIES["bailing_hybrid"]).save_pretrained(folder)
    return str(folder)


def test_rows_that_fit(model, capsys):
    """They are planned with; a limit that is given stays."""
    given = ["plan", str(shape_file("lats_webshop")), "--model", model, "--memory", "6GB"]
    assert main(given) == 0
    said = capsys.readouterr().out
    fits = re.search(r"6 GB: ([\d,]+) rows a microbatch fit with gradient checkpointing, ([\d,]+) without", said)
    with_checkpointing, without = (int(number.replace(",", "")) for number in fits.groups())
    assert 64 <= without < with_checkpointing and f"of at most {fits[1]} tokens" in said
    assert main([*given, "--max-tokens-per-microbatch", "1024"]) == 0
    assert "of at most 1,024 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model", "MODEL", "--memory", "lots"],
            "expected --memory to be a size such as 141GB or 80GiB, got 'lots'",
        ),
        (["--model", "MODEL", "--memory", "1GB"], "beside weights, gradients and optimizer"),
        (["--memory", "6GB"], "expected --model with --memory"),
        (["--model", "nowhere", "--memory", "6GB"], "expected --model to be a model's folder"),
    ],
)
def test_what_cannot_be_fitted(options, message, model, capsys):
    """An error that says what is missing."""
    options = [model if option == "MODEL" else option for option in options]
    assert main(["plan", str(shape_file("lats_webshop")), *options]) == 2
    assert message in capsys.readouterr().err
