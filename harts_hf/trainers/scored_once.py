"""No row of the policy is scored twice on the same weights.

Where rollouts come from an engine, or one generation serves several optimizer steps, TRL asks for the policy's
log-probs at generation. The first optimizer step begins on the same weights: what it would score is known. Its losses
then see, to the bit, the values that TRL got, so their ratio to ``old_per_token_logps`` is exactly 1, as it is where
TRL leaves those out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harts_hf.modeling import LOG_PROB, walking
from harts_hf.rollouts.recorded_rollouts import RecordedRollouts
from harts_hf.runtime import ModelChangedError
from harts_hf.runtime.guard import ModelGuard
from harts_hf.runtime.kept import KeptScores, KeptTrajectories
from harts_hf.runtime.slices import SliceRows
from harts_hf.trainers.micro_steps import active_adapters

# Attributes of modules that change no value of a forward: TRL sets the first two around each generation, DeepSpeed
# counts by the third.
WITHOUT_EFFECT = frozenset({"training", "gradient_checkpointing", "applied_pre_backward_ref_cnt"})
# Of names that hold no settings: PyTorch's registers (FSDP2 adds hooks in the first forward), DeepSpeed's own.
_PRIVATE = ("_", "ds_")


@dataclass(frozen=True, eq=False, kw_only=True)
class Weights:
    """A model's weights as they are now, and whatever else its forwards read, to be compared with later.

    Attributes:
        guard: sees what changed in the model's tensors and modules.
        adapters: which were active.
        numbers: attributes of modules; see :func:`numbers_of`.
        step: optimizer steps so far; in few bits a small one may leave every sample of the guard as it was.
    """

    guard: ModelGuard
    adapters: Any
    numbers: list[Any]
    step: int

    @classmethod
    def of(cls, model: nn.Module, step: int) -> "Weights":
        """Those of a model, without a wrapper, after so many optimizer steps."""
        return cls(
            guard=ModelGuard(model, all_buffers=True),
            adapters=active_adapters(model),
            numbers=numbers_of(model),
            step=step,
        )

    def are_of(self, model: nn.Module, step: int) -> bool:
        """Whether the model still has them."""
        if step != self.step or active_adapters(model) != self.adapters or numbers_of(model) != self.numbers:
            return False
        try:
            self.guard.check_all()
        except ModelChangedError:
            return False
        return True


def numbers_of(model: nn.Module) -> list[Any]:
    """Numbers, texts and containers of them that the modules of a model have as attributes, in their order.

    An adapter's scaling, a norm's epsilon, a router's number of experts: forwards read them, and no tensor changes
    with them.
    """
    return [
        (name, number)
        for module in walking.modules(model)
        for name, value in vars(module).items()
        if name not in WITHOUT_EFFECT and not name.startswith(_PRIVATE) and (number := _plain(value)) is not _OTHER
    ]


_OTHER = object()


def _plain(value: Any) -> Any:
    """A copy that compares by value; _OTHER of what is no plain number, text or container of these."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        items: Any = [(key, _plain(one)) for key, one in value.items()]
        return _OTHER if any(one is _OTHER for _, one in items) else items
    if isinstance(value, list | tuple):
        found = [_plain(one) for one in value]
        return _OTHER if any(one is _OTHER for one in found) else found
    return _OTHER


class ScoredOnce:
    """What was scored of a model since the last optimizer step.

    Args:
        trainer: whose optimizer steps are counted.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._passes: list[tuple[Weights, KeptScores]] = []

    def weights(self, model: nn.Module) -> Weights | None:
        """To be taken before a pass that is to be kept; None where no step will ask for it: in evaluation, of a model
        without trainable parameters (a reference, or the policy without its adapters)."""
        is_trained = any(parameter.requires_grad for parameter in walking.parameters(model))
        return Weights.of(model, self._step) if is_trained and self._trainer.model.training else None

    def keep(self, weights: Weights, scores: KeptScores) -> None:
        """Keeps a pass until the next optimizer step."""
        self._passes.append((weights, scores))

    def take(self, model: nn.Module, device: torch.device | str) -> list[KeptScores]:
        """The passes, on ``device``, that an optimizer step which begins now need not run again.

        Nothing is kept afterwards: the step changes the weights.
        """
        passes, self._passes = self._passes, []
        return [scores.to(device) for weights, scores in passes if weights.are_of(model, self._step)]

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)


class RecordedReference:
    """Log-probs of a reference model for recorded rollouts, which come again in every epoch: each is scored once.

    TRL keeps them over ``num_iterations`` itself. Nothing is kept of adapters that are switched off (their model's
    weights change) and of references that follow the policy (``sync_ref_model``).

    Args:
        trainer: whose reference model it is.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._found = KeptTrajectories(LOG_PROB)
        self._weights: Weights | None = None

    def is_asked(self, model: nn.Module, *, entropy: bool) -> bool:
        """Whether a call of TRL's hook is for such log-probs; the same on every process.

        Args:
            model: that is to be scored, without a wrapper.
            entropy: whether entropies are asked for.
        """
        trainer = self._trainer
        rollouts = getattr(trainer, "_user_rollout_func", None)  # once TreeEpisodes stands before it
        reference = getattr(trainer, "ref_model", None)
        return (
            not entropy
            and isinstance(rollouts, RecordedRollouts)
            and reference is not None
            and model is trainer.accelerator.unwrap_model(reference)
            and trainer.model.training
            and not getattr(trainer.args, "sync_ref_model", False)
        )

    def of(self, model: nn.Module, rows: SliceRows) -> torch.Tensor | None:
        """``[B, C]`` on the CPU; None if a row was not scored yet, or the model has changed since."""
        if self._weights is None or not self._weights.are_of(model, 0):
            self._found.clear()
            self._weights = Weights.of(model, 0)
            return None
        return self._found.of(rows)

    def keep(self, scores: KeptScores) -> None:
        """Keeps a pass to the end of the training: a number for each token of each trajectory, on the CPU."""
        self._found.add(scores)
