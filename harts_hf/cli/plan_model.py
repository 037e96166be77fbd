"""A model that `harts plan` estimates for, by its configuration: costs, bytes of rows and of parameters."""

from functools import cached_property
from typing import Any

import torch

from harts_hf.cli.dry_run.memory import row_bytes_of
from harts_hf.cli.plan_report import RowBytes
from harts_hf.cli.plan_text import gigabytes
from harts_hf.modeling import handed_sizes, with_handed_bytes
from harts_hf.modeling.costs import scaled_cost
from harts_hf.planner import CostModel

# Of a trained parameter in bfloat16: weight, gradient, and AdamW's two tensors like it.
BYTES_PER_PARAMETER = 8


class PlannedModel:
    """A model without weights.

    Args:
        model: on the meta device, in bfloat16.
        name: of it, for people.

    Raises:
        UnsupportedModelError: no model of a supported family.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._model = model
        self._name = name
        self._scaled = scaled_cost(model, name)

    def cost(self, measured: CostModel | None) -> CostModel:
        """A measured cost model, or the default one scaled to the model, with the bytes that the model hands over."""
        return with_handed_bytes(measured or self._scaled, handed_sizes(self._model, torch.bfloat16))

    @cached_property
    def row_bytes(self) -> RowBytes:
        """Of the model's layers."""
        kept, running = row_bytes_of(self._model, width=2)
        return RowBytes(kept=kept, running=running, source=self._name)

    @property
    def said(self) -> str:
        """The model in a line."""
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        return (
            f"{self._name}: {self._model.config.model_type}, {parameters:,} parameters; with their gradients and "
            f"AdamW's states in bfloat16 {gigabytes(BYTES_PER_PARAMETER * parameters)} more, before they are sharded"
        )
