"""Recipes: YAML files read within limits, their values checked, and what the command line says instead."""

import argparse
import difflib
import json
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from trl import TrlParser

from harts_hf.cli.parsing import CommandParser
from harts_hf.cli.train_arguments import DICT_FIELDS, PolicyArguments, TrainArguments
from harts_hf.cli.trainer_kinds import TRAINERS

DESCRIPTION = """\
Trains a policy on rollout trees as a recipe says. A recipe is a TRL YAML file: every field of the trainer's
configuration (trainer: grpo has TreeGRPOConfig's), of TRL's ModelConfig and of TrainArguments. The command line
overrides it. "--model_config JSON" is merged into the recipe's model_config, key by key (the value of a key is
replaced as a whole); where the command line also names a model_type it replaces it. The other dictionaries
(environment_kwargs, agent_kwargs, collector_kwargs, recorded_kwargs) replace the recipe's as a whole.
"--FIELD.KEY VALUE" sets one key of any of them.
"""
MAX_BYTES = 2**20
MAX_VALUES = 10_000  # aliases written out

GENERATION_BATCH = (
    "(Where nothing else is set, generation_batch_size is per_device_train_batch_size times the number of processes "
    "times gradient_accumulation_steps, all counted in rollouts.)"
)

# What Transformers says where bf16 is asked for and torch finds no GPU names one of the two fields that help.
WITHOUT_GPU = "(Here torch finds no GPU. To train on the CPU: use_cpu: true and bf16: false.)"


class _Parser(CommandParser, TrlParser):
    pass


