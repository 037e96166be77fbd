"""How long a rollout tree takes to build: `python -m benchmarks.tree_build` (two CPU cores, NumPy only).

About 1.1 million unique tokens, 13 million expanded, in 4,000 trajectories shaped like mini-swe-agent's: 100 prompts,
each a spine of 40 turns with a fork that ends at every turn. Bar: under 1 s. The result is checked before it is timed.
"""

import json
import time

import numpy as np

from benchmarks.machine import describe_machine, output_path
from harts_hf.tree import RolloutTree

BAR_SECONDS = 1.0


def miniswe_like(num_prompts: int = 100, num_turns: int = 40, seed: int = 0) -> list[np.ndarray]:
    """Trajectories of ``num_prompts`` spines, a fork at each of ``num_turns`` turns, in random order."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for _ in range(num_prompts):
        spine = rng.integers(0, 150_000, int(rng.integers(50, 200)))
        for _ in range(num_turns):
            spine = np.append(spine, rng.integers(0, 150_000, int(rng.integers(10, 290))))
            trajectories.append(np.append(spine, rng.integers(0, 150_000, int(rng.integers(10, 240)))))
    return [trajectories[i] for i in rng.permutation(len(trajectories))]


def main() -> None:
    """Builds, checks, times and writes the result."""
    out = output_path("tree_build", __doc__)
    trajectories = miniswe_like()
    tree = RolloutTree.from_trajectories(trajectories)
    tree.check()
    for index in range(0, len(trajectories), 97):
        assert np.array_equal(tree.token_ids[tree.path(index)], trajectories[index])
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        RolloutTree.from_trajectories(trajectories)
        seconds.append(time.perf_counter() - start)
    result = {
        **describe_machine(),
        "seed": 0,
        "trajectories": tree.num_trajectories,
        "unique_tokens": tree.num_tokens,
        "expanded_tokens": tree.num_expanded_tokens,
        "seconds_median": round(float(np.median(seconds)), 4),
        "seconds_all": [round(s, 4) for s in seconds],
        "bar_seconds": BAR_SECONDS,
        "bar_met": bool(np.median(seconds) < BAR_SECONDS),
    }
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
