"""The oracle: the unpatched Hugging Face model, one trajectory at a time, in fp64."""

import numpy as np
import torch
from torch import nn

from harts_hf.verify.oracle import float64_everywhere as float64_everywhere


def trajectory_values(
    model: nn.Module, tokens: np.ndarray, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies, [L - 1] each, of one trajectory on a stock model, by its logits.

    Entropies are of the distributions that the tokens after the first were drawn from.
    """
    ids = torch.from_numpy(np.asarray(tokens))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(1, ids[0, 1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def trajectory_log_probs(model: nn.Module, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """The log-probs of :func:`trajectory_values`."""
    return trajectory_values(model, tokens, temperature)[0]


def random_weights(trajectories: list[np.ndarray], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Coefficients of each log-prob, different for equal tokens of different trajectories."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(row) - 1, generator=generator, dtype=torch.float64).to(dtype) for row in trajectories]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients, zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def assert_gradients_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float) -> None:
    """Each entry within ``relative * max(|g|, 1e-3 * median |g|)``, the median over the entries not 0.

    Entries that are 0 in exact arithmetic (a router's unselected experts) hold the rounding of the large ones, a few
    1e-16 of them: 1e-13 of the largest entry is allowed on top.
    """
    assert got.keys() == expected.keys()
    for name, reference in expected.items():
        touched = reference[reference != 0].abs()
        if not touched.numel():
            assert not got[name].any(), f"{name}: a gradient where there is none"
            continue
        allowed = relative * torch.maximum(reference.abs(), 1e-3 * touched.median()) + 1e-13 * touched.max()
        worst = ((got[name] - reference).abs() / allowed).max().item()
        assert worst <= 1, f"{name}: an error of {worst:.2e} times what is allowed"
