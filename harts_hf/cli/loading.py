"""Rollout files, models and tokenizers that commands are given by name."""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harts_hf.cli.output import printable, printable_lines
from harts_hf.errors import HartsWarning
from harts_hf.names import TOKENIZER_FILES, is_cached
from harts_hf.rollouts.files import RolloutFile, read_rollout_file
from harts_hf.rollouts.messages import TokenizerOnDemand
from harts_hf.rollouts.readers import FORMS
from harts_hf.rollouts.readers.samples import SAMPLES_PER
from harts_hf.rollouts.vocabulary import check_vocabulary


def add_rollouts(parser: argparse.ArgumentParser, *, tokenizer: str) -> None:
    """Adds the argument ``ROLLOUTS`` and the options of how it is read.

    Args:
        parser: the command's.
        tokenizer: the help of ``--tokenizer``.
    """
    parser.add_argument(
        "rollouts",
        metavar="ROLLOUTS",
        help="rollouts, shapes, or what an agent wrote (.jsonl, .json, .traj, .parquet; .gz of them; docs/formats.md)",
    )
    parser.add_argument("--tokenizer", help=tokenizer)
    parser.add_argument(
        "--format",
        choices=["auto", *(form.name for form in FORMS)],
        default="auto",
        help="the form of the file (default: auto, recognised from its first row)",
    )
    parser.add_argument(
        "--samples-per",
        choices=SAMPLES_PER,
        default=SAMPLES_PER[0],
        help="make a sample of each turn of a conversation, as its agent asked for it, or of each conversation "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--group-key",
        metavar="KEY",
        help="where rows say which group they are of, such as task or info.task (default: what the form has, else the "
        "file is one group)",
    )


def parse_all(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command with :func:`add_rollouts`; errors as in :func:`refuse_left_over`."""
    options, left = parser.parse_known_args(argv)
    refuse_left_over(parser, options, left)
    return options


def refuse_left_over(parser: argparse.ArgumentParser, options: argparse.Namespace, left: Sequence[str]) -> None:
    """Refuses words that a command with :func:`add_rollouts` has no use for.

    Raises:
        ValueError: several files of rollouts, or other words.
    """
    if left and not any(word.startswith("-") for word in left):
        raise ValueError(
            f"expected one file of rollouts, got {1 + len(left)}: {', '.join([options.rollouts, *left])} (JSONL files "
            "of one form, whose groups have different names, can be joined: cat A B > ALL)"
        )
    if left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")


def read_rollouts(options: argparse.Namespace, tokenizer: Any) -> RolloutFile:
    """The file that :func:`add_rollouts` asked for; its warnings and hints go to stderr, a line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HartsWarning)
        file = read_rollout_file(
            options.rollouts,
            tokenizer,
            format=options.format,
            samples_per=options.samples_per,
            group_key=options.group_key,
        )
    for warning in caught:
        if issubclass(warning.category, HartsWarning):
            print(f"harts: warning: {printable_lines(warning.message)}", file=sys.stderr)
    if file.group_hint is not None:
        print(f"harts: {printable(options.rollouts)}: {printable(file.group_hint)}", file=sys.stderr)
    return file


def summary(file: RolloutFile) -> str:
    """What became of the file, in one line without control characters."""
    return "; ".join(map(printable, file.summary))


def load_tokenizer(name: str, *, option: str = "--tokenizer", local_files_only: bool = True, **more: Any) -> Any:
    """A tokenizer; unless allowed, nothing is looked for on the network.

    Args:
        name: a folder, or a name in the local Hugging Face cache (or on the hub, where that is allowed).
        option: what named it, for the message.
        local_files_only: whether a name that is not in the cache is an error.
        more: for ``from_pretrained``.

    Raises:
        ValueError: there is no tokenizer of that name.
    """
    from transformers import AutoTokenizer

    place = "the local Hugging Face cache" if local_files_only else "the Hugging Face cache or hub"
    expected = f"expected {option} to be a folder with a tokenizer, or a name in {place}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only, **more)
        check_vocabulary(tokenizer, name)
        return tokenizer
    except Exception as error:  # a damaged tokenizer fails in ways of its own
        reason = f"{error}".split("\n")[0] if Path(name).is_dir() else "no such folder, and nothing of that name there"
        raise ValueError(f"{expected}, got {name!r}: {reason}") from error


