"""What travels between ranks that share one forest: values and derivatives by row, and a hash of the plan.

Activations never do. Each rank fills in the values of the rows that it owns; a sum over ranks then has all of them.
Derivatives come from every rank whose trajectories pass through a row, and add up as those of one rank do.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from harts_hf.planner import Schedule
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.values import TreeValues


def add_up_values(values: TreeValues, ranks: Ranks) -> TreeValues:
    """The sum over ranks of values of the same names and shapes."""
    found = iter(ranks.add_up([*values.rows.values(), *values.sums.values()]))
    return TreeValues(
        rows={name: next(found) for name in values.rows}, sums={name: next(found) for name in values.sums}
    )


def any_of_ranks(masks: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """``[N]`` bool by name: where a mask is set on any rank."""
    found = ranks.add_up([mask.int() for mask in masks.values()])
    return {name: total != 0 for name, total in zip(masks, found, strict=True)}


def check_same_plan(schedule: Schedule, names: Sequence[str], ranks: Ranks) -> None:
    """Ranks that run different plans would wait for one another for ever, or give wrong gradients.

    Raises:
        ValueError: on every rank, other plans on some of them.
    """
    hashes = [found for (found,) in ranks.gather(plan_hash(schedule, names))]
    if len(set(hashes)) > 1:
        listed = ", ".join(f"{found:016x} on process {rank}" for rank, found in enumerate(hashes))
        raise ValueError(
            f"expected the same plan on every process, got the hashes {listed}: the trajectories are the same, so "
            "settings (tree_*), the cost model or versions of packages differ"
        )


def settings_of(planner: Any, **more: object) -> dict[str, str]:
    """What plans follow from, by name, as texts that are the same in every process for the same settings.

    Args:
        planner: a :class:`~harts_hf.runtime.planning.WindowPlanner`.
        more: other settings.
    """
    found = {one.name: getattr(planner.config, one.name) for one in fields(planner.config)}
    cost = found.pop("cost")
    if cost is not None:
        found |= {f"cost.{one.name}": getattr(cost, one.name) for one in fields(cost)}
    return {name: repr(value) for name, value in (found | {"vocab_size": planner.vocab_size} | more).items()}


def differing_settings(own: Mapping[str, str], ranks: Ranks) -> str:
    """Which of :func:`settings_of` differ, and what each rank has. A collective."""
    everyone = [json.loads(text) for text in ranks.gather_texts(json.dumps(own))]
    names = dict.fromkeys(name for one in everyone for name in one)
    listed = []
    for name in names:
        values = [one.get(name, "nothing") for one in everyone]
        if len(set(values)) > 1:
            by_rank = {value: values.index(value) for value in values}  # the first process that has it
            listed.append(f"{name}: " + ", ".join(f"{value} on process {rank}" for value, rank in by_rank.items()))
    return "; ".join(listed)


def plan_hash(schedule: Schedule, names: Sequence[str]) -> int:
    """63 bits of a hash of the plan (:meth:`harts_hf.planner.Schedule.digest`) and of what is asked for."""
    return hash_of(schedule.digest(), *names)


def hash_of(*parts: object) -> int:
    """63 bits of a hash of things whose ``repr`` says all of them, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1
