"""What is said of environments that failed: metrics, the log, and an error where nothing is left."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harts_hf.rollouts.environments.failures import FAILURE_KINDS, EpisodeFailure, EpisodesFailedError
from harts_hf.rollouts.sampled import SampledRollout

logger = logging.getLogger(__name__)


class FailureReport:
    """Keeps count of failures over the calls of a collector."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, type | None]] = set()
        self._num_failed_calls = 0  # in a row

    def of(self, rollouts: Sequence[SampledRollout], trainer: Any, *, counts: dict[str, int]) -> dict[str, float]:
        """Logs failures, each kind once with its traceback, and what a call's rollouts say in numbers.

        Args:
            rollouts: of the call, at least one.
            trainer: the metrics are added to those that it logs.
            counts: further metrics, by name.

        Returns:
            ``environment/failed``, the part of the episodes that failed; ``environment/failed/KIND``, how many of each
            kind; and ``counts`` below ``environment/``.

        Raises:
            EpisodesFailedError: every episode failed and has no reward; where there are several processes, every one
                of this process and in two calls in a row.
        """
        failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
        for failure in failures:
            self._log(failure)
        kinds = Counter(failure.kind for failure in failures)
        metrics = {
            "environment/failed": len(failures) / len(rollouts),
            **{f"environment/failed/{kind}": float(kinds[kind]) for kind in FAILURE_KINDS},
            **{f"environment/{name}": float(count) for name, count in counts.items()},
        }
        logged = getattr(trainer, "_metrics", None)
        if logged is not None:
            mode = "train" if trainer.model.training else "eval"
            for name, value in metrics.items():
                logged[mode][name].append(value)
        self._check(rollouts, kinds, trainer.accelerator.num_processes)
        return metrics

    def _log(self, failure: EpisodeFailure) -> None:
        key = failure.kind, type(failure.__cause__) if failure.__cause__ is not None else None
        if key in self._logged:
            return
        self._logged.add(key)
        logger.warning(
            "an environment failed (%s), which costs its episode; further failures of this kind are counted in "
            "environment/failed/%s and not shown: %s",
            failure.kind,
            failure.kind,
            failure.described(),
        )

    def _check(self, rollouts: Sequence[SampledRollout], kinds: "Counter[Any]", num_processes: int) -> None:
        # A failure that has a reward is trained: the policy may learn to avoid it.
        lost = [rollout.failure for rollout in rollouts if rollout.failure is not None and rollout.reward is None]
        self._num_failed_calls = self._num_failed_calls + 1 if len(lost) == len(rollouts) else 0
        # Of several processes one may have few episodes, and bad luck with all of them.
        if self._num_failed_calls < (1 if num_processes == 1 else 2):
            return
        assert lost[0] is not None
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        raise EpisodesFailedError(
            f"expected environments that can be played, got {len(lost)} failures of {len(rollouts)} episodes "
            f"({counted}); the first: {lost[0]}"
        ) from (lost[0].__cause__ or lost[0])