def tokenizer_on_demand(name: str | None) -> TokenizerOnDemand | None:
    """:func:`load_tokenizer` of a name when the first row needs it, so that bad files are refused before."""
    return None if name is None else TokenizerOnDemand(lambda: load_tokenizer(name))


def tokenizer_name(options: argparse.Namespace) -> str | None:
    """What ``--tokenizer`` says, or ``--model``, a folder or a name in the cache, if it has a tokenizer."""
    if options.tokenizer is not None:
        return str(options.tokenizer)
    folder = Path(options.model)
    if folder.exists():
        return str(options.model) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None
    return str(options.model) if is_cached(options.model, TOKENIZER_FILES) else None


def is_random(name: str) -> bool:
    """Whether the name is a configuration alone, whose model gets random weights."""
    path = Path(name)
    return path.exists() and not any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))


def load_model(name: str, dtype: Any, *, seed: int, random_weights: bool = False) -> Any:
    """A pretrained model, or one with random weights where only a configuration is given.

    Args:
        name: a folder, a ``.json`` file with a configuration, or the name of a model on the Hugging Face hub.
        dtype: of its parameters.
        seed: of random weights.
        random_weights: read the configuration only.

    Raises:
        ValueError: nothing that can be loaded is there.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # how fast the expanded computation is does not matter here
    path = Path(name)
    try:
        if not random_weights and not is_random(name):
            return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        config = _config_of_file(path) if path.is_file() else AutoConfig.from_pretrained(name)
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # Transformers has many: of the hub, of damaged files, of fields of the configuration
        raise _no_model(name, error) from error


def check_token_ids(file: RolloutFile, name: str) -> None:
    """Checks a file's token ids against the vocabulary of a model, before its weights are loaded; warns of long rows.

    Args:
        file: shapes, which have none, pass.
        name: the model's, as for :func:`load_model`.

    Raises:
        ValueError: a token id that the model does not know; the message names its row. No configuration is there.
    """
    from transformers import AutoConfig

    from harts_hf.rollouts.recorded_episodes import named

    path = Path(name)
    try:
        config = _config_of_file(path) if path.is_file() else AutoConfig.from_pretrained(name)
        size = config.get_text_config().vocab_size
    except Exception as error:  # as in load_model
        raise _no_model(name, error) from error
    warn_of_long_rows(file, config)
    outside = [
        f"{rollout.where or f'group {group.name!r}'} (token {int(rollout.token_ids.max()):,})"
        for group in file.groups
        for rollout in group.rollouts
        if rollout.token_ids is not None and rollout.token_ids.max() >= size
    ]
    if outside:
        raise ValueError(
            f"expected token ids below {size:,}, the vocabulary of {name!r}, got others in {named(outside)}: is the "
            "file of another model?"
        )


def warn_of_long_rows(file: RolloutFile, config: Any) -> None:
    """A line on stderr where a file's longest row is beyond the positions that a model was made for."""
    from harts_hf.modeling.positions import beyond_positions

    group = max(file.groups, key=lambda one: int(one.tree.trajectory_lengths.max()))
    index = int(group.tree.trajectory_lengths.argmax())
    where = group.rollouts[index].where if group.rollouts else None
    name = f"{'a row' if where is None else where} (group {group.name!r})"
    said = beyond_positions(config, int(group.tree.trajectory_lengths[index]), name)
    if said is not None:
        print(f"harts: warning: {printable(said)}", file=sys.stderr)


def empty_model(name: str) -> Any:
    """The causal language model of a configuration, on the meta device in bfloat16; nothing is downloaded.

    Args:
        name: a folder, a ``.json`` file with a configuration, or a name in the local Hugging Face cache.

    Raises:
        ValueError: no configuration that can be loaded is there.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(name)
    try:
        config = _config_of_file(path) if path.is_file() else AutoConfig.from_pretrained(name, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config.get_text_config(), dtype=torch.bfloat16)
    except Exception as error:  # as in load_model
        reason = f"{error}".split("\n")[0] if path.exists() else "no such folder or file, and nothing of it is cached"
        raise ValueError(
            f"expected --model to be a model's folder, configuration or name in the local Hugging Face cache, got "
            f"{name!r}: {reason}"
        ) from error


def _no_model(name: str, error: Exception) -> ValueError:
    return ValueError(f"expected --model to be a model's folder, configuration or name, got {name!r}: {error}")


def _config_of_file(path: Path) -> Any:
    from transformers import AutoConfig

    content = json.loads(path.read_text())
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError("expected a configuration with model_type, got none")
    return AutoConfig.for_model(**content)
