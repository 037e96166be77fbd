"""Full attention of a tree: one interval of queries per key."""

import torch

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention import reference
from harts_hf.kernels.attention import torch as torch_backend
from harts_hf.kernels.checks import check_floating, check_same_device, check_shape, choose_backend

_BY_DEVICE = {"cpu": "torch"}


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    intervals: AttentionIntervals,
    *,
    scale: float,
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
        backend: "torch" or "reference"; None chooses by device.

    Returns:
        ``[1, N, Hq, Dv]`` contiguous, dtype of ``query``: the layout of Transformers' attention interface.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
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
    chosen = choose_backend("tree_attention", backend, query.device, by_device=_BY_DEVICE)
    run = reference.tree_attention if chosen == "reference" else torch_backend.tree_attention
    return run(query, key, value, intervals, scale=scale)
