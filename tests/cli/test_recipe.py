"""Recipes that are none, and what the command line says instead of a recipe."""

import os

import pytest

from harts_hf.cli.main import main as harts
from harts_hf.cli.recipe import MAX_BYTES, parse, read_recipe

ENVIRONMENT = "environment: harts_hf.rollouts.environments.shelf:ShelfEnvironment\nbf16: false\nuse_cpu: true\n"


@pytest.fixture
def write(tmp_path):
    """Writes a recipe and returns its path."""

    def write(content):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def bomb(depth=9):
    """Nine aliases of nine aliases of nine ...: 9 ** depth values."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must contain a YAML mapping, got nothing"),
        ("# nothing\n", "must contain a YAML mapping, got nothing"),
        ("- 1\n- 2\n", "must contain a YAML mapping, got list"),
        ("text", "must contain a YAML mapping, got str"),
        ("a: b: c\n", "in YAML, got an error: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "in YAML, got an error: expected a single document"),
        ("model_type: !!python/object/apply:os.system [ls]\n", "could not determine a constructor for the tag"),
        ("a: 2020-99-99\n", "in YAML, got an error: month must be in 1..12"),
        ("a: &a [*a]\n", "an alias stands inside its own anchor"),
        (bomb(), "more than 10,000 values, aliases written out"),
        (bomb().replace(": &", ": !!set &"), "in YAML, got an error"),
        ("[" * 100_000, "in YAML, got an error: maximum recursion depth exceeded"),
        ("seed: 1\nmax_steps: 2\nseed: 3\n", "key 'seed' stands twice, again in line 3"),
        ("model_config:\n  a: 1\n  a: 2\n", "key 'a' stands twice, again in line 3"),
        ("1: 2\n", "whose keys are texts, got 1"),
        ("a: \0\n", "unacceptable character #x0000"),
        (b"a: \xff\n", "to be a recipe in UTF-8, got 'utf-8' codec can't decode byte 0xff"),
        ("seed: 1\n".encode("utf-16"), "to be a recipe in UTF-8, got"),
        ("#" * (MAX_BYTES + 1), "to be a recipe of at most 1,048,576 bytes, got more"),
        ("env: [1]\n", "expected env to be a mapping of environment variables, got list"),
        ("env: {'A=B': 1}\n", "expected env to name environment variables, got 'A=B'"),
        ("env: {A: [1]}\n", "expected env to give A a text or a number, got [1]"),
        ("branching: 4\n", "expected branching to be a list, such as [4, 2], got 4"),
        ("branching: [4, x]\n", "expected branching to be an integer, got 'x'"),
        ("max_turns: 2.5\n", "expected max_turns to be an integer, got 2.5"),
        ("max_steps: true\n", "expected max_steps to be an integer, got True"),
        ("learning_rate: [1]\n", "expected learning_rate to be a number, got [1]"),
        ("use_cpu: perhaps\n", "expected use_cpu to be true or false, got 'perhaps'"),
        ("output_dir: {a: 1}\n", "expected output_dir to be a text, got {'a': 1}"),
        ("reward_funcs: [1]\n", "expected reward_funcs to be a text, got 1"),
        ("environment_kwargs: [1]\n" + ENVIRONMENT, "expected environment_kwargs to be a mapping, got list"),
        ("logging_steps: null\n" + ENVIRONMENT, "expected settings that TRL takes, got TypeError: "),
        ("num_generations: null\n" + ENVIRONMENT, "expected num_generations to be an integer of at least 1, got None"),
        ("self: 1\nkwargs: 2\n" + ENVIRONMENT, "unknown key 'self', 'kwargs'"),
    ],
)
def test_recipes_that_are_none(content, message, write, capsys):
    """Each is one line that says what was expected and what came: no traceback, and in no time."""
    assert harts(["train", write(content)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("harts train: ") and len(error.splitlines()) == 1


def test_recipes_that_are(write):
    """A byte order mark, anchors, aliases and merged keys are plain YAML."""
    recipe = read_recipe(write(b"\xef\xbb\xbfa: &a {x: 1, y: 2}\nb: *a\nc: {<<: *a, y: 3}\n"))
    assert recipe == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 3}}


def test_folders_and_missing_files(tmp_path, capsys):
    """What the system says, in one line."""
    for name, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none.yaml", "got no such file"),
    ):
        assert harts(["train", str(name)]) == 2
        assert reason in capsys.readouterr().err
    assert harts(["train", "--config"]) == 2
    assert "expected a recipe after --config, got none" in capsys.readouterr().err


def test_variables_of_the_recipe_are_set(write, monkeypatch):
    """As texts."""
    monkeypatch.setenv("HARTS_TEST_VARIABLE", "before")
    parse([write("env: {HARTS_TEST_VARIABLE: 1}\n" + ENVIRONMENT)])
    assert os.environ["HARTS_TEST_VARIABLE"] == "1"


def test_keys_of_a_dictionary_on_the_command_line(write, capsys):
    """One key by its name; the model's are merged into the recipe's; the last of several wins."""
    path = write(ENVIRONMENT + "model_config: {hidden_size: 8, num_hidden_layers: 2}\n")
    one = ["--model_config.hidden_size", "16", "--model_config.layer_types", '["a"]', "--model_config.x=y"]
    expected = {"hidden_size": 16, "num_hidden_layers": 2, "layer_types": ["a"], "x": "y"}
    assert parse([path, *one])[0].model_config == expected
    assert parse([path, *one, "--model_config.hidden_size", "32"])[0].model_config == {**expected, "hidden_size": 32}
    assert not capsys.readouterr().err
    some = ["--model_config", '{"hidden_size": 4}']
    assert parse([path, *some])[0].model_config == {"hidden_size": 4, "num_hidden_layers": 2}
    assert not capsys.readouterr().err
    # Fields of another architecture are not the recipe's.
    assert parse([path, *some, "--model_type", "qwen3_next"])[0].model_config == {"hidden_size": 4}
    assert "model_config of the command line replaces the recipe's as a whole" in capsys.readouterr().err
    assert parse([path, "--model-config", "{}", "--model_config.x", "1"])[0].model_config["x"] == 1
    both = ["--environment_kwargs", '{"num_items": 2}']
    with_kwargs = write(ENVIRONMENT + "environment_kwargs: {num_shelves: 2}\n")
    assert parse([with_kwargs, *both])[0].environment_kwargs == {"num_items": 2}
    assert "environment_kwargs of the command line replaces" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"expected a value after --model_config.x, got none"):
        parse([with_kwargs, "--model_config.x"])
