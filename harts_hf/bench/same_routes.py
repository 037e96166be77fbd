"""Routes that all sides of a parity check are told to take, so that kernels are compared and not near-ties.

In a mixture of experts a rounding may make a router choose another expert, and that is no small difference any more:
it cascades over the layers, until the gradients of any two kernels, right ones too, have little in common. So the
tree notes the experts of every token once; stock TRL and the sides of this package then all take these. What routers
would have chosen themselves, given the same before them, is counted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import TREE, BenchStep, Setting, build_side
from harts_hf.modeling import find_routers
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.modeling.routing import weights_at
from harts_hf.trainers.rows import ROUTES
from harts_hf.tree import IntArray


def record_routes(step: BenchStep, *, size: int) -> StepRollouts:
    """The same rollouts with the experts that the tree's pass of old log-probs chose: one choice per row of the tree.

    Args:
        step: of a mixture of experts.
        size: of a microbatch.
    """
    rollouts, own = step.rollouts, replace(step.args, tree_replay_routing="scoring", generation_batch_size=None)
    side = build_side(Setting(kind=TREE, size=size), replace(step, args=own, old_log_probs=True))
    found: list[Any] = []
    generate = side.trainer._generate_and_score_completions

    def keeping(inputs: Any) -> Any:
        output = generate(inputs)
        found.extend(output[ROUTES])
        return output

    side.trainer._generate_and_score_completions = keeping
    side.step()
    routes = []
    for pieces in found[: len(rollouts.token_ids)]:
        parts = [experts if rows is None else experts[rows] for experts, rows in pieces]
        routes.append(torch.cat(parts).numpy())
    return replace(rollouts, routes=tuple(routes))


class ReplayInStock:
    """Makes the routers of an unpatched model take known routes, whatever rows it is given, from now on.

    Args:
        model: unpatched; hooks are put on its causal language model and its routers.
        token_ids: of each trajectory.
        routes: ``[L, layers, k]`` integers of each trajectory: the experts of its tokens in each layer with a router.
    """

    def __init__(self, model: nn.Module, token_ids: Sequence[IntArray], routes: Sequence[np.ndarray]) -> None:
        self._known = {np.asarray(ids).tobytes(): number for number, ids in enumerate(token_ids)}
        self._routes = [torch.from_numpy(np.asarray(one)).short() for one in routes]
        self._now: torch.Tensor | None = None  # [B * T, layers, k] of the batch that runs, -1 at padding
        self._counts: torch.Tensor | int = 0  # [2] choices that differ, and of how many
        base = causal_lm_of(model)
        base.register_forward_pre_hook(self._begin, with_kwargs=True)
        for number, router in enumerate(find_routers(base)):
            router.register_forward_hook(self._answer(number))

    @property
    def flips(self) -> float:
        """Part of the choices that a router would have made otherwise."""
        if isinstance(self._counts, int):
            return 0.0
        different, of = self._counts.tolist()
        return float(different / max(of, 1))

    def _begin(self, _: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        ids_here = ids.cpu().numpy()
        is_real = np.ones(ids_here.shape, bool) if mask is None else mask.cpu().numpy().astype(bool)
        shape = self._routes[0].shape[1:]
        found = torch.full((*ids_here.shape, *shape), -1, dtype=torch.int16)
        for row, (tokens, real) in enumerate(zip(ids_here, is_real, strict=True)):
            number = self._known.get(tokens[real].astype(np.int64).tobytes())
            if number is not None:  # rows that fill up a batch are not known
                found[row, torch.from_numpy(real)] = self._routes[number]
        self._now = found.flatten(0, 1).to(ids.device)

    def _answer(self, number: int) -> Any:
        def replay(router: Any, _: Any, answer: Any) -> Any:
            logits, weights, chosen = answer
            assert self._now is not None
            wanted = self._now[:, number].long()
            is_known = wanted >= 0
            differs = ~(chosen[:, :, None] == wanted[:, None, :]).any(dim=-1) & is_known
            self._counts = self._counts + torch.stack([differs.sum(), is_known.expand_as(differs).sum()])
            experts = torch.where(is_known, wanted, chosen)
            return logits, weights_at(router, logits, experts).to(weights.dtype), experts

        return replay


class RoundedAgain:
    """Rounds what comes out of each layer of a model once more, up or down by chance, from now on.

    How far a gradient moves by that is the yardstick of what kernels that round differently may do to it: it grows
    with the depth of a model as their differences do.

    Args:
        model: unpatched.
    """

    def __init__(self, model: nn.Module) -> None:
        for number, layer in enumerate(causal_lm_of(model).model.layers):
            layer.register_forward_hook(self._rounding(number))

    def _rounding(self, number: int) -> Any:
        def rounded(_: Any, __: Any, answer: Any) -> Any:
            hidden = answer[0] if isinstance(answer, tuple) else answer
            # The same for the same layer and shape: checkpointing computes layers twice.
            generator = torch.Generator(hidden.device).manual_seed(number)
            up = torch.randint(0, 2, hidden.shape, generator=generator, device=hidden.device, dtype=torch.int8)
            half = torch.finfo(hidden.dtype).eps / 2
            moved = (hidden.double() * (1 + half * (2 * up.double() - 1))).to(hidden.dtype)
            return (moved, *answer[1:]) if isinstance(answer, tuple) else moved

        return rounded
