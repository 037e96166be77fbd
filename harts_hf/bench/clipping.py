"""Which tokens a loss would clip before any weight has moved, and what makes it.

At the first step the policy is the one that sampled, so the ratio of its log-probs to the old ones should be 1. It is
not where the old ones were computed elsewhere: by an engine, or by the trainer in other batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.bench.rollouts import StepRollouts
from harts_hf.trainers.old_logprobs import LogRange, agreement_of


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Old log-probs of one source beside the tree's own, over trained tokens.

    Attributes:
        tokens: compared.
        clipped: part of them whose ratio is outside ``[1 - epsilon, 1 + epsilon]``.
        rms: root mean square of the log-ratios.
        mean: of the log-ratios (the tree's less the source's).
        cause: in words.
    """

    tokens: int
    clipped: float
    rms: float
    mean: float
    cause: str


def measure_clipping(
    rollouts: StepRollouts, scored: Mapping[str, Sequence[NDArray]], own: str, *, epsilon: float
) -> dict[str, Clipping]:
    """Recorded log-probs, and those that other trainers scored on the same weights, beside one trainer's.

    Args:
        rollouts: of the step.
        scored: by trainer, ``[C]`` of each row.
        own: the trainer that the others are compared with.
        epsilon: of the clipped objective.

    Returns:
        By source: ``"recorded"`` (if there are some) and the names of the other trainers.
    """
    trained = np.concatenate(rollouts.masks)
    mine = _joined(scored[own], rollouts)[trained]
    sources = {name: _joined(rows, rollouts)[trained] for name, rows in scored.items() if name != own}
    noise = max((_rms(mine - other) for other in sources.values()), default=0.0)
    if rollouts.old_logprobs is not None:
        sources = {"recorded": np.concatenate(rollouts.old_logprobs)[trained], **sources}
    return {name: clipping_of(mine, other, noise, epsilon, name == "recorded") for name, other in sources.items()}


def clipping_of(mine: NDArray, other: NDArray, noise: float, epsilon: float, is_recorded: bool) -> Clipping:
    """Of two sets of log-probs ``[P]``; those that are NaN in the second are left out.

    Args:
        mine: the trainer's.
        other: the source's.
        noise: root mean square of what batching differently does to the trainer's own log-probs.
        epsilon: of the clipped objective.
        is_recorded: whether the source is not a trainer on the same weights.
    """
    known = ~np.isnan(other)
    if not known.any():
        return Clipping(tokens=0, clipped=0.0, rms=0.0, mean=0.0, cause="no log-prob is known")
    found = agreement_of(torch.from_numpy((mine - other)[known]), LogRange.of(epsilon, epsilon))
    return Clipping(
        tokens=int(found.tokens), clipped=found.clipped, rms=found.rms, mean=found.mean,
        cause=found.cause(noise) if is_recorded else "roundings: the same weights in other batches",
    )  # fmt: skip


def _joined(rows: Sequence[NDArray], rollouts: StepRollouts) -> NDArray:
    """``[sum C]``; rows that fill up a batch stand behind and are left out."""
    return np.concatenate([np.asarray(row, np.float64) for row in rows[: len(rollouts.masks)]])


def _rms(values: NDArray) -> float:
    return float(np.sqrt(np.nanmean(np.square(values)))) if len(values) else 0.0
