"""Readers of what other programs write: each form's rows become conversations, which become samples.

A reader is a module with ``is_row`` (is a row of this form?), ``read`` (its conversations) and the keys that it knows;
``FORMS`` lists them. ``harts_hf.rollouts.files`` reads a file with them; docs/formats.md says what is taken of each.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from harts_hf.rollouts.readers import (
    anthropic,
    inspect_ai,
    messages,
    mini_swe_agent,
    nemo_gym,
    openhands,
    prompt_completion,
    sharegpt,
    swe_agent,
    tau2_bench,
    tau_bench,
)
from harts_hf.rollouts.readers.conversation import Conversation, keys_of


class Form(NamedTuple):
    """A form that rollouts are written in.

    Attributes:
        name: what ``--format`` takes.
        has: what a row is recognised by, for people.
        is_row: whether a row is of this form.
        read: the conversations of a row; None where ``harts_hf.rollouts.files`` reads the row itself.
        keys: those that are read.
        ignored: those that the form has and nobody needs; any other key is named in a warning.
    """

    name: str
    has: str
    is_row: Callable[[Any], bool]
    read: Callable[[Any], Iterator[Conversation]] | None
    keys: tuple[str, ...]
    ignored: tuple[str, ...] = ()


_OWN_KEYS = ("tools", "loss_mask", "advantage", "reward", "old_logprobs", "episode")
ROLLOUT_KEYS = ("group", "token_ids", "messages", *_OWN_KEYS)
SHAPE_KEYS = ("group", "parent", "length", "sample_node", "reward", "trained")

# The first that knows a row reads the file: special forms stand before general ones.
FORMS = (
    Form("rollouts", "token_ids", lambda row: _has(row, "token_ids"), None, ROLLOUT_KEYS),
    Form(
        "shapes",
        "parent, length, sample_node",
        lambda row: _has(row, "parent") and not _has(row, "messages"),
        None,
        SHAPE_KEYS,
    ),
    Form("swe-agent", "history of messages", swe_agent.is_row, swe_agent.read, swe_agent.KEYS, swe_agent.IGNORED),
    Form("openhands", "history of events", openhands.is_row, openhands.read, openhands.KEYS, openhands.IGNORED),
    Form(
        "mini-swe-agent",
        "messages beside trajectory_format or info",
        mini_swe_agent.is_row,
        mini_swe_agent.read,
        mini_swe_agent.KEYS,
        mini_swe_agent.IGNORED,
    ),
    Form(
        "nemo-gym",
        "responses_create_params and response, or input and output",
        nemo_gym.is_row,
        nemo_gym.read,
        nemo_gym.KEYS,
        nemo_gym.IGNORED,
    ),
    Form("tau-bench", "traj", tau_bench.is_row, tau_bench.read, tau_bench.KEYS, tau_bench.IGNORED),
    Form("tau2-bench", "simulations", tau2_bench.is_row, tau2_bench.read, tau2_bench.KEYS, tau2_bench.IGNORED),
    Form("inspect", "eval and samples", inspect_ai.is_row, inspect_ai.read, inspect_ai.KEYS, inspect_ai.IGNORED),
    Form("sharegpt", "conversations", sharegpt.is_row, sharegpt.read, sharegpt.KEYS, sharegpt.IGNORED),
    Form(
        "prompt-completion",
        "prompt and completion",
        prompt_completion.is_row,
        prompt_completion.read,
        prompt_completion.KEYS,
        prompt_completion.IGNORED,
    ),
    Form("requests", "a list of messages per request", messages.is_requests, messages.read, messages.KEYS),
    Form("anthropic", "messages of blocks", anthropic.is_row, messages.read, messages.ANTHROPIC_KEYS),
    Form("messages", "messages", messages.is_row, messages.read, messages.KEYS),
)


def recognise(row: Any) -> Form:
    """The form of a file, by its first row.

    Raises:
        ValueError: none of them; the text says what was looked for and which keys came.
    """
    for form in FORMS:
        if form.is_row(row):
            return form
    others = "; ".join(f"{form.has} ({form.name})" for form in FORMS if form.name not in ("rollouts", "messages"))
    raise ValueError(
        "expected a row that holds token_ids or messages, and the group that it is of, or what another known form "
        f"has: {others}; got the keys {keys_of(row)}"
    )


def form_of_name(name: str) -> Form:
    """The form that ``--format`` names.

    Raises:
        ValueError: no form of that name.
    """
    for form in FORMS:
        if form.name == name:
            return form
    raise ValueError(f"expected a format of {', '.join(form.name for form in FORMS)}, got {name!r}")


def _has(row: Any, key: str) -> bool:
    return isinstance(row, dict) and key in row
