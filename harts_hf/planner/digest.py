"""A short number that tells schedules apart, for ranks to compare before their first collective (NumPy only)."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import get_args

import numpy as np

from harts_hf.planner.config import Execution, PlannerConfig
from harts_hf.planner.execution import OP_KINDS, Op
from harts_hf.planner.microbatch import Microbatch
from harts_hf.tree import IntArray, RolloutTree


def schedule_digest(
    tree: RolloutTree,
    microbatches: Sequence[Microbatch],
    rank_ops: Sequence[Sequence[Op]],
    execution: Execution,
    config: PlannerConfig,
) -> int:
    """See :meth:`harts_hf.planner.Schedule.digest`.

    Complexity: O(N) hashed bytes, NumPy work over the spans, one Python step per microbatch and op.
    """
    state = blake2b(digest_size=8)

    def add(values: Iterable[int] | IntArray) -> None:
        # The length goes first, so that no list can run over into the next one.
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values), "<i8")
        state.update(len(array).to_bytes(8, "little"))
        state.update(np.ascontiguousarray(array).tobytes())

    add([config.chunk_size, config.world_size, get_args(Execution).index(execution)])
    add(tree.parent)
    add(tree.end_rows)
    add(tree.token_ids if tree.has_token_ids else [])
    add(microbatch.rank for microbatch in microbatches)
    add(len(microbatch.trunks) for microbatch in microbatches)
    add(trunk for microbatch in microbatches for trunk in microbatch.trunks)
    for name in ("row_spans", "owned_spans", "prefix_spans"):
        spans: list[IntArray] = [getattr(microbatch, name) for microbatch in microbatches]
        add(map(len, spans))
        add(np.concatenate(spans).reshape(-1))
    add(map(len, rank_ops))
    add(OP_KINDS.index(kind) for ops in rank_ops for kind, _ in ops)
    add(index for ops in rank_ops for _, index in ops)
    return int.from_bytes(state.digest(), "little") >> 1
