"""What a benchmark trains: a model, groups of rollouts, and the arguments of all trainers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import BenchStep
from harts_hf.modeling import vocab_size_of
from harts_hf.rollouts.recorded import RolloutGroup
from harts_hf.trainers import TreeGRPOConfig


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """All that is the same for every side.

    Attributes:
        model: unpatched, on its device.
        groups: of rollouts.
        args: of the trainers.
        tokenizer: of the trainers.
        name: of the model.
        workload: name of the rollouts.
        about: model, precision and variant in words.
        sampling_seconds: that a step's rollouts took to sample; None where they come from a file.
    """

    model: nn.Module
    groups: Sequence[RolloutGroup]
    args: TreeGRPOConfig
    tokenizer: Any
    name: str
    workload: str
    about: str
    sampling_seconds: float | None = None

    def step(
        self, groups: Sequence[RolloutGroup], *, seed: int, labels: str, old_log_probs: bool = False
    ) -> BenchStep:
        """One step on some groups: see :meth:`StepRollouts.of`."""
        rollouts = StepRollouts.of(groups, vocab_size=vocab_size_of(self.model), seed=seed, labels=labels)
        return BenchStep(
            model=self.model, rollouts=rollouts, args=self.args, tokenizer=self.tokenizer, old_log_probs=old_log_probs
        )


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Adapters on all linear layers, without dropout.

    Raises:
        ValueError: a rank below 1.
        ImportError: PEFT is not installed.
    """
    if rank < 1:
        raise ValueError(f"expected a rank of adapters of at least 1, got {rank}")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
    found: nn.Module = get_peft_model(model, config)
    return found


def word_tokenizer() -> PreTrainedTokenizerFast:
    """For rollouts of token ids: TRL wants to show completions as texts, which nobody reads here."""
    inner = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
