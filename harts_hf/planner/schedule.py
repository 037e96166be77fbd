"""What a planner decides: microbatches and the order of their forwards and backwards (NumPy only)."""

from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from harts_hf.planner import serialization, validation
from harts_hf.planner.accounting import Accounts, ChunkEnds, Handed, Measure
from harts_hf.planner.config import Execution, PlannerConfig
from harts_hf.planner.cost import DEFAULT_COST, CostModel, UnitSeconds
from harts_hf.planner.digest import schedule_digest
from harts_hf.planner.execution import OP_KINDS, Op, align
from harts_hf.planner.lives import Life, amounts_alive, handoff_lives
from harts_hf.planner.memory import MemoryCounts, count_memory, graph_tokens, handed_bytes
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.text import counted, op_lines
from harts_hf.planner.walk import FloatArray
from harts_hf.tree import RolloutTree


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """Microbatches and, per rank, the order of their forwards and backwards.

    Token counts are network rows summed over all ranks; peaks are of the worst rank.

    Attributes:
        tree: the forest that all row numbers refer to: the given trees one after another, or, where nothing is shared,
            every trajectory on rows of its own. Trajectories keep their numbers, so read ``schedule.tree.path(i)``.
        microbatches: by id; those of a rank stand together, trunks before dependents.
        config: what was asked for.
        execution: "replay", "nested" or "keep".
        rank_ops: per rank, its ops without dummies.
        decision: what was chosen and why, a sentence or two.
        accounts: counts of the microbatches, if they are known already; they are counted on first use otherwise.
    """

    tree: RolloutTree
    microbatches: tuple[Microbatch, ...]
    config: PlannerConfig
    execution: Execution
    rank_ops: tuple[tuple[Op, ...], ...]
    decision: str = ""
    accounts: Accounts | None = field(default=None, repr=False)

    def ops(self, rank: int = 0, *, dummies: bool = True) -> list[Op]:
        """The ops of a rank in order: ("S" no-grad forward | "F" forward | "B" backward, microbatch id).

        Args:
            rank: which rank.
            dummies: whether to fill in dummy microbatches (id -1: one token, zero weight) so that all ranks run equal
                strings of kinds, as FSDP2, ZeRO-2 and ZeRO-3 need; DDP and ZeRO-1 need none. A ``B``, a dummy or not,
                belongs to the latest open ``F``.

        Raises:
            ValueError: no such rank.
        """
        self._check_rank(rank)
        return list(self._aligned[rank] if dummies else self.rank_ops[rank])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.config.world_size:
            raise ValueError(f"expected rank in [0, {self.config.world_size}), got {rank}")

    @cached_property
    def _aligned(self) -> list[list[Op]]:
        return align(self.rank_ops)

    @property
    def cost(self) -> CostModel:
        """The cost model that the plan was made with."""
        return self.config.cost or DEFAULT_COST

    # ---- counts -------------------------------------------------------------------------------------------------

    @property
    def forward_tokens(self) -> int:
        """Rows of all forwards but the scoring pass: ``F``, and every ``S`` that is there to save memory.

        Prefixes computed again are counted. In "replay" the first ``S`` of each microbatch is the scoring pass.
        """
        return self._tokens("SF") - self.scoring_tokens

    @property
    def backward_tokens(self) -> int:
        """Rows of all backwards."""
        return self._tokens("B")

    @property
    def scoring_tokens(self) -> int:
        """Rows of the scoring pass: the first ``S`` of each microbatch in "replay", none otherwise."""
        if self.execution != "replay":
            return 0
        return sum(microbatch.num_rows for microbatch in self.microbatches)

    def _tokens(self, kinds: str) -> int:
        rows = [microbatch.num_rows for microbatch in self.microbatches]
        return sum(rows[index] for ops in self.rank_ops for kind, index in ops if kind in kinds)

    @property
    def replay_tokens(self) -> int:
        """Rows that linear layers process beside the network rows of a pass, because chunks begin above branches."""
        return sum(int(m.work.linear_rows - m.work.rows) for m in self.measures)

    @property
    def handoff_tokens(self) -> int:
        """Rows of prefixes read from trunks, in one pass over all microbatches."""
        return sum(microbatch.num_prefix for microbatch in self.microbatches)

    @property
    def linear_calls(self) -> int:
        """Sequential linear-attention calls of the microbatch that needs most."""
        return max(int(m.work.calls) for m in self.measures)

    @cached_property
    def peak_graph_tokens(self) -> int:
        """Most rows whose graphs are alive at once on a rank."""
        return max(max(graph_tokens(ops, self.microbatches), default=0) for ops in self.rank_ops)

    @cached_property
    def peak_handoff_tokens(self) -> int:
        """Most handed rows alive at once on a rank."""
        peaks = []
        for ops, lives in zip(self.rank_ops, self.handoff_lives, strict=True):
            rows = amounts_alive(len(ops), ((first, last, self.handed[i].rows) for i, first, last in lives))
            peaks.append(int(rows.max(initial=0)))
        return max(peaks)

    @cached_property
    def peak_handoff_bytes(self) -> int:
        """Most bytes of handed values and gradient sums alive at once on a rank, by the cost model's sizes."""
        return int(max(handed_bytes(ops, self.microbatches, self.handed).max(initial=0) for ops in self.rank_ops))

    def memory_counts(self, rank: int = 0) -> MemoryCounts:
        """What is alive while each op of ``ops(rank, dummies=False)`` runs: rows, chunk nodes and states by use.

        Peak memory is the largest sum over counts of one op, each times bytes that depend on model and kernels
        (``benchmarks/window_memory.py`` fits them): ``schedule.memory_counts().peak_bytes({"graph_rows": ...})``.
        """
        self._check_rank(rank)
        return count_memory(self.rank_ops[rank], self.microbatches, self.measures, self.handed)

    @property
    def oversized(self) -> tuple[int, ...]:
        """Ids of microbatches over the budgets of network or linear rows: single trajectories longer than those."""
        rows, linear = self.config.max_tokens_per_microbatch, self.config.max_linear_rows or 2**62
        return tuple(
            microbatch.id
            for microbatch, measured in zip(self.microbatches, self.measures, strict=True)
            if microbatch.num_rows > rows or measured.work.linear_rows > linear
        )

    # ---- time and memory ----------------------------------------------------------------------------------------

    @cached_property
    def _accounts(self) -> Accounts:
        return self.accounts or Accounts.of(ChunkEnds(self.tree, self.config.chunk_size), self.microbatches, self.cost)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What each microbatch does, by id."""
        return self._accounts.measures

    @property
    def handed(self) -> dict[int, Handed]:
        """What each trunk hands over, by id."""
        return self._accounts.handed

    @cached_property
    def handoff_lives(self) -> list[list[Life]]:
        """Per rank, when handed states are alive: (trunk id, first op, last op) in ``ops(rank, dummies=False)``.

        A forward of a trunk makes its handoff; after the last op it can be freed.
        """
        trunks = [microbatch.trunk_ids for microbatch in self.microbatches]
        return [handoff_lives(ops, trunks) for ops in self.rank_ops]

    @cached_property
    def _seconds(self) -> dict[str, list[float]]:
        """By kind of op the estimated time of each microbatch, and after them that of a dummy."""
        names = [field.name for field in fields(UnitSeconds)]
        work = np.array([[getattr(m.work, name) for name in names] for m in self.measures], np.float64)
        seconds: dict[str, list[float]] = {}
        for kind in OP_KINDS:
            unit = self.cost.backward if kind == "B" else self.cost.forward
            times = work @ np.array([getattr(unit, name) for name in names], np.float64)
            seconds[kind] = [*times.tolist(), unit.microbatches]
        return seconds

    def op_seconds(self, op: Op) -> float:
        """Estimated time of an op; a dummy costs what a microbatch costs without work."""
        kind, index = op
        return self._seconds[kind][index]  # DUMMY is -1, the last

    @cached_property
    def estimated_seconds(self) -> float:
        """Estimated time of the step: ranks move in lockstep, so the sum over ops of the slowest rank's op."""
        return float(self.slot_seconds.max(axis=0).sum())

    @cached_property
    def slot_seconds(self) -> FloatArray:
        """``[world_size, slots]`` estimated seconds of each rank's ops, dummies among them."""
        seconds = [[self._seconds[kind][index] for kind, index in ops] for ops in self._aligned]
        return np.array(seconds, np.float64).reshape(len(self._aligned), -1)

    # ---- proof, text --------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Proves every invariant (docs/planner.md lists them).

        Complexity: NumPy work over all spans of the microbatches, and a few calls per microbatch and op.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert len(self.rank_ops) == self.config.world_size, "ops of too many or too few ranks"
        validation.check_microbatches(self.tree, self.microbatches)
        validation.check_ops(self.rank_ops, self.microbatches, self.execution)
        validation.check_alignment(self.rank_ops, self._aligned)
        for ops, lives in zip(self.rank_ops, self.handoff_lives, strict=True):
            validation.check_lives(ops, lives, self.microbatches)
        self._check_limits()

    def _check_limits(self) -> None:
        """Limits hold; only single paths computed whole may exceed the budgets of rows."""
        config = self.config
        for index in self.oversized:
            microbatch = self.microbatches[index]
            leaves = self.tree.subtree_end[microbatch.rows] == microbatch.rows + 1
            assert leaves.sum() == 1 and microbatch.num_prefix == 0, "over the budget without need"
        if config.max_graph_tokens is not None:
            assert self.peak_graph_tokens <= config.max_graph_tokens, "too many graphs alive"
        if config.max_handoff_bytes is not None:
            assert self.peak_handoff_bytes <= config.max_handoff_bytes, "too many bytes handed over"
        once = config.sharing != "always" or not config.handoff
        assert once or sum(m.num_rows for m in self.microbatches) == self.tree.num_tokens, "a row computed twice"
        assert config.sharing != "never" or (self.tree.occurrence_counts == 1).all(), "shared although told not to"

    def digest(self) -> int:
        """A number of 63 bits (0 or more, so it fits an int64 tensor) that ranks compare before they start a step.

        Equal for schedules that run the same ops on the same rows: it covers the forest with its tokens (where it has
        them), microbatches, ops, execution, chunk size and number of ranks. Limits, cost model and ``decision`` have
        no part in it. It is the same in every process and on every machine.

        Complexity: NumPy work and hashing over rows and spans; a few milliseconds for 0.6 million rows.
        """
        return schedule_digest(self.tree, self.microbatches, self.rank_ops, self.execution, self.config)

    def to_json(self) -> str:
        """The schedule as versioned JSON: the shape of its forest, limits, microbatches and ops."""
        return serialization.to_json(
            tree=self.tree,
            microbatches=self.microbatches,
            config=self.config,
            execution=self.execution,
            rank_ops=self.rank_ops,
            decision=self.decision,
        )

    @classmethod
    def from_json(cls, text: str, tree: RolloutTree | None = None) -> "Schedule":
        """The inverse of :meth:`to_json`.

        Args:
            text: what :meth:`to_json` gave.
            tree: the forest, to have its tokens too; None rebuilds its shape.

        Raises:
            ValueError: text that is no JSON; another format or version; a missing or unknown key; a value of another
                type or outside its range; a tree of another shape.
        """
        return cls(**serialization.from_json(text, tree))

    def __str__(self) -> str:
        tree, config = self.tree, self.config
        lines = [
            f"Schedule: {counted(len(self.microbatches), 'microbatch', 'microbatches')} on "
            f"{counted(config.world_size, 'rank')}, {self.execution}",
            f"  tree       {tree.num_trajectories} trajectories, {tree.num_expanded_tokens:,} expanded, "
            f"{tree.num_tokens:,} unique tokens ({tree.sharing_ratio:.2f}x)",
            f"  tokens     forward {self.forward_tokens:,}, backward {self.backward_tokens:,}, "
            f"scoring {self.scoring_tokens:,}, replay {self.replay_tokens:,}, handoff {self.handoff_tokens:,}",
            f"  peaks      graph {self.peak_graph_tokens:,} tokens, handoff {self.peak_handoff_tokens:,} tokens "
            f"({self.peak_handoff_bytes / 1e9:.2f} GB)",
            f"  estimated  {self.estimated_seconds:.3f} s ({self.cost.source}), linear calls {self.linear_calls}",
        ]
        if self.oversized:
            lines.append(f"  oversized  {len(self.oversized)} microbatches of one long trajectory each")
        if self.decision:
            lines.append(f"  decision   {self.decision}")
        return "\n".join([*lines, *op_lines(self._aligned)])
