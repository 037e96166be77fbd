"""Which call of a rollout function this is: what seeds of its rollouts depend on."""

from typing import Any


class Calls:
    """Counts the calls during a trainer's step, those of training and of evaluation apart.

    So an evaluation changes nothing of what is trained after it.
    """

    def __init__(self) -> None:
        # Of training (True) and evaluation: the step, and its calls so far less one.
        self._last: dict[bool, tuple[int, int]] = {}

    def next(self, trainer: Any) -> tuple[int, bool, int]:
        """The trainer's step, whether it trains, and the number of this call during it, from 0 on."""
        step, is_training = trainer.state.global_step, bool(trainer.model.training)
        last_step, call = self._last.get(is_training, (-1, 0))
        call = call + 1 if last_step == step else 0
        self._last[is_training] = step, call
        return step, is_training, call
