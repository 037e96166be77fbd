"""Routes that are known before a forward: on rows of trees, on ranks, and in gradients; float64.

The oracle is the unpatched model, one trajectory at a time, whose routers are told what to choose.
"""

import copy

import numpy as np
import pytest
import torch
from support.models import VOCAB, tiny_model
from support.oracle import assert_gradients_close, float64_everywhere, gradients, trajectory_log_probs
from support.parity import GRADIENT_TOLERANCE
from support.ranks import on_ranks
from support.trees import branching

from harts_hf import PlannerConfig, patch, unpatch
from harts_hf.modeling import find_routers
from harts_hf.runtime import RunOptions, TreeUpdate, WindowPlanner
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.routes import KnownRoutes, TokenRoutes, marked, merge_marked, merge_routes
from harts_hf.tree import RolloutTree

TOP_K, EXPERTS = 2, 8
PLANNER = PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution="replay")


def drawn(count, num_layers, seed):
    """``[count, layers, k]`` different experts of each token in each layer."""
    rng = np.random.default_rng(seed)
    shape = (count, num_layers, EXPERTS)
    return torch.from_numpy(np.sort(rng.random(shape).argsort(axis=-1)[..., :TOP_K], axis=-1).astype(np.int16))


def routes_of(experts):
    """Of a trajectory."""
    return TokenRoutes(((experts, None),))


class Rows:
    """A slice: every token but the first of each trajectory is scored."""

    def __init__(self, trajectories, routes):
        self.rows, self.routes = trajectories, routes

    def trajectories(self):
        return self.rows

    def stand_in(self):
        return np.array([3, 4])

    def index(self, paths):
        index = np.full((max(1, len(paths)), max(map(len, paths), default=2)), -1)
        for row, path in zip(index, paths, strict=False):
            row[1 : len(path)] = path[1:]
        return {"log_prob": index}


def told(model, experts):
    """Hooks that have routers choose ``experts`` [t, L, k] for the first tokens, -1 leaving the choice."""
    handles = []
    for number, router in enumerate(find_routers(model)):

        def tell(router, _, answer, number=number):
            logits, _, own = answer
            wanted = own.clone()
            known = experts[:, number].long()
            wanted[: len(known)] = torch.where(known < 0, own[: len(known)], known)
            if hasattr(router, "e_score_correction_bias"):
                weights = logits.sigmoid().gather(1, wanted)
                weights = weights / weights.sum(1, keepdim=True) * router.routed_scaling_factor
            else:
                weights = logits.softmax(-1).gather(1, wanted)
                weights = weights / weights.sum(1, keepdim=True)
            return logits, weights, wanted

        handles.append(router.register_forward_hook(tell))
    return handles


def case(num_layers):
    """Trajectories; routes of each (one without any, one of fewer tokens than it has); and what each row takes.

    Where tokens share a row, the first trajectory that knows decides.
    """
    rows = branching(65, vocab=VOCAB)
    routes = [routes_of(drawn(len(row), num_layers, seed)) for seed, row in enumerate(rows)]
    routes[1] = None
    routes[3] = routes[3].cut(70)
    whole = routes[4].pieces[0][0]
    routes[4] = routes_of(torch.where(torch.arange(len(whole))[:, None, None] < 40, -1, whole)).cut(67)
    tree = RolloutTree.from_trajectories(rows)
    held, differing = {}, set()
    for number, found in enumerate(routes):
        for row, experts in zip(tree.path(number), [] if found is None else found.pieces[0][0], strict=False):
            if (experts >= 0).all():
                if row in held and not torch.equal(held[row], experts):
                    differing.add(int(row))
                held.setdefault(row, experts)
    unknown = torch.full((num_layers, TOP_K), -1, dtype=torch.int16)
    taken = [torch.stack([held.get(row, unknown) for row in tree.path(number)]) for number in range(len(rows))]
    return rows, routes, taken, differing, len(held)


def test_first_trajectory_decides():
    """On one rank and on three; what differs is counted; tokens with the same place in memory are not looked at."""
    rows, routes, taken, differing, known = case(3)
    tree = RolloutTree.from_trajectories(rows)
    paths = [tree.path(number) for number in range(len(rows))]
    alone = merge_routes(tree.num_tokens, paths, routes, Ranks())
    assert len(differing) > 60 and (alone.experts >= 0).flatten(1).all(1).sum() == known < tree.num_tokens
    for path, expected in zip(paths, taken, strict=True):
        assert torch.equal(alone.experts[path], expected)
    assert set(alone.differs.nonzero()[:, 0].tolist()) == differing

    def work(ranks):
        own = slice(2 * ranks.index, 2 * ranks.index + 2)
        return merge_routes(tree.num_tokens, paths[own], routes[own], ranks)

    for found in on_ranks(3, work):
        assert torch.equal(found.experts, alone.experts) and torch.equal(found.differs, alone.differs)
    shared = TokenRoutes(((alone.experts, torch.from_numpy(paths[0])),))
    again = merge_routes(tree.num_tokens, paths[:1] * 2, [shared, shared.cut(5)], Ranks())
    assert torch.equal(again.experts[paths[0]], alone.experts[paths[0]]) and not again.differs.any()
    assert merge_routes(tree.num_tokens, paths, [None] * len(paths), Ranks()) is None
    with pytest.raises(ValueError, match=r"routes of \(3, 2\) layers and experts.*got \(1, 2\)"):
        merge_routes(tree.num_tokens, paths[:2], [routes[0], routes_of(drawn(3, 1, 0))], Ranks())


