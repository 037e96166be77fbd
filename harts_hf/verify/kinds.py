"""Kinds of parameters: what errors of gradients are pooled over."""

from torch import nn

from harts_hf.modeling.families import family_of
from harts_hf.modeling.patching import causal_lm_of

# The first kind of which a part stands in the parameter's name.
_BY_NAME = {
    "A_log": ("A_log",),
    "dt_bias": ("dt_bias",),
    "convolutions": ("conv1d",),
    "norms": ("norm",),
    "embeddings": ("embed_tokens",),
    "head": ("lm_head",),
    "routers": ("mlp.gate.", "shared_expert_gate."),
    "experts": (".experts.", "shared_expert"),
}


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """The kind of every parameter of a supported model, by name."""
    base = causal_lm_of(model)
    family = family_of(base)
    linear, full = (family.class_named(name) for name in (family.linear_mixer, family.full_mixer))
    mixers = {name: module for name, module in model.named_modules() if isinstance(module, (linear, full))}
    kinds = {}
    for name, _ in model.named_parameters():
        mixer = next((module for prefix, module in mixers.items() if name.startswith(prefix + ".")), None)
        kinds[name] = _kind(name, mixer, linear, family.gate_projections)
    return kinds


def _kind(name: str, mixer: nn.Module | None, linear: type[nn.Module], gates: tuple[str, ...]) -> str:
    for kind, parts in _BY_NAME.items():
        if any(part in name for part in parts):
            return kind
    if mixer is None:
        return "MLPs"
    if not isinstance(mixer, linear):
        return "attention projections"
    is_gate = any(f".{gate}." in name for gate in gates)  # projections of output gates count as projections
    return "linear attention gates" if is_gate else "linear attention projections"
