"""Hypothesis strategies for rollout trees."""

from hypothesis import strategies as st


def trajectories(max_length: int = 12, max_count: int = 8, max_token: int = 2) -> st.SearchStrategy[list[list[int]]]:
    """Few tokens, so that prefixes, whole trajectories and single tokens coincide often."""
    token = st.integers(0, max_token)
    return st.lists(st.lists(token, min_size=1, max_size=max_length), min_size=1, max_size=max_count)


@st.composite
def shapes(draw: st.DrawFn, max_nodes: int = 9, max_length: int = 9) -> tuple[list[int], list[int], list[int]]:
    """(parent, length, sample_node) of a legal shape: nodes without tokens, several roots, repeated samples."""
    num_nodes = draw(st.integers(1, max_nodes))
    parent = [-1] + [draw(st.integers(-1, node - 1)) for node in range(1, num_nodes)]
    length = [draw(st.integers(0, max_length)) for _ in range(num_nodes)]
    inner = set(parent)
    leaves = [node for node in range(num_nodes) if node not in inner]
    for leaf in leaves:
        length[leaf] = max(1, length[leaf])
    reached = [length[0]]
    for node in range(1, num_nodes):
        reached.append(length[node] + (reached[parent[node]] if parent[node] >= 0 else 0))
    filled = [node for node in range(num_nodes) if reached[node]]
    extra = draw(st.lists(st.sampled_from(filled), max_size=4))
    return parent, length, draw(st.permutations(leaves + extra))
