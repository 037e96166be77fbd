"""Which experts the forwards of a step are told to take: those of the engine, or of the pass of old log-probs.

The routing of a mixture of experts differs between engine and trainer, and between two forwards of a trainer, by
rounding; ratios of probabilities then compare different networks. A training may replay routes: of the pass that
computed old log-probs ("Routing Replay" of Group Sequence Policy Optimization, arXiv 2507.18071), or of the engine
("Rollout Routing Replay", arXiv 2510.11370).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.rollouts.recorded_rollouts import RecordedRollouts
from harts_hf.runtime import Ranks
from harts_hf.runtime.replayed import RoutingCounts
from harts_hf.runtime.routes import KnownRoutes, TokenRoutes, merge_routes
from harts_hf.trainers.routed_experts import RouterShape, read_routed_experts
from harts_hf.trainers.rows import ROUTES, PaddedRows, token_ids
from harts_hf.tree import IntArray, RolloutTree

REPLAYS = ("off", "scoring", "engine")


class RoutingReplay:
    """Routes of a trainer's rollouts, from where they become known to the batches that are trained on.

    Args:
        trainer: whose model is patched.
        adapters: says which adapters of the policy are active; see
            :func:`harts_hf.trainers.micro_steps.active_adapters`.

    Raises:
        UnsupportedModelError: replay where the model has no routers, or the engine's routes where nothing brings them.
    """

    def __init__(self, trainer: Any, adapters: Callable[[], Any]) -> None:
        self._trainer, self._active_adapters = trainer, adapters
        self.mode: str = trainer.args.tree_replay_routing
        self.shape = RouterShape.of(causal_lm_of(trainer.model))
        self._generation: _Generation | None = None
        self._num_differing = 0  # tokens, since the last step
        self._splits: bool = trainer.args.tree_split_on_routes
        if self.mode != "off":
            self._check()

    def _check(self) -> None:
        name, wanted = type(self._trainer).__name__, f"tree_replay_routing={self.mode!r}"
        if self.shape is None:
            model = type(causal_lm_of(self._trainer.model)).__name__
            raise UnsupportedModelError(
                f"expected a mixture of experts with {wanted}, got {model}, which has no routers"
            )
        if self.mode == "engine" and not self._trainer.replays_engine_routes:
            raise UnsupportedModelError(f"expected {wanted} with a trainer that takes an engine's routes, got {name}")
        source = getattr(self._trainer, "rollout_func", None)
        if self.mode == "engine" and (source is None or isinstance(source, RecordedRollouts)):
            raise UnsupportedModelError(
                f"expected a rollout_func that returns 'routed_experts' with {wanted} (TreeRolloutCollector, "
                "AgentRolloutCollector, or one of your own; TRL's own generation and rollout files have none), got "
                + ("none" if source is None else type(source).__name__)
            )

    @property
    def known(self) -> KnownRoutes | None:
        """How a step's update finds the routes of its rows; None where it replays none."""
        if self.mode == "off":
            return None
        return KnownRoutes(lambda rows: getattr(rows, "routes", None), splits=self._splits)

    @contextmanager
    def generating(self) -> Iterator["_Generation"]:
        """Inside, the rollouts of a batch come to be, and are scored."""
        self._generation = _Generation(self._active_adapters())
        try:
            yield self._generation
        finally:
            self._generation = None

    def take(self, routed_experts: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
        """Takes what a rollout function returned; see :func:`~harts_hf.trainers.routed_experts.read_routed_experts`.

        Raises:
            ValueError: none, where they are to be replayed; routes that are not this model's.
        """
        if self.mode != "engine" or self._generation is None:
            return
        if routed_experts is None:
            raise ValueError(
                "expected 'routed_experts' from the rollout function with tree_replay_routing='engine', got none"
            )
        assert self.shape is not None
        rows = [np.asarray([*prompt, *completion]) for prompt, completion in zip(prompts, completions, strict=True)]
        found = read_routed_experts(routed_experts, list(map(len, rows)), self.shape)
        self._generation.given = found if self._splits else self._agreed(rows, found)

    def _agreed(self, rows: Sequence[IntArray], routes: Sequence[TokenRoutes | None]) -> list[TokenRoutes | None]:
        """The same experts for tokens that rows share, those of the first row that knows.

        Decided once, for all trees that are made of the rows: the pass of old log-probs and steps have others of them,
        in another order.
        """
        tree = RolloutTree.from_trajectories(rows)
        paths = [tree.path(row) for row in range(len(rows))]
        merged = merge_routes(tree.num_tokens, paths, routes, Ranks())
        if merged is None:
            return list(routes)
        self._num_differing += int(merged.differs.sum())
        return [TokenRoutes(((merged.experts, torch.from_numpy(path)),)) for path in paths]

    def counts(self, of_step: RoutingCounts) -> dict[str, float]:
        """Of a step, as numbers that are summed over ranks; tokens that came with other experts are counted once."""
        differing, self._num_differing = self._num_differing, 0
        return {name: float(value) for name, value in vars(of_step).items()} | {
            "differing": float(of_step.differing + differing)
        }

    def given_to(self, count: int, *, is_policy: bool) -> list[TokenRoutes | None] | None:
        """Routes of the rows of a running generation, for a pass of ``count`` rows; None for other passes."""
        now = self._generation
        if now is None or not self._is_of_policy(is_policy) or now.given is None or len(now.given) != count:
            return None
        return now.given

    def keeps_scored(self, *, is_policy: bool) -> bool:
        """Whether routes of a pass are to be kept for the batch that is being generated."""
        return self.mode == "scoring" and self._trainer.replays_old_routes and self._is_of_policy(is_policy)

    def keep_scored(self, input_ids: torch.Tensor, rows: PaddedRows, routes: list[TokenRoutes]) -> None:
        """Keeps those of a pass, by trajectory."""
        assert self._generation is not None
        self._generation.scored = input_ids, rows.by_row(routes)

    def _is_of_policy(self, is_policy: bool) -> bool:
        # Not a reference model's, which may be the policy with other adapters.
        return is_policy and self._generation is not None and self._generation.adapters == self._active_adapters()


class _Generation:
    """Routes of a batch that is being generated, by row.

    Attributes:
        adapters: of the policy.
        given: those that came with rollouts.
        scored: token ids of the rows of the pass of old log-probs, and its routes.
    """

    def __init__(self, adapters: Any) -> None:
        self.adapters = adapters
        self.given: list[TokenRoutes | None] | None = None
        self.scored: tuple[torch.Tensor, list[TokenRoutes | None]] | None = None

    def of_batch(self, batch: dict[str, Any]) -> list[Any] | None:
        """The entry of a batch; None where nothing is known of it."""
        found = self.given
        if found is None and self.scored is not None and torch.equal(self.scored[0], token_ids(batch)):
            found = self.scored[1]
        return None if found is None else [None if routes is None else routes.plain() for routes in found]


class TreeRoutingReplay:
    """Mixin above a TRL trainer: a generated batch keeps the routes that its rollouts, or its old log-probs, had."""

    # Whether a rollout function's routes reach the trainer's steps, and those of its pass of old log-probs.
    replays_engine_routes = False
    replays_old_routes = False

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        parent: Any = super()
        with self._tree.routing.generating() as generation:  # type: ignore[attr-defined]
            output: dict[str, Any] = parent._generate_and_score_completions(inputs)
        routes = generation.of_batch(output)
        return output if routes is None else {**output, ROUTES: routes}


def routing_metrics(summed: dict[str, float], *, is_of_engine: bool) -> dict[str, float]:
    """Metrics of replay; see docs/moe.md.

    Args:
        summed: :meth:`RoutingReplay.counts` over all ranks.
        is_of_engine: whether routes that were known before are the engine's, or an earlier pass's.
    """
    flipped, replayed = summed["flipped"], summed["replayed"]
    if not is_of_engine:
        flipped, replayed = flipped + summed["otherwise"], replayed + summed["recorded"]
    found = {"routing_flips": flipped / replayed} if replayed else {}
    if is_of_engine and summed["rows"]:
        found["engine_routes_missing"] = summed["unrecorded"] / summed["rows"]
        found["engine_routes_differing"] = summed["differing"]
        if summed["recorded"]:
            found["engine_routing_flips"] = summed["otherwise"] / summed["recorded"]
    return found
