"""What one forward of a window answered: filled into the values of the window, and differentiated."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from harts_hf.modeling import ENTROPY, HEAD_VALUES, TreeAnswer, Wanted
from harts_hf.runtime.values import TreeValues


@dataclass(frozen=True, eq=False, kw_only=True)
class Answered:
    """What a forward answered, and of which labels and rows."""

    answer: TreeAnswer
    wanted: Wanted

    def tree_rows(self, name: str) -> torch.Tensor:
        """The rows of the tree that the values of a name belong to."""
        return (self.wanted.labels if name in HEAD_VALUES else self.wanted.rows).tree_rows

    def filled_into(self, values: TreeValues | None, names: Collection[str], num_rows: int) -> TreeValues:
        """``values`` (None: of zeros) with these filled in (rows) or added (sums), detached.

        Args:
            values: of a tree of ``num_rows`` rows; changed in place.
            names: of the values per row that are taken.
            num_rows: N.

        Raises:
            ValueError: a sum of another shape than before.
        """
        rows = {name: value.detach() for name, value in self.answer["rows"].items() if name in names}
        sums = {name: value.detach() for name, value in self.answer["sums"].items()}
        if values is None:
            values = TreeValues(
                rows={name: value.new_zeros(num_rows) for name, value in rows.items()},
                sums={name: torch.zeros_like(value) for name, value in sums.items()},
            )
        for name, value in rows.items():
            values.rows[name][self.tree_rows(name)] = value
        for name, value in sums.items():
            if value.shape != values.sums[name].shape:
                raise ValueError(
                    f"expected the sum {name!r} to have one shape, got {tuple(values.sums[name].shape)} and then "
                    f"{tuple(value.shape)}"
                )
            values.sums[name] += value
        return values


@torch.enable_grad()  # a backward of autograd runs without
def inner_product(answered: Answered, coefficients: TreeValues) -> torch.Tensor:
    """Connected to every trainable output: one without coefficients takes part by an exact zero, its empty sum."""
    terms = []
    for name, value in answered.answer["rows"].items():
        coefficient = coefficients.rows.get(name)
        if coefficient is not None:
            terms.append((value * coefficient[answered.tree_rows(name)].to(value.dtype)).sum())
        elif name != ENTROPY:  # comes from the same head as log-probs, and its gradient would be paid for
            terms.append(value[:0].sum())
    for name, total in coefficients.sums.items():
        value = answered.answer["sums"][name]
        terms.append((value * total.to(value.dtype)).sum().to(terms[0].dtype))
    return sum(terms[1:], terms[0])
