"""What a window's forwards answer, and a loss's derivatives by it: the same names, the same shapes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from harts_hf.modeling import HEAD_VALUES


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeValues:
    """Named values per row of a tree and named sums, or the derivatives of a loss by each of them.

    A derivative by a row's value is summed over the trajectories that share the row. So the backward of a window is
    that of one inner product of values and derivatives, by the chain rule.

    Attributes:
        rows: ``[N]`` each, float32 or wider. Values of the head (``log_prob``, ``entropy``, ``is_top1``) are those of
            a row's token as the row before it predicts it, and 0 at roots, which nothing predicts; other values are of
            the row itself. 0 where nothing was asked for.
        sums: tensors of fixed shape; see :class:`harts_hf.modeling.Sum`.
    """

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Of rows, then of sums."""
        return (*self.rows, *self.sums)

    def without(self, names: Iterable[str]) -> "TreeValues":
        """All but some of the values per row."""
        dropped = set(names)
        return TreeValues(rows={name: v for name, v in self.rows.items() if name not in dropped}, sums=self.sums)

    def is_nonzero(self) -> dict[str, torch.Tensor]:
        """``[N]`` bool for each value per row."""
        return {name: value != 0 for name, value in self.rows.items()}


def on_cpu(masks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``[N]`` masks by name on the CPU; a GPU is waited for once."""
    return dict(zip(masks, torch.stack(list(masks.values())).cpu(), strict=True)) if masks else {}


def asked(masks: Mapping[str, torch.Tensor], tree_rows: torch.Tensor, *, of_labels: bool) -> torch.Tensor:
    """``[P]`` bool, which of some rows of the tree any of the values of labels, or of rows themselves, is asked of.

    Args:
        masks: ``[N]`` bool by name of a value.
        tree_rows: ``[P]``, on the masks' device.
        of_labels: whether values of labels count, or the others.
    """
    found = torch.zeros_like(tree_rows, dtype=torch.bool)
    for name, mask in masks.items():
        if (name in HEAD_VALUES) == of_labels:
            found |= mask[tree_rows]
    return found
