"""The root forward of a patched model: log-probs of a microbatch's labels instead of logits."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from harts_hf.batch import LabelTable, TreeBatch
from harts_hf.errors import UnsupportedModelError
from harts_hf.kernels.logprobs import token_logprobs
from harts_hf.modeling.adapters import check_adapters
from harts_hf.modeling.checks import check_checkpointing, check_dropout

# A dict reaches every layer as it is, so Transformers builds no mask (it would be N x N and wrong).
NO_MASK = {"full_attention": None, "linear_attention": None}


@dataclass
class TreeOutput(ModelOutput):
    """What a patched model returns for a microbatch.

    Attributes:
        log_probs: ``[P]`` log-probability of each label, float32 or wider.
        entropy: ``[P]`` entropy of the distribution that each label was drawn from; None if not asked for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None


class ScoreRequest:
    """Which labels of a microbatch to score, and how. A plain object, so that FSDP neither casts nor copies it.

    Args:
        labels: rows and labels; a part of ``TreeBatch.labels`` where only some are needed.
        temperature: logits are divided by it.
        return_entropy: whether to compute entropies.
        head_in_fp32: whether the head runs in float32 whatever the model's dtype.
    """

    def __init__(
        self,
        labels: LabelTable,
        *,
        temperature: float = 1.0,
        return_entropy: bool = False,
        head_in_fp32: bool = False,
    ) -> None:
        self.labels = labels
        self.temperature = temperature
        self.return_entropy = return_entropy
        self.head_in_fp32 = head_in_fp32


def tree_forward(
    self: Any, *args: Any, harts: TreeBatch | None = None, harts_score: ScoreRequest | None = None, **kwargs: Any
) -> Any:
    """Bound to a patched model as its ``forward``; without ``harts`` the stock forward runs as it is."""
    if harts is None:
        return self._harts_stock_forward(*args, **kwargs)
    given = [name for name, value in kwargs.items() if value is not None] + ["positional arguments"] * bool(args)
    if given or harts_score is None:
        got = ", ".join(given) or "no harts_score"
        raise ValueError(f"expected harts and harts_score and nothing else, got {got}")
    check_checkpointing(self)
    check_dropout(self)
    check_adapters(self)
    check_head(self)
    hidden = self.base_model(
        input_ids=harts.input_ids,
        position_ids=harts.position_ids,
        attention_mask=NO_MASK,
        use_cache=False,
        harts=harts,
    ).last_hidden_state[0]
    # Through the head's own call, so that FSDP2 and ZeRO-3 gather its weight for the forward and for the backward.
    log_probs, entropy = self.get_output_embeddings()(hidden, harts_score=harts_score)
    return TreeOutput(log_probs=log_probs, entropy=entropy)


def has_tree_head(model: Any) -> bool:
    """Whether a patched model's head is still the one that was patched."""
    return "_harts_stock_forward" in vars(model.get_output_embeddings())


def check_head(model: Any) -> None:
    """Refuses a patched model whose head was replaced.

    Raises:
        UnsupportedModelError: the head is another module than the one that was patched.
    """
    if not has_tree_head(model):
        raise UnsupportedModelError(
            "expected the output head that was patched, got another one (resize_token_embeddings and "
            "set_output_embeddings replace it): call unpatch before they run, or unpatch and patch after"
        )


def head_forward(self: Any, hidden: torch.Tensor, *args: Any, harts_score: ScoreRequest | None = None) -> Any:
    """Bound to a patched model's head as its ``forward``: log-probs and entropies ``[P]`` where it is given a request.

    Args:
        self: the head, a linear layer ``[V, D]``.
        hidden: ``[N, D]``.
        args: what the stock forward takes besides.
        harts_score: the request; without it the stock forward runs as it is.
    """
    if harts_score is None:
        return self._harts_stock_forward(hidden, *args)
    weight, bias = self.weight, self.bias
    if harts_score.head_in_fp32:
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    return token_logprobs(
        hidden,
        weight,
        bias,
        harts_score.labels.rows,
        harts_score.labels.token_ids,
        temperature=harts_score.temperature,
        return_entropy=harts_score.return_entropy,
    )
