"""What a model's steps cost by its shapes: the planner's default cost model, scaled from the model that it is of."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from harts_hf.modeling.families import family_of
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.planner import DEFAULT_COST, CostModel
from harts_hf.planner.cost import UnitSeconds


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """Multiplications of a forward by what they are counted by, and layers.

    Attributes:
        per_row: of a token's products with weights, those of the experts that it goes to included; without the output
            head, which works on scored labels alone.
        per_pair: of a query with a key, and of its weight with a value, over all heads and full-attention layers.
        per_linear_row: of a token's keys with its values, over all heads and linear layers.
        layers: decoder layers.
        linear_layers: those with a linear rule.
    """

    per_row: float
    per_pair: float
    per_linear_row: float
    layers: int
    linear_layers: int


# Ling-3.0-tiny, which planner/cost.py's defaults describe; a test counts it from its configuration.
DEFAULT_WORK = ModelWork(per_row=893_779_968, per_pair=30_720, per_linear_row=4_718_592, layers=24, linear_layers=18)


def count_work(model: nn.Module) -> ModelWork:
    """Counts a model of a supported family.

    Args:
        model: may be patched, inside a PEFT model, on the meta device.

    Raises:
        UnsupportedModelError: no such family.
    """
    base = causal_lm_of(model)
    config, family = base.config, family_of(base)
    shape, kinds = family.linear_shape(config), config.layer_types
    linear, full = kinds.count("linear_attention"), kinds.count("full_attention")
    head = base.get_output_embeddings()
    groups = config.num_attention_heads / config.num_key_value_heads
    return ModelWork(
        per_row=sum(_products(module, config) for module in base.modules() if module is not head),
        per_pair=full * family.key_elements(config, True) * groups,
        per_linear_row=linear * shape.heads * shape.keys * shape.values,
        layers=len(kinds),
        linear_layers=linear,
    )


def _products(module: Any, config: Any) -> float:
    """Multiplications per row of one module's own weights."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    if type(module).__name__.endswith("Experts"):
        weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
        return sum(weight[0].numel() * config.num_experts_per_tok for weight in weights)
    return 0.0


def scaled_cost(model: nn.Module, name: str) -> CostModel:
    """The default cost model for another model on the same GPU: each coefficient times the ratio of the work.

    An estimate, which knows nothing of other kernels and precisions: ``fit_cost_model`` measures. Bytes of handed
    states are not scaled (``with_handed_bytes`` counts them).

    Args:
        model: see :func:`count_work`.
        name: of it, for ``source``.

    Raises:
        UnsupportedModelError: no model of a supported family.
    """
    work = count_work(model)
    ratios = {
        "rows": work.per_row / DEFAULT_WORK.per_row,
        "linear_rows": work.per_linear_row / DEFAULT_WORK.per_linear_row,
        "pairs": work.per_pair / DEFAULT_WORK.per_pair,
        "calls": work.linear_layers / DEFAULT_WORK.linear_layers,
        "handoff_bytes": 1.0,
        "microbatches": work.layers / DEFAULT_WORK.layers,
    }

    def scaled(seconds: UnitSeconds) -> UnitSeconds:
        return UnitSeconds(**{unit: getattr(seconds, unit) * ratio for unit, ratio in ratios.items()})

    return replace(
        DEFAULT_COST,
        forward=scaled(DEFAULT_COST.forward),
        backward=scaled(DEFAULT_COST.backward),
        source=f"{name}, scaled from {DEFAULT_COST.source.removeprefix('default: ')}",
    )
