"""Log-probabilities with all logits at once."""

import torch

from harts_hf.kernels.checks import wide_dtype


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    return_entropy: bool,
    return_top1: bool,
    max_chunk_elements: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See :func:`harts_hf.kernels.logprobs.api.token_logprobs`; ``max_chunk_elements`` is not used."""
    logits = hidden[rows] @ weight.to(hidden.dtype).T
    if bias is not None:
        logits = logits + bias.to(hidden.dtype)
    logits = logits.to(wide_dtype(hidden)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, dim=-1)
    chosen = logp.gather(1, labels[:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(dim=1) if return_entropy else None
    is_top1 = (logp.argmax(dim=1) == labels).to(logp.dtype) if return_top1 else None
    return chosen, entropy, is_top1
