"""Delta rules along the paths of a tree: gated (one decay per head) and Kimi (one decay per channel)."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from harts_hf.batch import LinearTables
from harts_hf.kernels.checks import check_floating, check_same_device, check_shape, choose_backend
from harts_hf.kernels.linear_attention import reference
from harts_hf.kernels.linear_attention import torch as torch_backend

_BY_DEVICE = {"cpu": "torch", "cuda": "fla"}


class TreeLinearOutput(NamedTuple):
    """What a delta rule returns.

    Attributes:
        output: ``[N, HV, V]`` in the dtype of ``q``.
        states: ``[X, HV, K, V]`` in float32 (or the inputs' dtype if wider): the state after each exported node.
    """

    output: torch.Tensor
    states: torch.Tensor


def tree_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: LinearTables,
    *,
    initial_states: torch.Tensor | None = None,
    export_nodes: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    backend: str | None = None,
) -> TreeLinearOutput:
    """The gated delta rule (arXiv 2412.06464) on every trajectory of a tree at once::

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T        o_t = S_t^T (scale q_t)

    evaluated chunk by chunk with the chunks that each trajectory has alone, so that outputs and states equal,
    bit for bit, those of the same function on each trajectory alone. Everything is computed, and states are carried,
    in float32 or the inputs' dtype if wider, as in Transformers' ``torch_chunk_gated_delta_rule``.

    Gradients of an output row enter through one of the copies of the row (rows before a branch are in the chunk of
    each branch, with equal values): the first that reaches as deep in the chunk as any gradient does. So a single
    trajectory's gradient, too, equals bit for bit that of the trajectory alone.

    Args:
        q: ``[E + N, H, K]`` handed rows, then own rows, after the convolution.
        k: ``[E + N, H, K]``.
        v: ``[E + N, HV, V]``; ``HV`` is a multiple of ``H``, and ``HV / H`` consecutive value heads share a q/k head.
        g: ``[E + N, HV]`` log of the decay, at most 0.
        beta: ``[E + N, HV]``.
        tables: how the chunks hang together.
        initial_states: ``[S, HV, K, V]`` float32 or wider, boundary states that ``tables.initial`` numbers.
        export_nodes: ``[X]`` int64, nodes whose outgoing states are returned (differentiable).
        scale: factor of the queries, None for ``K ** -0.5``.
        use_qk_l2norm: whether rows of q and k are divided by ``sqrt(sum of squares + 1e-6)`` first.
        backend: "torch", "fla" or "reference"; None chooses by device. "fla" (GPUs) computes as Flash Linear Attention
            does: states in float32, products in the dtype of q, and gradients enter through the first copy of a row.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated, or missing ``initial_states``.
    """
    check_shape("g", g, (len(q), v.shape[1] if v.dim() == 3 else "HV"))
    _check(q, k, v, g, beta, tables, initial_states, export_nodes)
    if v.shape[1] % q.shape[1]:
        raise ValueError(f"expected a multiple of the {q.shape[1]} q/k heads, got {v.shape[1]} value heads")
    if backend is None and q.dtype == torch.float64:
        backend = "torch"  # the GPU's kernels compute in float32 at most
    chosen = choose_backend("tree_gated_delta_rule", backend, q.device, by_device=_BY_DEVICE)
    run = _backend(chosen).gated_delta_rule
    return _run(run, q, k, v, g, beta, tables, initial_states, export_nodes, scale, use_qk_l2norm)


def tree_kimi_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: LinearTables,
    *,
    initial_states: torch.Tensor | None = None,
    export_nodes: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    backend: str | None = None,
) -> TreeLinearOutput:
    """Kimi delta attention (arXiv 2510.26692) on every trajectory of a tree at once: :func:`tree_gated_delta_rule`
    with a decay per channel, ``diag(exp(g_t)) S_{t-1}`` in place of ``exp(g_t) S_{t-1}``, and ``HV = H``.

    Equals, but for rounding, Transformers' ``chunk_kimi_delta_attention`` on each trajectory. Arguments, result and
    errors as there, but ``g`` is ``[E + N, H, K]``.
    """
    check_shape("g", g, q.shape)
    _check(q, k, v, g, beta, tables, initial_states, export_nodes)
    if v.shape[1] != q.shape[1]:
        raise ValueError(f"expected as many value heads as the {q.shape[1]} q/k heads, got {v.shape[1]}")
    if backend is None and q.dtype == torch.float64:
        backend = "torch"  # the GPU's kernels compute in float32 at most
    chosen = choose_backend("tree_kimi_delta_rule", backend, q.device, by_device=_BY_DEVICE)
    run = _backend(chosen).kimi_delta_rule
    return _run(run, q, k, v, g, beta, tables, initial_states, export_nodes, scale, use_qk_l2norm)


def _backend(name: str) -> ModuleType:
    if name == "fla":
        from harts_hf.kernels.linear_attention import fla

        return fla
    return reference if name == "reference" else torch_backend


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: LinearTables,
    initial_states: torch.Tensor | None,
    export_nodes: torch.Tensor | None,
) -> None:
    check_floating(q=q, k=k, v=v, g=g, beta=beta)
    check_shape("q", q, (tables.num_read, "H", "K"))
    check_shape("k", k, q.shape)
    check_shape("v", v, (len(q), "HV", "V"))
    check_shape("beta", beta, (len(q), v.shape[1]))
    if initial_states is not None:
        check_shape("initial_states", initial_states, ("S", v.shape[1], q.shape[2], v.shape[2]))
        if initial_states.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"expected initial_states in float32 or wider, got {initial_states.dtype}")
    if export_nodes is not None:
        check_shape("export_nodes", export_nodes, ("X",))
        if export_nodes.dtype != torch.int64:
            raise ValueError(f"expected export_nodes to be int64, got {export_nodes.dtype}")
    check_same_device(
        q=q, k=k, v=v, g=g, beta=beta, tables=tables.parent, initial_states=initial_states, export_nodes=export_nodes
    )


def _run(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: LinearTables,
    initial_states: torch.Tensor | None,
    export_nodes: torch.Tensor | None,
    scale: float | None,
    use_qk_l2norm: bool,
) -> TreeLinearOutput:
    if initial_states is None:
        initial_states = v.new_zeros(0, v.shape[1], q.shape[2], v.shape[2], dtype=torch.float32)
    if export_nodes is None:
        export_nodes = torch.zeros(0, dtype=torch.int64, device=q.device)
    # Autocast would round the products of a rule that is defined in float32.
    with torch.autocast(q.device.type, enabled=False):
        output, states = run(
            q,
            k,
            v,
            g,
            beta,
            tables,
            initial_states=initial_states,
            export_nodes=export_nodes,
            scale=q.shape[2] ** -0.5 if scale is None else scale,
            use_qk_l2norm=use_qk_l2norm,
        )
    return TreeLinearOutput(output=output, states=states)
