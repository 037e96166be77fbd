"""What the planner reaches on real rollouts: `python -m benchmarks.planner` (two CPU cores, NumPy only).

Sections: one rank (rows computed once), nested execution under half the longest path, 2 ranks against one, 8 and 64
ranks against a lower bound, small forests on 2 and 3 ranks against exhaustive search, sharing="auto" where sharing
hardly pays, time and memory up to ten million tokens, growth on one long path, and a sweep of every set, budget,
number of ranks and execution in which every plan is proven. Default cost model (see docs/planner.md). Every plan here
passes ``Schedule.validate()`` before its numbers are kept.
"""

import json
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.machine import describe_machine, output_path
from benchmarks.tree_build import miniswe_like
from harts_hf.forest import concatenate_trees
from harts_hf.planner import CHUNK_SIZE, CostModel, PlannerConfig, Schedule, count_world, plan_window
from harts_hf.planner.leaf_table import LeafTable
from harts_hf.planner.walk import Walk
from harts_hf.tree import RolloutTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from exhaustive_plans import fastest_by_search, random_forest  # noqa: E402
from shared_data import SHAPE_NAMES, below_one_root, shape_trees  # noqa: E402

ALWAYS = PlannerConfig(sharing="always")


def proven(tree: RolloutTree, config: PlannerConfig) -> Schedule:
    """A plan whose invariants have been checked."""
    schedule = plan_window(tree, config)
    schedule.validate()
    return schedule


def forest(name: str) -> RolloutTree:
    """All groups of a set as one forest."""
    return concatenate_trees(shape_trees(name))


def one_rank() -> list[dict]:
    """Forward rows over unique tokens (bar: 1.005), replay apart."""
    rows = []
    for name in SHAPE_NAMES:
        tree = forest(name)
        for budget in (8192, 16_384):
            schedule = proven(tree, replace(ALWAYS, max_tokens_per_microbatch=budget))
            rows.append(
                {
                    "set": name,
                    "budget": budget,
                    "forward": schedule.forward_tokens / tree.num_tokens,
                    "backward": schedule.backward_tokens / tree.num_tokens,
                    "replay": round(schedule.replay_tokens / tree.num_tokens, 4),
                    "linear_calls": schedule.linear_calls,
                    "microbatches": len(schedule.microbatches),
                    "met": schedule.forward_tokens <= 1.005 * tree.num_tokens,
                }
            )
    return rows


def nested() -> list[dict]:
    """Graphs of at most half the longest path (bars: backward 1.000, forward 2.0)."""
    rows = []
    for name in SHAPE_NAMES:
        tree = forest(name)
        limit = int(tree.trajectory_lengths.max()) // 2
        for budget in (8192, 16_384):
            config = replace(ALWAYS, max_tokens_per_microbatch=budget, max_graph_tokens=limit, execution="nested")
            schedule = proven(tree, config)
            rows.append(
                {
                    "set": name,
                    "budget": budget,
                    "max_graph_tokens": limit,
                    "peak_graph_tokens": schedule.peak_graph_tokens,
                    "forward": round(schedule.forward_tokens / tree.num_tokens, 4),
                    "backward": schedule.backward_tokens / tree.num_tokens,
                    "met": schedule.backward_tokens == tree.num_tokens
                    and schedule.forward_tokens <= 2 * tree.num_tokens,
                }
            )
    return rows


def lower_bound(tree: RolloutTree, config: PlannerConfig) -> tuple[float, float]:
    """Estimated seconds of the one-rank plan over the ranks, and of the slowest trajectory alone on a rank."""
    alone = replace(config, world_size=1)
    longest = int(tree.trajectory_lengths.max())
    path = plan_window(RolloutTree.from_shape([-1], [longest], [0]), alone).estimated_seconds
    return plan_window(tree, alone).estimated_seconds / config.world_size, path


def many_ranks() -> list[dict]:
    """All groups on 8 ranks, and on 64 once and as eight copies with other tokens.

    Bars: efficiency, the bound max(mean, longest path) over lockstep time, 0.97; planning under 2 % of the step.
    """
    rows = []
    for name in ("miniswe_b_drop", "tau_airline_b"):
        for ranks, copies in ((8, 1), (64, 8), (64, 1)):
            tree = concatenate_trees(list(shape_trees(name)) * copies)
            highest = highest_efficiency(tree, ranks)
            for budget in (16_384, 65_536):
                mean, path = lower_bound(tree, replace(ALWAYS, max_tokens_per_microbatch=budget, world_size=ranks))
                for sharing in ("auto", "always"):
                    config = PlannerConfig(max_tokens_per_microbatch=budget, world_size=ranks, sharing=sharing)
                    schedule = proven(tree, config)
                    world = count_world(schedule)
                    step = schedule.estimated_seconds
                    planning = min(planning_seconds(tree, config) for _ in range(3))
                    rows.append(
                        {
                            "set": name,
                            "ranks": ranks,
                            "copies": copies,
                            "budget": budget,
                            "sharing": sharing,
                            "efficiency": round(max(mean, path) / step, 4),
                            "highest_efficiency": round(highest, 4),
                            "step_seconds": round(step, 4),
                            "mean_seconds": round(mean, 4),
                            "path_seconds": round(path, 4),
                            "balance": round(world.balance, 4),
                            "computed_over_unique": round(world.tokens_per_unique, 4),
                            "dummies": world.dummies,
                            "microbatches": len(schedule.microbatches),
                            "planning_cpu_seconds": round(planning, 4),
                            "planning_part_of_step": round(planning / step, 4),
                            "efficiency_met": bool(max(mean, path) >= 0.97 * step),
                            "planning_met": bool(planning <= 0.02 * step),
                        }
                    )
    return rows


