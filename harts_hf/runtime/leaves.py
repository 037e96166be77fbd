"""The leaves that a loss is computed on, and its derivatives by them.

A slice of an update (what one call of a loss sees) has tensors of its own shape; an index says which row of the tree
each of their entries is, or -1 for none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.modeling import LOG_PROB
from harts_hf.runtime.values import TreeValues

# Placeholders for values: what no token has, then values over the range that log-probs and entropies have.
PLACEHOLDER_RANGES = ((0.0, 0.0), (1e-3, 30.0))


def spread(values: torch.Tensor, index: NDArray[np.int64]) -> torch.Tensor:
    """Values per tree row ``[N]`` in the shape of a slice's index, 0 where it is -1."""
    return spread_all({"": with_zero(values)}, {"": index})[""]


def spread_all(values: Mapping[str, torch.Tensor], index: Mapping[str, NDArray[np.int64]]) -> dict[str, torch.Tensor]:
    """What :func:`spread` gives by name, of values that have their 0 already, which a step's slices share.

    An index that several names share is copied to the values' device once.
    """
    moved: dict[tuple[int, torch.device], torch.Tensor] = {}
    found = {}
    for name, value in values.items():
        key = id(index[name]), value.device
        if key not in moved:
            moved[key] = torch.from_numpy(index[name]).to(value.device)
        found[name] = value[moved[key]]
    return found


def with_zero(values: torch.Tensor) -> torch.Tensor:
    """``[N + 1]`` values with a 0 behind them, which is what the index -1 takes."""
    return torch.cat([values, values.new_zeros(1)])


def collect(
    gradients: Sequence[torch.Tensor | None], indices: Sequence[NDArray[np.int64]], num_rows: int
) -> torch.Tensor:
    """Sums gradients in the shapes of slices over the trajectories that share a tree row.

    Sums in float64 on the CPU, in the order of the slices: a few numbers per token, and no atomics.

    Returns:
        ``[num_rows]`` float64 on the CPU.
    """
    total = np.zeros(num_rows)
    for gradient, index in zip(gradients, indices, strict=True):
        if gradient is not None:
            scored = index >= 0
            weights = gradient.double().cpu().numpy()[scored]
            total += np.bincount(index[scored], weights=weights, minlength=num_rows)
    return torch.from_numpy(total)


def placeholders(names: Sequence[str], num_rows: int, like: torch.Tensor) -> Iterator[TreeValues]:
    """Values ``[num_rows]`` as ``like`` is typed and placed; derivatives that differ between them depend on values."""
    generator = torch.Generator().manual_seed(0)
    for low, high in PLACEHOLDER_RANGES:
        draws = torch.rand(len(names), num_rows, generator=generator)
        values = (low * (high / low) ** draws if low else torch.zeros_like(draws)).to(like)
        signs = [-1 if name == LOG_PROB else 1 for name in names]
        yield TreeValues(rows={name: sign * value for name, sign, value in zip(names, signs, values, strict=True)})


def check_reach(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """Refuses a loss that reaches a trainable tensor other than the values it was given.

    A loss of the user's own may run the model itself; only its derivatives by the leaves are taken, so that part of
    its gradient would be lost.

    Raises:
        ValueError: there is such a tensor (the message gives its shape), the loss depends on nothing, or it is not one
            number in a tensor.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"expected a loss that is one number, in a tensor, got {got}")
    if not loss.requires_grad:
        raise ValueError("expected a loss of the values that it is given, got one that depends on none of them")
    given = {id(leaf) for leaf in leaves}
    seen: set[Any] = set()
    open_nodes: list[Any] = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in given:
            raise ValueError(
                "expected a loss of the values that it is given alone (TRL's: the log-probs and entropies of "
                "_get_per_token_logps_and_entropies), got one that also reaches a trainable tensor of shape "
                f"{list(variable.shape)}: only derivatives by those values are taken, so that part of the gradient "
                "would be lost"
            )
        open_nodes += [parent for parent, _ in node.next_functions]