def split_recipe(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe's path, and the rest.

    It is the first argument if that is no option, or what follows ``--config``; ``--dry-run`` may come before it.
    """
    options = list(argv)
    if len(options) > 1 and options[0] in ("--dry-run", "--dry_run") and options[1].endswith((".yaml", ".yml")):
        options[:2] = options[1::-1]
    if options and not options[0].startswith("-"):
        return options[0], options[1:]
    if "--config" not in options:
        return None, options
    index = options.index("--config")
    if index + 1 == len(options):
        raise ValueError("expected a recipe after --config, got none")
    return options[index + 1], options[:index] + options[index + 2 :]


def parse(argv: Sequence[str], *, unknown: list[str] | None = None) -> tuple[TrainArguments, Any, PolicyArguments]:
    """Reads the recipe and the command line.

    Args:
        argv: the recipe's path, then ``--field value`` pairs; the recipe may be left out.
        unknown: gets what there is to say of keys that are not known; None to have it raised.

    Returns:
        The recipe's own arguments, those of its trainer (a ``TreeGRPOConfig`` for ``trainer: grpo``), its policy's.

    Raises:
        ValueError: no arguments at all; a file that is no recipe; an unknown key (named); a value that its field
            refuses, or of another type.
        OSError: no such recipe.
        SystemExit: help was asked for.
    """
    path, options = split_recipe(argv)
    if path is None and not options:
        raise ValueError("expected a recipe, as in `harts train recipes/tiny_grpo.yaml` (docs/training.md), got none")
    recipe = {} if path is None else read_recipe(path)
    _set_variables(recipe.pop("env", None) or {})
    keys = _take_dictionary_keys(options)
    config = TRAINERS[_trainer(recipe, options)].config
    types: Any = (TrainArguments, config, PolicyArguments)
    hints = {name: hint for kind in types for name, hint in typing.get_type_hints(kind).items()}
    parser = _Parser(
        types,
        prog="harts train",
        usage="harts train RECIPE [--field value ...]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    actions = {action.dest: action for action in reversed(parser._actions)}
    strange = [name for name in recipe if name not in actions]
    if recipe.get("resume_from_checkpoint") is True:  # a folder otherwise
        recipe["resume_from_checkpoint"] = "true"
    _check_values(recipe, actions, hints, strange)
    parser.set_defaults_with_config(**{name: value for name, value in recipe.items() if name in actions})
    try:
        *parsed, rest = parser.parse_args_into_dataclasses(options, return_remaining_strings=True)
    except ValueError as error:  # of a configuration, which must not hide a misspelt key that led to it
        if strange:
            raise ValueError(f"{unknown_message(strange, set(actions))}; {error}") from error
        if "generation_batch_size" in str(error) and not _said(recipe, options, "generation_batch_size"):
            raise ValueError(f"{error} {GENERATION_BATCH}") from error
        if "use_cpu" in str(error):
            raise ValueError(f"{error} {WITHOUT_GPU}") from error
        raise
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:  # of TRL's own checks
        raise ValueError(f"expected settings that TRL takes, got {type(error).__name__}: {error}") from error
    strange += [name for name in rest if name.startswith("--")] or rest
    if strange and unknown is None:
        raise ValueError(unknown_message(strange, set(actions)))
    if strange and unknown is not None:
        unknown.append(unknown_message(strange, set(actions)))
    arguments, training, model = parsed
    _join_dictionaries(arguments, recipe, options, keys)
    arguments.asks_for_bar = not training.disable_tqdm and (
        "disable_tqdm" in recipe or _given(options, "disable_tqdm")
    )
    return arguments, training, model


def peek(argv: Sequence[str], name: str) -> Any:
    """What recipe and command line say about one field, as it stands there; None if nothing.

    Raises:
        ValueError: a file that is no recipe.
        OSError: no such recipe.
    """
    path, options = split_recipe(argv)
    return _said({} if path is None else read_recipe(path), options, name)


def _said(recipe: dict[str, Any], options: Sequence[str], name: str) -> Any:
    value = recipe.get(name)
    for index, option in enumerate(options):
        key, is_joined, joined = option.partition("=")
        if key.replace("-", "_") == f"__{name}" and (is_joined or index + 1 < len(options)):
            value = joined if is_joined else options[index + 1]
    return value


def _trainer(recipe: dict[str, Any], options: Sequence[str]) -> str:
    """The name of the trainer, which decides what other keys there are."""
    name = _said(recipe, options, "trainer") or "grpo"
    if name not in TRAINERS:
        raise ValueError(f"expected trainer to be one of {', '.join(TRAINERS)}, got {name!r}")
    return name


def _given(options: Sequence[str], name: str) -> bool:
    """Whether the command line has ``--name``, with underscores or hyphens."""
    return any(option.split("=")[0].replace("-", "_") == f"__{name}" for option in options)


def _join_dictionaries(
    arguments: TrainArguments, recipe: dict[str, Any], options: Sequence[str], keys: dict[str, dict[str, Any]]
) -> None:
    """Puts together what recipe and command line say about the dictionaries."""
    for name in DICT_FIELDS:
        value, before = getattr(arguments, name), recipe.get(name)
        if before and _given(options, name):
            if name == "model_config" and not _given(options, "model_type"):
                value = {**before, **value}
            else:
                print(f"{name} of the command line replaces the recipe's as a whole", file=sys.stderr)
        setattr(arguments, name, {**value, **keys.get(name, {})})


def read_recipe(path: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ValueError: no UTF-8, no YAML, no mapping of texts to values, a key twice in a mapping, more than ``MAX_BYTES``
            or, with aliases written out, more than ``MAX_VALUES`` values.
        OSError: it cannot be read.
    """
    expected = f"expected {path!r} to be a recipe"
    if not os.path.exists(path):
        raise FileNotFoundError(f"{expected} (a YAML file, such as recipes/tiny_grpo.yaml), got no such file")
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{expected} of at most {MAX_BYTES:,} bytes, got more")
    try:
        loader = yaml.SafeLoader(content.decode("utf-8-sig"))
        node = loader.get_single_node()
        if node is not None:
            _check_node(node, {})
        recipe = None if node is None else loader.construct_document(node)
    except UnicodeDecodeError as error:
        raise ValueError(f"{expected} in UTF-8, got {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{expected} in YAML, got an error: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        got = "nothing" if recipe is None else type(recipe).__name__
        raise ValueError(f"a recipe such as {path} must contain a YAML mapping, got {got}")
    names = [name for name in recipe if not isinstance(name, str)]
    if names:
        raise ValueError(f"{expected} whose keys are texts, got {names[0]!r}")
    return recipe


def _check_node(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The number of values in a node, each alias counted as what it stands for."""
    if id(node) in sizes:
        if sizes[id(node)] == 0:
            raise ValueError("an alias stands inside its own anchor")
        return sizes[id(node)]
    sizes[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise ValueError(f"key {key.value!r} stands twice, again in line {key.start_mark.line + 1}")
            names.add(str(key.value))
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_check_node(child, sizes) for child in children)
    if size > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values, aliases written out")
    sizes[id(node)] = size
    return size


def _set_variables(variables: Any) -> None:
    if not isinstance(variables, dict):
        raise ValueError(f"expected env to be a mapping of environment variables, got {type(variables).__name__}")
    for name, value in variables.items():
        if not isinstance(name, str) or not name or set(name) & set("=\0"):
            raise ValueError(f"expected env to name environment variables, got {name!r}")
        if isinstance(value, dict | list) or "\0" in str(value):
            raise ValueError(f"expected env to give {name} a text or a number, got {value!r}")
        os.environ[name] = str(value)


def _take_dictionary_keys(options: list[str]) -> dict[str, dict[str, Any]]:
    """Takes ``--FIELD.KEY VALUE`` of the dictionary fields out of the options; values are JSON, or else texts."""
    keys: dict[str, dict[str, Any]] = {}
    for index in range(len(options) - 1, -1, -1):
        name, _, key = options[index].removeprefix("--").partition(".")
        if not (options[index].startswith("--") and key and name in DICT_FIELDS):
            continue
        key, is_joined, value = key.partition("=")
        if not is_joined and index + 1 == len(options):
            raise ValueError(f"expected a value after {options[index]}, got none")
        value = value if is_joined else options.pop(index + 1)
        del options[index]
        try:
            keys.setdefault(name, {}).setdefault(key, json.loads(value))  # the last one wins, and comes first here
        except json.JSONDecodeError:
            keys.setdefault(name, {}).setdefault(key, value)
    return keys


def _check_values(
    recipe: dict[str, Any], actions: Mapping[str, argparse.Action], hints: Mapping[str, Any], strange: Sequence[str]
) -> None:
    """Raises one ValueError for all of a recipe's values that their fields refuse."""
    wrong = []
    for name in recipe:
        if name in actions:
            try:
                _check_value(actions[name], hints.get(name), recipe[name])
            except ValueError as error:
                wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join([*([unknown_message(strange, set(actions))] if strange else []), *wrong]))


def _check_value(action: argparse.Action, hint: Any, value: Any) -> None:
    """Checks a recipe's value as argparse checks those of the command line; it takes defaults as they are."""
    if value is None:
        return
    if action.nargs == "+" and not isinstance(value, list):
        raise ValueError(f"expected {action.dest} to be a list, such as {_list_of(action)}, got {value!r}")
    is_text = hint in (str, str | None) or (action.nargs == "+" and action.type is str)
    for entry in value if action.nargs == "+" else [value]:
        if is_text and not isinstance(entry, str):
            raise ValueError(f"expected {action.dest} to be a text, got {entry!r}")
        is_number = action.type in (int, float) or getattr(action.type, "__name__", "") == "string_to_bool"
        if is_number and callable(action.type):
            try:
                action.type(str(entry))
            except (ValueError, argparse.ArgumentTypeError) as error:
                kind = {int: "an integer", float: "a number"}.get(action.type, "true or false")  # type: ignore[call-overload]
                raise ValueError(f"expected {action.dest} to be {kind}, got {entry!r}") from error


def _list_of(action: argparse.Action) -> str:
    return "[4, 2]" if action.type is int else "[A, B]"


def unknown_message(names: Sequence[str], known: set[str] | Mapping[str, Any]) -> str:
    """Names the keys that are not known, each with the nearest one that is."""
    parts = []
    for name in names:
        name = name.lstrip("-")
        close = difflib.get_close_matches(name, known, n=1)
        parts.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    return f"unknown key {', '.join(parts)}"