def planning_seconds(tree: RolloutTree, config: PlannerConfig) -> float:
    """CPU seconds of planning a forest of which nothing has been computed yet."""
    arrays = {name: getattr(tree, name) for name in ("parent", "depth", "subtree_end", "end_rows")}
    fresh = RolloutTree(**arrays, token_ids=None)
    start = time.process_time()
    plan_window(fresh, config)
    return time.process_time() - start


def highest_efficiency(tree: RolloutTree, ranks: int) -> float:
    """max(mean, longest path) over the least time in which ranks could do the work if forks divided at will.

    Activations do not travel, so who relieves the rank of the longest path of its forks computes their prefix again.
    Each run takes the deepest leaves left, the last one in part, and so fills its rank to the last second. Rows, pairs
    and linear rows are counted, nothing per microbatch.
    """
    walk = Walk.of_tree(tree).reordered(deepest="last")
    leaves = LeafTable.build(walk, chunk_size=CHUNK_SIZE, step_parts=CostModel().step_parts(), world_size=ranks)
    before, above = leaves.before[:2].sum(axis=0), leaves.above[:2].sum(axis=0)
    bound = max(float(before[-1]) / ranks, float((above + np.diff(before)).max()))

    def needed(seconds: float) -> float:
        total = 0.0
        for start, stop in leaves.roots:
            end = float(before[stop])
            while end > before[start] + 1e-12:
                leaf = int(np.searchsorted(before, end - 1e-12, side="right")) - 1
                while leaf > start and end - before[leaf] + above[leaf - 1] < seconds:
                    leaf -= 1
                begin = max(float(before[leaf]), end - (seconds - float(above[leaf])))
                if begin >= end - 1e-12:
                    return np.inf
                total += end - begin + float(above[leaf])
                end = begin
        return total

    low, high = bound, 2 * bound
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= ranks * middle else (middle, high)
    return bound / high


def two_ranks() -> list[dict]:
    """Groups of miniswe_b_drop on two ranks, apart and below a common root of 400 rows.

    Bars: at most 1.02 of the rows, 1.75 times as fast as one rank in the same execution.
    """
    rows = []
    groups = shape_trees("miniswe_b_drop")
    for count in (4, 8, 20):
        for root in (0, 400):
            tree = below_one_root(groups[:count], root) if root else concatenate_trees(groups[:count])
            for execution in ("replay", "nested"):
                one = proven(tree, PlannerConfig(execution=execution))
                two = proven(tree, PlannerConfig(execution=execution, world_size=2))
                world = count_world(two)
                speedup = one.estimated_seconds / two.estimated_seconds
                rows.append(
                    {
                        "groups": count,
                        "common_root": root,
                        "execution": execution,
                        "speedup": round(speedup, 4),
                        "computed_over_unique": round(world.tokens_per_unique, 4),
                        "balance": round(world.balance, 4),
                        "dummies": world.dummies,
                        "met": bool(speedup >= 1.75 and world.tokens_per_unique <= 1.02),
                    }
                )
    return rows


def small_forests() -> list[dict]:
    """Estimated time over that of exhaustive search on 2 and 3 ranks (bars: mean 1.02, worst 1.10)."""
    cost, rows = CostModel(), []
    for ranks, segments, count in ((2, 7, 300), (3, 6, 200)):
        ratios = []
        for seed in range(count):
            tree, budget = random_forest(np.random.default_rng(seed), segments)
            schedule = proven(tree, PlannerConfig(max_tokens_per_microbatch=budget, world_size=ranks))
            own = schedule.estimated_seconds
            ratios.append(own / fastest_by_search(tree, budget, cost, own * (1 + 1e-9), ranks))
        rows.append(
            {
                "ranks": ranks,
                "segments": segments,
                "forests": count,
                "mean": round(float(np.mean(ratios)), 4),
                "worst": round(max(ratios), 4),
                "over_2_percent": sum(ratio > 1.02 for ratio in ratios),
                "met": bool(np.mean(ratios) <= 1.02 and max(ratios) <= 1.10),
            }
        )
    return rows