def test_marks():
    """Rows are shared where tokens and routes are; ids come back, shapes stay proper."""
    rows, routes, *_ = case(2)
    tree = merge_marked([marked(row, found) for row, found in zip(rows, routes, strict=True)])
    for number, row in enumerate(rows):
        assert np.array_equal(tree.token_ids[tree.path(number)], row)
    first, second, last = (tree.path(number) for number in (0, 1, 3))
    assert not set(first) & set(second) and not set(first) & set(last)
    same = [marked(rows[0], routes[0]), marked(rows[0][:30], routes[0])]
    assert merge_marked(same).num_tokens == len(rows[0])
    assert np.array_equal(marked(rows[0], None), rows[0])


@pytest.mark.parametrize(
    ("family", "splits", "count", "placement"),
    [
        ("bailing_hybrid", False, 1, "local"),
        ("qwen3_next", True, 1, "local"),
        ("qwen3_next", False, 2, "global"),
        pytest.param("bailing_hybrid", True, 2, "global", marks=pytest.mark.slow),
    ],
)
def test_gradients_on_known_routes(family, splits, count, placement):
    """Log-probs and every gradient are those of the stock model on the same routes, weights computed anew."""
    start = tiny_model(family, dtype=torch.float64)
    num_layers = len(find_routers(start))
    rows, routes, taken, differing, _ = case(num_layers)
    if splits:  # a row by itself keeps its own, and what it does not know it chooses
        taken = [torch.full((0, num_layers, TOP_K), -1) if one is None else one.pieces[0][0] for one in routes]
    models = [patch(copy.deepcopy(start)) for _ in range(count)]
    values = {}

    def work(ranks):
        own = slice(ranks.index * len(rows) // count, (ranks.index + 1) * len(rows) // count)
        update = TreeUpdate(
            models[ranks.index],
            WindowPlanner(config=PLANNER, vocab_size=VOCAB),
            RunOptions(replay_routing=True),
            ranks=ranks,
            placement=placement,
            known_routes=KnownRoutes(lambda one: one.routes, splits=splits),
        )

        def loss(one, leaves):
            values[ranks.index] = leaves["log_prob"].detach()
            return (leaves["log_prob"] * torch.arange(leaves["log_prob"].shape[1])).sum()

        return update.run([Rows(rows[own], routes[own])], lambda one: one, loss, names=("log_prob",))

    with float64_everywhere(start):
        reports = on_ranks(count, work)
        for report in reports:
            if isinstance(report, Exception):
                raise report
        expected = []
        for row, experts in zip(rows, taken, strict=True):
            handles = told(start, experts)
            expected.append(trajectory_log_probs(start, row))
            for handle in handles:
                handle.remove()
        sum((one * torch.arange(1, len(one) + 1)).sum() for one in expected).backward()
    found = torch.cat([one[one != 0] for rank in range(count) for one in values[rank]])
    assert (found - torch.cat(expected).detach()).abs().max() < 1e-10
    for model in models:
        unpatch(model)
    total = {name: sum(gradients(model)[name] for model in models) for name in gradients(start)}
    assert_gradients_close(total, gradients(start), GRADIENT_TOLERANCE)
    counts = [report.routing for report in reports]
    assert sum(one.recorded for one in counts) > 0 and sum(one.replayed for one in counts) > 0
    # Drawn at random, routes are what a router would choose by chance: 2 of 8.
    assert 0.6 < sum(one.otherwise for one in counts) / sum(one.recorded for one in counts) < 0.9
    assert sum(one.differing for one in counts) == (0 if splits else len(differing))
    assert sum(one.flipped for one in counts) == 0 < sum(one.unrecorded for one in counts)


def test_routes_of_a_scoring_pass():
    """By trajectory, what the stock routers choose; replayed in a later update, none is chosen otherwise."""
    model = tiny_model("qwen3_next", dtype=torch.float64)
    rows, chosen, kept = branching(65, vocab=VOCAB), [], []
    with float64_everywhere(model), torch.no_grad():
        for row in rows:
            found = []
            handles = [
                router.register_forward_hook(lambda _, inputs, answer, found=found: found.append(answer[2]))
                for router in find_routers(model)
            ]
            trajectory_log_probs(model, row)
            chosen.append(torch.stack(found, dim=1))
            for handle in handles:
                handle.remove()
        patch(model)
        options = RunOptions(replay_routing=True)
        update = TreeUpdate(
            model, WindowPlanner(config=PLANNER), options, on_scored=lambda rows, routes: kept.extend(routes)
        )
        update.score(Rows(rows, None), ("log_prob",))
    for routes, expected in zip(kept, chosen, strict=True):
        experts, index = routes.pieces[0]
        assert torch.equal(experts[index].sort(dim=-1).values, expected.sort(dim=-1).values.short())
    update = TreeUpdate(
        model, WindowPlanner(config=PLANNER), options, known_routes=KnownRoutes(lambda one: one.routes)
    )
    with float64_everywhere(model):
        report = update.run(
            [Rows(rows, kept)], lambda one: one, lambda _, leaves: leaves["log_prob"].sum(), names=("log_prob",)
        )
    assert report.routing.otherwise == report.routing.unrecorded == 0 < report.routing.recorded
