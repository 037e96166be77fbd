"""A model that `harts plan` estimates for, by its configuration: costs, bytes of rows and of parameters."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from harts_hf.cli.plan_memory import fitted, states_bytes
from harts_hf.cli.plan_report import RowBytes
from harts_hf.cli.plan_text import gigabytes
from harts_hf.modeling import handed_sizes, with_handed_bytes
from harts_hf.modeling.costs import scaled_cost
from harts_hf.modeling.memory import row_bytes
from harts_hf.planner import PlannerConfig


class PlannedModel:
    """A model without weights.

    Args:
        model: on the meta device, in bfloat16.
        name: of it, for people.

    Attributes:
        said: what there is to say of it, in lines.

    Raises:
        UnsupportedModelError: no model of a supported family.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._model = model
        self._name = name
        self._scaled = scaled_cost(model, name)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.said = [
            f"{name}: {model.config.model_type}, {parameters:,} parameters; with gradients and AdamW's states in "
            f"bfloat16 {gigabytes(states_bytes(model))} more, before they are sharded"
        ]

    def configured(self, config: PlannerConfig, *, memory: str | None, keeps_limits: bool) -> PlannerConfig:
        """A configuration whose costs are the model's, and with a GPU's memory the limits that fit into it.

        Args:
            config: with a cost model that was measured, or none: then the default one is scaled.
            memory: of the GPU, such as "141GB", or None. What fits is added to ``said``.
            keeps_limits: whether the configuration's own limits stay.

        Raises:
            ValueError: no size, or one that the model does not fit into.
        """
        cost = config.cost or self._scaled
        if memory is None:
            return replace(config, cost=with_handed_bytes(cost, handed_sizes(self._model, torch.bfloat16)))
        config, line = fitted(memory, self._model, replace(config, cost=cost), chosen=keeps_limits)
        self.said.append(line)
        return config

    @cached_property
    def row_bytes(self) -> RowBytes:
        """Of the model's layers."""
        rows = row_bytes(self._model, dtype=torch.bfloat16, checkpointing=True, fused=True)
        return RowBytes(kept=rows.kept, running=rows.running, running_prefix=rows.prefix_running, source=self._name)