def auto_sharing() -> list[dict]:
    """sharing="auto" over no sharing (bar: at most 1) on anyswe_a and on a 1,000-token prefix shared by two."""
    forests = {"anyswe_a": forest("anyswe_a")}
    for suffix in (10, 200, 2000, 30_000):
        shape = RolloutTree.from_shape([-1, 0, 0], [1000, suffix, suffix], [1, 2])
        forests[f"prefix 1000, suffixes {suffix}"] = shape
    rows = []
    for name, tree in forests.items():
        for budget in (1024, 8192, 65_536):
            for ranks in (1, 2, 7):
                config = PlannerConfig(max_tokens_per_microbatch=budget, world_size=ranks)
                auto, never = proven(tree, config), proven(tree, replace(config, sharing="never"))
                rows.append(
                    {
                        "set": name,
                        "budget": budget,
                        "ranks": ranks,
                        "auto_over_never": round(auto.estimated_seconds / never.estimated_seconds, 4),
                        "decision": auto.decision,
                        "met": auto.estimated_seconds <= never.estimated_seconds,
                    }
                )
    return rows


def time_and_memory() -> list[dict]:
    """CPU time of planning (bar: 0.5 s at a million) and memory above the tree (bar: 40 bytes per token)."""
    rows = []
    for scale in (1, 2, 5, 10):
        trajectories = miniswe_like(num_prompts=100 * scale)
        seconds = []
        for _ in range(3):
            tree = RolloutTree.from_trajectories(trajectories)
            start = time.process_time()
            schedule = plan_window(tree, PlannerConfig())
            seconds.append(time.process_time() - start)
        schedule.validate()
        tree = RolloutTree.from_trajectories(trajectories)
        tracemalloc.start()
        plan_window(tree, PlannerConfig())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append(
            {
                "unique_tokens": tree.num_tokens,
                "trajectories": tree.num_trajectories,
                "cpu_seconds_median": round(float(np.median(seconds)), 4),
                "microseconds_per_token": round(1e6 * float(np.median(seconds)) / tree.num_tokens, 4),
                "peak_bytes_per_token": round(peak / tree.num_tokens, 1),
                "microbatches": len(schedule.microbatches),
            }
        )
    return rows


def caterpillar(forks: int) -> RolloutTree:
    """A spine of three rows between forks of two rows each: many segments, all of them on one path."""
    spine = 2 * np.arange(forks)
    parent = np.append(-1, np.repeat(spine, 2))
    ends = np.append(spine + 1, 2 * forks)
    return RolloutTree.from_shape(parent, np.append(3, np.tile([2, 3], forks)), ends)


def growth() -> list[dict]:
    """CPU seconds of plans and proofs where all pieces or segments stand on one path."""
    forests = [
        (f"path of {rows:,}", RolloutTree.from_shape([-1], [rows], [0]), 64) for rows in (25_000, 50_000, 100_000)
    ]
    forests += [(f"caterpillar of {forks:,}", caterpillar(forks), 16_384) for forks in (50_000, 100_000, 200_000)]
    rows = []
    for name, tree, budget in forests:
        start = time.process_time()
        schedule = plan_window(tree, PlannerConfig(max_tokens_per_microbatch=budget))
        planned = time.process_time()
        schedule.validate()
        rows.append(
            {
                "set": name,
                "budget": budget,
                "plan_seconds": round(planned - start, 3),
                "validate_seconds": round(time.process_time() - planned, 3),
                "microbatches": len(schedule.microbatches),
                "trunks_listed": sum(len(microbatch.trunks) for microbatch in schedule.microbatches),
            }
        )
    return rows


def sweep() -> dict:
    """Every set at 1,024, 8,192 and 65,536 rows on 1, 2 and 7 ranks in all executions: planned and proven."""
    plans, slowest = 0, 0.0
    for name in SHAPE_NAMES:
        tree = forest(name)
        for budget in (1024, 8192, 65_536):
            for ranks in (1, 2, 7):
                for execution in ("replay", "nested", "keep"):
                    start = time.perf_counter()
                    schedule = plan_window(
                        tree,
                        PlannerConfig(max_tokens_per_microbatch=budget, world_size=ranks, execution=execution),
                    )
                    slowest = max(slowest, time.perf_counter() - start)
                    schedule.validate()
                    plans += 1
    return {"plans": plans, "all_valid": True, "slowest_plan_seconds": round(slowest, 2)}


def main() -> None:
    """Runs every section, prints and writes the results."""
    out = output_path("planner", __doc__)
    sections = [time_and_memory, growth, one_rank, nested, two_ranks, many_ranks, auto_sharing, small_forests, sweep]
    result: dict[str, object] = {**describe_machine(), "cost_model": CostModel().source}
    for section in sections:
        start = time.perf_counter()
        result[section.__name__] = section()
        print(f"{section.__name__} ({time.perf_counter() - start:.0f} s)", flush=True)
        content = result[section.__name__]
        for row in content if isinstance(content, list) else [content]:
            print("  ", row, flush=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
