"""Ours and the expanded baseline's against fp64: errors, poisoned memory, rows of trees and of trajectories."""

from collections import defaultdict

import numpy as np
import torch

from benchmarks.gpu.trees import Forest


class Errors:
    """Squared errors and squared references by name, of ours and of the baseline."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.worst: dict[str, float] = defaultdict(float)

    def add(self, name: str, ours: torch.Tensor, baseline: torch.Tensor, oracle: torch.Tensor) -> None:
        """Of one tensor of one seed; an assertion fails where ours is not finite."""
        if not torch.isfinite(ours).all():
            raise AssertionError(f"{name} is not finite")
        squares = [(x.double() - oracle).pow(2).sum().item() for x in (ours, baseline)]
        for column, square in enumerate((*squares, oracle.pow(2).sum().item())):
            self.sums[name][column] += square
        if squares[1] > 0:
            self.worst[name] = max(self.worst[name], (squares[0] / squares[1]) ** 0.5)

    def table(self) -> dict[str, dict[str, float]]:
        """Errors relative to the reference, pooled over seeds; ``ratio`` is ours over the baseline's."""
        return {
            name: {
                "ours": (ours / max(total, 1e-300)) ** 0.5,
                "baseline": (baseline / max(total, 1e-300)) ** 0.5,
                "ratio": (ours / max(baseline, 1e-300)) ** 0.5,
                "worst_single": self.worst[name],
            }
            for name, (ours, baseline, total) in self.sums.items()
        }


def report(key: str, entry: dict) -> None:
    """Prints what a check has found."""
    parts = [f"{n} {e['ours']:.1e}/{e['baseline']:.1e}={e['ratio']:.2f}" for n, e in entry["errors"].items()]
    rest = {k: v for k, v in entry.items() if k != "errors"}
    print(key, "; ".join(parts), rest, flush=True)


def equal(found: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
    """Which tensors are equal bit by bit."""
    return [torch.equal(a, b) for a, b in zip(found, other, strict=True)]


def poison() -> None:
    """Fills memory that the allocator will hand out next with NaN.

    Blocks of up to 1 MiB are never cut from larger ones, so small tables need small blocks, and many: they fill holes.
    """
    sizes = [28, 26, 24, 22, 20] * 2 + [size for size in range(18, 6, -1) for _ in range(32)]
    blocks = [torch.full((1 << size,), float("nan"), device="cuda") for size in sizes]
    del blocks
    torch.cuda.synchronize()


def cu_seqlens(lengths: np.ndarray) -> torch.Tensor:
    """Where packed trajectories begin and end."""
    return torch.from_numpy(np.concatenate([[0], lengths.cumsum()])).cuda()


def first_occurrence(forest: Forest) -> torch.Tensor:
    """``[num_rows]``: the expanded token that each row is first."""
    index = np.full(forest.num_rows, -1, np.int64)
    rows = forest.expanded_rows
    index[rows[::-1]] = np.arange(len(rows))[::-1]
    return torch.from_numpy(index).cuda()


def sum_by_row(gradient: torch.Tensor, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gradients of expanded tokens summed over a row's occurrences in fp64 and rounded once, as ours are."""
    total = torch.zeros(like.shape, dtype=torch.float64, device="cuda")
    return total.index_add_(0, rows, gradient.double()).to(like.dtype)
