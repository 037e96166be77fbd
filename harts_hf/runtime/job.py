"""The slices of one update on their window: leaves, losses, derivatives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harts_hf.modeling import LOG_PROB, WITHOUT_GRADIENT
from harts_hf.runtime.leaves import check_reach, collect, placeholders, spread_all, with_zero
from harts_hf.runtime.routes import TreeRoutes
from harts_hf.runtime.slices import Index, SliceTable
from harts_hf.runtime.values import TreeValues
from harts_hf.runtime.window import TreeWindow

Leaves = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """The slices of one update on their window: leaves, losses, derivatives.

    Attributes:
        slices: of this rank.
        indices: where the values of each lie.
        loss: of a slice and its values.
        names: of the values and sums that the loss reads.
        observed: of sums that it does not.
        window: of the update.
        table: which slices the window's trajectories belong to; None where no sum is asked for.
        routes: experts that are known before; None where none are.
        like: a tensor of the dtype and device of the model's values.
        loss_device: where the losses run.
    """

    slices: Sequence[Any]
    indices: Sequence[Index]
    loss: Callable[[Any, Leaves], torch.Tensor]
    names: tuple[str, ...]
    observed: tuple[str, ...]
    window: TreeWindow
    table: SliceTable | None
    routes: TreeRoutes | None
    like: torch.Tensor
    loss_device: torch.device | str

    def leaves(self, values: TreeValues) -> list[dict[str, torch.Tensor]]:
        """What the loss of each slice is given, on its device.

        Raises:
            ValueError: a value that an index does not place.
        """
        for index in self.indices:
            missing = [name for name in values.rows if name not in index]
            if missing:
                raise ValueError(
                    f"expected the index of every slice to name each value asked for, got {', '.join(index)} for "
                    f"{', '.join(values.rows)}: ask for other names, or let index() place {', '.join(missing)}"
                )
        rows = {name: with_zero(value.to(self.loss_device)) for name, value in values.rows.items()}
        return [
            spread_all(rows, index)
            | {k: value.to(self.loss_device, copy=True) for k, value in values.sums.items() if k in self.names}
            for index in self.indices
        ]

    def losses(self, leaves: Sequence[Leaves]) -> list[torch.Tensor]:
        """The loss of each slice."""
        return [self.loss(one, given) for one, given in zip(self.slices, leaves, strict=True)]

    def loss_and_coefficients(self, values: TreeValues) -> tuple[torch.Tensor, TreeValues]:
        """The sum of the losses, detached, and its derivatives by each value of the tree and each sum."""
        return self.differentiated(self.leaves(values), values.sums)

    def differentiated(
        self, given: Sequence[dict[str, torch.Tensor]], sums: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, TreeValues]:
        """The same, of what the loss of each slice is given, and the sums among it where the model is."""
        leaves = [{k: leaf.requires_grad_() for k, leaf in one.items() if k not in WITHOUT_GRADIENT} for one in given]
        losses = self.losses(given)
        for loss, one in zip(losses, leaves, strict=True):
            check_reach(loss, list(one.values()))
        # A loss reaches the leaves of its own slice alone, so that one call gives all of them their own.
        found = iter(torch.autograd.grad(losses, [leaf for one in leaves for leaf in one.values()], allow_unused=True))
        gradients = [{name: next(found) for name in one} for one in leaves]
        coefficients = TreeValues(
            rows={
                name: collect(
                    [one[name] for one in gradients],
                    [index[name] for index in self.indices],
                    self.window.tree.num_tokens,
                ).to(self.like.device)
                for name in given[0]
                if name not in sums and name not in WITHOUT_GRADIENT
            },
            sums={
                name: sum(
                    (one[name].to(value.device) for one in gradients if one[name] is not None), torch.zeros_like(value)
                )
                for name, value in sums.items()
                if name in self.names and name not in WITHOUT_GRADIENT
            },
        )
        return torch.stack([loss.detach() for loss in losses]).sum(), coefficients

    def coefficients_of_placeholders(self, *, compare: bool) -> TreeValues | None:
        """The derivatives; None if those by log-probs are not the same at all placeholders, or others are not 0.

        Args:
            compare: whether that is tried; if not, they are taken at the first placeholders as they are.
        """
        first: TreeValues | None = None
        known = True
        # The loss of every placeholder, even where the first says it all: ranks have to call theirs equally often.
        for values in placeholders(self.names, self.window.tree.num_tokens, self.like.to(self.loss_device)):
            _, found = self.loss_and_coefficients(values)
            if not compare:
                return found
            found = without_zeros(found)
            known = known and found.names == (LOG_PROB,)
            known = known and torch.equal((first or found).rows[LOG_PROB], found.rows[LOG_PROB])
            first = first or found
        return first if known else None

    def on_tree(self, given: Sequence[Leaves], name: str) -> torch.Tensor:
        """``[N]``, a value of the slices at the rows of the tree, where the model is; NaN where no slice has it."""
        # What -1 stands for comes last, and is left out.
        found = torch.full((self.window.tree.num_tokens + 1,), torch.nan, dtype=given[0][name].dtype)
        for leaves, index in zip(given, self.indices, strict=True):
            found[torch.from_numpy(index[name])] = leaves[name].detach().cpu()
        return found[:-1].to(self.like.device)

    def wanted(self) -> dict[str, torch.Tensor]:
        """By name, ``[N]`` bool, rows whose values the loss reads."""
        found = {}
        for name in self.names:
            mask = np.zeros(self.window.tree.num_tokens, bool)
            for index in self.indices:
                mask[index[name][index[name] >= 0]] = True
            found[name] = torch.from_numpy(mask).to(self.like.device)
        return found


def without_zeros(coefficients: TreeValues) -> TreeValues:
    """Without those by values other than log-probs that are 0, which would be paid for."""
    return coefficients.without(n for n, value in coefficients.rows.items() if n != LOG_PROB and not value.any())
