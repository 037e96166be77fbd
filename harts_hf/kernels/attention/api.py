"""Full attention of a tree: one interval of queries per key."""

import functools
import logging

import torch

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import reference
from harts_hf.kernels.attention import torch as torch_backend
from harts_hf.kernels.checks import check_floating, check_same_device, check_shape, choose_backend

_BY_DEVICE = {"cpu": "torch", "cuda": "flash"}
_logger = logging.getLogger(__name__)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    intervals: AttentionIntervals,
    *,
    scale: float,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Softmax attention in which row ``q`` sees key ``k`` if and only if ``lo[k] <= q < hi[k]``.

    Args:
        query: ``[1, Hq, N, Dk]``.
        key: ``[1, Hk, E + N, Dk]`` handed keys, then own ones; ``Hq`` is a multiple of ``Hk`` and consecutive query
            heads share a key head.
        value: ``[1, Hk, E + N, Dv]``.
        intervals: ``[E + N]`` each; every row must see at least one key (its own).
        scale: factor of the scores before the softmax.
        deterministic: whether two runs must agree bit for bit, gradients included: GPUs then run "flex", which is
            slower (CPU backends always are deterministic).
        backend: "torch", "flash", "flex" or "reference"; None chooses by device: on GPUs "flash" where it can run,
            else "flex" (logged once).

    Returns:
        ``[1, N, Hq, Dv]`` contiguous, dtype of ``query``: the layout of Transformers' attention interface.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated, or ``deterministic`` with "flash".
    """
    check_floating(query=query, key=key, value=value)
    check_shape("query", query, (1, "Hq", "N", "Dk"))
    check_shape("key", key, (1, "Hk", len(intervals.lo), query.shape[3]))
    check_shape("value", value, (1, key.shape[1], key.shape[2], "Dv"))
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"expected a multiple of the {key.shape[1]} key heads, got {query.shape[1]} query heads")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"expected one dtype, got query {query.dtype}, key {key.dtype}, value {value.dtype}")
    check_same_device(query=query, key=key, value=value, lo=intervals.lo, hi=intervals.hi)
    if backend is None and query.dtype == torch.float64:
        backend = "torch"  # no GPU backend takes it
    chosen = choose_backend("tree_attention", backend, query.device, by_device=_BY_DEVICE, others=("flex",))
    if chosen in ("flash", "flex"):
        from harts_hf.kernels.attention import flash, flex

        chosen = _gpu_backend(query, value, backend, deterministic)
        run_gpu = flash.tree_attention if chosen == "flash" else flex.tree_attention
        return run_gpu(query, key, value, intervals, scale=scale)
    run = reference.tree_attention if chosen == "reference" else torch_backend.tree_attention
    return run(query, key, value, intervals, scale=scale)


def _gpu_backend(query: torch.Tensor, value: torch.Tensor, backend: str | None, deterministic: bool) -> str:
    """Which GPU backend runs; logged once for each pair of head dims."""
    from harts_hf.kernels.attention import flash

    if deterministic and backend == "flash":
        raise ValueError("expected the flex backend where attention has to be deterministic, got flash")
    if backend is not None:
        chosen, reason = backend, "asked for by name"
    elif deterministic:
        chosen, reason = "flex", "its backward is deterministic"
    else:
        unsupported = flash.unsupported_because(query, value)
        chosen, reason = ("flex", unsupported) if unsupported else ("flash", "the default on this GPU")
    _log_choice(chosen, query.shape[3], value.shape[3], reason)
    return chosen


@functools.cache
def _log_choice(chosen: str, dim_k: int, dim_v: int, reason: str) -> None:
    _logger.info("tree attention with head dims %d/%d runs on the %s backend: %s", dim_k, dim_v, chosen, reason)
