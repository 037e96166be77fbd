"""Token mixers on a rollout tree: Transformers' own forward functions with the sequence operations exchanged.

A patched mixer runs its stock forward, projections, gates and norms included, with three names rebound for the one
call: the causal convolution, the chunkwise rule, and the attention interface. No code is copied and no global is
touched; without a plan the stock forward runs as it is (:mod:`harts_hf.modeling.reference_calls`).
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from harts_hf.errors import UnsupportedModelError
from harts_hf.kernels.attention import tree_attention
from harts_hf.kernels.conv import tree_causal_conv1d
from harts_hf.modeling.boundary import export_rows, export_states, import_rows, imported
from harts_hf.modeling.exchanged import Exchanged
from harts_hf.modeling.families import Family
from harts_hf.modeling.fused import expanded_latents, fuses, rotary_of
from harts_hf.modeling.reference_calls import may_call_references, references_of
from harts_hf.modeling.tree_pass import TreePass

CONV_FUNCTION = "causal_conv1d_fn"
ATTENTION_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
EXPANSION = "expand_kv"  # of an MLA's latents


class TreeMixer(Exchanged):
    """Marks a mixer that accepts ``harts=TreePass``; never instantiated by itself."""


@lru_cache
def tree_linear_class(stock: type[nn.Module], family: Family) -> type[nn.Module]:
    """A subclass of a linear mixer that runs on a tree when it is given a plan."""
    raw_forward = _raw_forward(stock, {CONV_FUNCTION, family.rule_function})
    references = references_of(raw_forward)
    on_cpu = _rebind(raw_forward, references)

    def forward(self: nn.Module, *args: Any, harts: TreePass | None = None, **kwargs: Any) -> torch.Tensor:
        if harts is None:
            plain = on_cpu if references and may_call_references(self, args, kwargs) else stock.forward
            return plain(self, *args, **kwargs)
        layer: Any = self.layer_idx
        names = {CONV_FUNCTION: _conv_on(harts, layer), family.rule_function: rule_on(harts, layer, family.rule)}
        return _rebind(raw_forward, names)(self, *args, **kwargs)

    return _subclass(stock, forward)


@lru_cache
def tree_attention_class(stock: type[nn.Module], family: Family) -> type[nn.Module]:
    """A subclass of a full-attention mixer that runs on a tree when it is given a plan."""
    rotary = rotary_of(family)
    raw_forward = _raw_forward(stock, {ATTENTION_REGISTRY, *rotary})

    def forward(self: nn.Module, *args: Any, harts: TreePass | None = None, **kwargs: Any) -> Any:
        if harts is None:
            return stock.forward(self, *args, **kwargs)
        hands_over = "keys" in harts.batch.imports or "keys" in harts.batch.exports
        expanded = hands_over and harts.handoff is not None and harts.handoff.expand_latents
        # Transformers' mixers join earlier keys and values (MLA: latents) to new ones through their cache.
        kwargs["cache"] = _HandedKeys(harts) if hands_over and not expanded else None
        attention = _AttentionOn(harts, _HandedKeys(harts) if expanded else None)
        return _rebind(raw_forward, {**rotary, ATTENTION_REGISTRY: attention})(self, *args, **kwargs)

    if not hasattr(stock, EXPANSION):
        return _subclass(stock, forward)

    def expand_kv(self: nn.Module, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (expanded_latents if fuses(latents) else getattr(stock, EXPANSION))(self, latents, rotary)

    return _subclass(stock, forward, **{EXPANSION: expand_kv})


def _conv_on(tree_pass: TreePass, layer: int) -> Callable[..., torch.Tensor]:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,  # [1, D, N]
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        # Not [0], whose backward copies the gradient into zeros, channels first: products on it are slow.
        rows = export_rows(tree_pass, "conv", layer, [hidden_states.squeeze(0).transpose(0, 1)], [0])
        (together,) = import_rows(tree_pass, "conv", layer, rows, [0])
        mixed = tree_causal_conv1d(
            together, weight, bias, tree_pass.batch.conv(weight.shape[-1]), activation=activation
        )
        return mixed.transpose(0, 1)[None]

    return causal_conv1d_fn


def rule_on(tree_pass: TreePass, layer: int, rule: Callable[..., Any]) -> Callable[..., Any]:
    """What a stock linear mixer calls for its chunkwise rule: ``rule`` on the pass's tree, with its handed states."""

    def chunk_rule(
        query: torch.Tensor,  # [1, N, H, K]
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        dims = [0] * 5
        inputs = [tensor.squeeze(0) for tensor in (query, key, value, g, beta)]
        rows = export_rows(tree_pass, "linear", layer, inputs, dims)
        rows = import_rows(tree_pass, "linear", layer, rows, dims)
        states = imported(tree_pass, "states", layer, 1)
        exported = tree_pass.batch.exports.get("states") if tree_pass.handoff is not None else None
        out = rule(
            *rows,
            tree_pass.batch.linear,
            initial_states=None if states is None else states[0],
            export_nodes=exported,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )
        return export_states(tree_pass, layer, out.output, None if exported is None else out.states)[None], None

    return chunk_rule


class _HandedKeys:
    """Stands in for a cache: hands over a microbatch's keys and values, and puts handed ones before them."""

    def __init__(self, tree_pass: TreePass) -> None:
        self.tree_pass = tree_pass

    def update(
        self, first: torch.Tensor, second: torch.Tensor, layer_idx: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, or an MLA's latents and rotary keys, ``[1, H, N, D]``; returns them with ``E + N`` rows."""
        rows = export_rows(self.tree_pass, "keys", layer_idx, [first, second], [2, 2])
        together = import_rows(self.tree_pass, "keys", layer_idx, rows, [2, 2])
        return together[0], together[1]


class _AttentionOn:
    """Stands in for the attention registry during one call.

    Args:
        tree_pass: the running forward.
        handed: hands over keys and values as attention reads them; None where a cache has done so before.
    """

    def __init__(self, tree_pass: TreePass, handed: _HandedKeys | None) -> None:
        self.tree_pass, self.handed = tree_pass, handed

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        """The tree attention, whatever implementation the configuration names."""
        return self._attend

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if self.handed is not None:
            key, value = self.handed.update(key, value, module.layer_idx)  # type: ignore[arg-type]
        device = query.device.type
        if torch.is_autocast_enabled(device):  # stock attention is on autocast's list; rotary keys come in float32
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        out = tree_attention(
            query,
            key,
            value,
            self.tree_pass.batch.attention,
            scale=scaling,
            deterministic=self.tree_pass.deterministic,
        )
        return out, None


def _raw_forward(stock: type[nn.Module], names: set[str]) -> FunctionType:
    """The innermost forward function of a class, checked to use the names that will be rebound."""
    raw = inspect.unwrap(stock.forward)
    missing = names - set(raw.__code__.co_names)
    if missing:
        raise UnsupportedModelError(
            f"expected {stock.__name__}.forward to call {', '.join(sorted(missing))}, but it does not: this version "
            "of transformers is not supported"
        )
    return raw


def _rebind(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    rebound = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound


def _subclass(stock: type[nn.Module], forward: Callable[..., Any], **methods: Callable[..., Any]) -> type[nn.Module]:
    # The stock name stays, since Transformers, PEFT and FSDP settings find layers by class name.
    made = {"forward": forward, **methods, "__module__": stock.__module__, "stock": stock}
    return type(stock.__name__, (stock, TreeMixer), made)
