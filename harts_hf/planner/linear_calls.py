"""The fewest sequential calls of the linear rule on a tree, and the chains that attain it (NumPy only).

A call runs many disjoint downward chains of chunk nodes at once; a chain starts with no state or with a state that an
earlier call left. Proofs are in docs/planner.md.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from harts_hf.planner.chunks import CHUNK_SIZE, build_chunk_tree
from harts_hf.planner.config import check_chunk_size
from harts_hf.tree import IntArray, RolloutTree

Taps = Literal["anywhere", "ends"]


def min_linear_calls(tree: RolloutTree, chunk_size: int = CHUNK_SIZE, taps: Taps = "anywhere") -> int:
    """Fewest sequential calls that run every chunk node of ``tree`` once.

    Args:
        tree: a rollout tree of any number of roots.
        chunk_size: C, tokens in a chunk.
        taps: where a call can leave a state for later ones: "anywhere" (at every chunk boundary inside its chains)
            or "ends" (at the ends of its chains only).

    Raises:
        ValueError: no tree, a ``chunk_size`` that is no integer of at least 1, an unknown ``taps``.

    Complexity: linear in the rows of the tree.
    """
    if not isinstance(tree, RolloutTree):
        raise ValueError(f"expected a RolloutTree, got {type(tree).__name__}")
    check_chunk_size(chunk_size)
    return decompose_chains(build_chunk_tree(tree.parent, tree.depth, chunk_size).parent, taps=taps).num_calls


@dataclass(frozen=True, eq=False, kw_only=True)
class ChainDecomposition:
    """Chunk nodes as chains, each run by one call.

    Attributes:
        call: ``[M]`` the call, from 0, that runs each node.
        head: ``[M]`` the first node of each node's chain; a chain runs down from its head.
        num_calls: number of calls.
    """

    call: IntArray
    head: IntArray
    num_calls: int


def decompose_chains(parent: IntArray, *, taps: Taps = "anywhere") -> ChainDecomposition:
    """Chains that need the fewest calls.

    Args:
        parent: ``[M]`` the chunk node above each, below the node's own number; -1 at a root.
        taps: see :func:`min_linear_calls`.

    Complexity: O(M) NumPy work, one Python step per run of nodes that follow one another and do not branch.
    """
    if taps not in get_args(Taps):
        raise ValueError(f"expected taps to be one of {', '.join(get_args(Taps))}, got {taps!r}")
    if len(parent) == 0:
        return ChainDecomposition(call=parent, head=parent, num_calls=0)
    first, run, above = _runs(parent)
    needed, heavy = _strahler_numbers(above, taps)
    call = [0] * len(above)
    head = list(range(len(above)))
    for one, one_above in enumerate(above):
        if one_above < 0:
            continue
        if heavy[one_above] == one:
            call[one], head[one] = call[one_above], head[one_above]
        else:
            call[one] = call[one_above] + 1
    return ChainDecomposition(
        call=np.asarray(call, np.int64)[run],
        head=first[head][run],
        num_calls=max(needed[one] for one in range(len(above)) if above[one] < 0),
    )


def calls_of_forests(parent: IntArray, forest: IntArray, num_forests: int) -> IntArray:
    """Fewest calls (taps anywhere) of each of several forests of chunk nodes, ``[num_forests]``; 0 for an empty one.

    Args:
        parent: ``[M]`` as for :func:`decompose_chains`; a node and its parent are of one forest.
        forest: ``[M]`` the forest of each node.
        num_forests: how many forests there are.

    Complexity: O(M) NumPy work, one Python step per run of nodes that follow one another and do not branch.
    """
    calls = np.zeros(num_forests, np.int64)
    if len(parent) == 0:
        return calls
    first, _, above = _runs(parent)
    needed = np.array(_strahler_numbers(above, "anywhere")[0], np.int64)
    roots = np.array(above) < 0
    np.maximum.at(calls, forest[first[roots]], needed[roots])
    return calls


def _runs(parent: IntArray) -> tuple[IntArray, IntArray, list[int]]:
    """Runs of nodes that follow one another and do not branch: each goes on in one chain.

    Returns:
        The first node of each run; ``[M]`` the run of each node; the run above each, -1 at a root.
    """
    number = np.arange(len(parent))
    children = np.bincount(parent[parent >= 0], minlength=len(parent))
    goes_on = (parent == number - 1) & (children[number - 1] == 1) & (parent >= 0)
    first = np.flatnonzero(~goes_on)
    run = np.cumsum(~goes_on) - 1
    return first, run, np.where(parent[first] < 0, -1, run[parent[first]]).tolist()


def _strahler_numbers(above: list[int], taps: Taps) -> tuple[list[int], list[int]]:
    """``needed``: calls that a node's subtree needs; ``heavy``: the child that goes on in the node's call, or -1."""
    num_nodes = len(above)
    first, second, children = [0] * num_nodes, [0] * num_nodes, [0] * num_nodes
    heavy, needed = [-1] * num_nodes, [1] * num_nodes
    for node in range(num_nodes - 1, -1, -1):
        if children[node] == 1 or (children[node] > 1 and taps == "anywhere"):
            needed[node] = max(first[node], second[node] + 1)
        elif children[node] > 1:
            needed[node], heavy[node] = first[node] + 1, -1
        up = above[node]
        if up < 0:
            continue
        children[up] += 1
        # Nodes come from high to low numbers; ">=" keeps the lowest number among equals.
        if needed[node] >= first[up]:
            first[up], second[up], heavy[up] = needed[node], first[up], node
        else:
            second[up] = max(second[up], needed[node])
    return needed, heavy
