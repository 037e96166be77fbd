"""The parts of `harts bench`: what is trained, what is compared, what sharing could reach, why tokens are clipped."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import VOCAB
from support.trees import random_trajectories

from harts_hf import PlannerConfig, RolloutTree
from harts_hf.bench import sides
from harts_hf.bench.clipping import clipping_of, measure_clipping
from harts_hf.bench.collapsing import CollapsingPlanner, collapse, is_contained
from harts_hf.bench.comparing import entropy_of, settings_compared
from harts_hf.bench.ideal import Work, all_divided, ideal_step, microbatch_constant
from harts_hf.bench.parity import judge, judge_whole, relative_difference, scale_off, sketch_gradients
from harts_hf.bench.progress import Progress, guess_of_step, in_words, size_in_words
from harts_hf.bench.report import total_of
from harts_hf.bench.results import BenchOptions
from harts_hf.bench.rollouts import LABELS, StepRollouts, steps_of
from harts_hf.bench.sides import KINDS, Setting, rows_at_once
from harts_hf.bench.stages import StageClock
from harts_hf.bench.variants import sorted_batches
from harts_hf.cli import bench_arguments
from harts_hf.forest import expand_tree
from harts_hf.rollouts.recorded import Rollout, RolloutGroup

# A prompt of 2, a rollout that ends inside another, and one that is there twice.
ROWS = [[5, 6, 7, 8, 9], [5, 6, 7], [5, 6, 3, 4], [5, 6, 3, 4], [1]]


def group(rows=ROWS, masks=None, **more) -> RolloutGroup:
    """A group of token ids."""
    masks = masks or [None] * len(rows)
    rollouts = [
        Rollout(token_ids=np.array(row), loss_mask=mask if mask is None else np.array(mask, bool), **more)
        for row, mask in zip(rows, masks, strict=True)
    ]
    return RolloutGroup(name="a", rollouts=tuple(rollouts))


def test_the_command_line_names_what_there_is():
    """It repeats names, so that its help needs no torch."""
    assert tuple(KINDS) == bench_arguments.SIDES and LABELS == bench_arguments.LABELS


def test_time_that_is_left():
    """A guess at first, then what the sides took; larger batches that are not tried any more count no longer."""
    rows = StepRollouts.of([group()], vocab_size=10)
    assert size_in_words(rows) == "4 samples, 16 tokens (the longest 5), 7 unique (2.29x)"
    options = BenchOptions(kinds=("stock", "tree"), batch_sizes=(1, 2, 4), budgets=(4, 64), steps=2)
    now, said = [0.0], []
    progress = Progress(options, rows, said.append, guess=16.0, clock=lambda: now[0])
    # Stock: three settings twice, two timed; the tree: two settings twice, two timed, one for its stages. Compared are
    # stock TRL and that rounded again, two without sharing, two of the tree.
    assert progress.num_steps == 6 + 2 + 4 + 2 + 1 + 6
    assert progress.seconds_left == pytest.approx(8 * 16 + 7 * 7 + 4 * 16 + 2 * 7)
    progress("trying stock 1")
    now[0] = 64.0  # two runs of 32 s
    progress("trying stock 2")
    assert progress.num_steps == 2 + 2 + 7 + 6
    now[0] = 144.0  # of 40 s: the third size is not tried
    progress("trying tree 4")
    assert said == [
        "trying stock 1, about 4 min left",
        "trying stock 2, about 7 min left",
        "trying tree 4, about 7 min left",
    ]
    assert progress.num_steps == 2 + 5 + 6
    now[0] = 148.0
    progress("trying tree 64")
    now[0] = 150.0
    for number, label in enumerate(("stock 1", "stock 1, rounded again", "packed 64", "tree 64/1 on the same routes")):
        progress(f"comparing {label}")
        assert progress.num_steps == 5 + 5 - number
    now[0] = 200.0  # of what is compared alone nothing is learnt
    for number, kind in ((1, "stock 1"), (1, "tree 64"), (2, "stock 1"), (2, "tree 64")):
        progress(f"step {number} of 2: {kind}")
        now[0] += 3
    progress("stages of tree 64")
    assert progress.num_steps == 0 and said[-2:] == [
        "step 2 of 2: tree 64, about 6 s left",
        "stages of tree 64, about 3 s left",
    ]
    assert [in_words(seconds) for seconds in (0.2, 89, 90, 5399, 5400)] == [
        "1 s", "89 s", "2 min", "90 min", "1.5 h",
    ]  # fmt: skip


def test_first_guess_of_a_step():
    """Four times a forward of the longest row, for each of its lengths that all rows have."""
    rows, seen = StepRollouts.of([group()], vocab_size=10), []

    class Model(torch.nn.Linear):
        def forward(self, input_ids, use_cache):
            seen.append(input_ids.tolist())

    ticks = iter([0.0, 10.0, 12.0])
    assert guess_of_step(Model(1, 1), rows, clock=lambda: next(ticks)) == 2.0 * 4 * 16 / 5
    assert seen == [[ROWS[0]]] * 2


def test_rows_of_a_step():
    """Completions begin at the first trained token; what predicts nothing is left out; tokens are counted once per row
    of the tree and once per trajectory."""
    masks = [[0, 0, 1, 0, 1], [1, 1, 1], [0, 0, 0, 0], None, [1]]
    found = StepRollouts.of([group(masks=masks)], vocab_size=10)
    assert found.prompt_lengths == (2, 1, 3, 1)
    assert [mask.tolist() for mask in found.masks] == [[1, 0, 1], [1, 1], [0], [1, 1, 1]]
    assert found.num_tokens == 16 and found.tree.num_tokens == 7 and found.num_labels == (7, 5)
    assert len(set(found.rewards)) == 4
    answer = found.rollout_func()([], None)
    assert answer["prompt_ids"][0] == [5, 6] and answer["completion_ids"][0] == [7, 8, 9]
    assert answer["env_mask"][0] == [1, 0, 1]
    everything = StepRollouts.of([group(masks=masks)], vocab_size=10, labels="all")
    assert everything.prompt_lengths == (1, 1, 1, 1) and everything.num_labels == (12, 6)


def test_filling_up_trains_nothing():
    """Rows that fill a batch up change neither labels nor the mean reward."""
    found = StepRollouts.of([group()], vocab_size=10)
    found = replace(found, routes=tuple(np.full((len(ids), 1, 2), len(ids)) for ids in found.token_ids))
    filled = found.filled(3)
    assert [len(experts) for experts in filled.routes[4:]] == [2, 2] and (filled.routes[5] == 3).all()
    assert len(filled.token_ids) == 6 and found.filled(2) is found
    assert filled.num_labels == found.num_labels and np.mean(filled.rewards) == pytest.approx(np.mean(found.rewards))


def test_shapes_get_tokens():
    """Of a shape tokens are drawn so that they merge to the same tree."""
    shape = RolloutTree.from_shape([-1, 0, 0], [3, 2, 4], [1, 2])
    one = RolloutGroup(name="s", rollouts=(Rollout(token_ids=None), Rollout(token_ids=None)), shape=shape)
    assert StepRollouts.of([one], vocab_size=50).tree.num_tokens == shape.num_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 9}, "below the vocabulary size 9, got 9"),
        ({"labels": "some"}, "labels to be one of recorded, all, got 'some'"),
        ({"groups": [group([[1], [2, 3]])]}, "at least two trajectories that predict a token in a step, got 1"),
        ({"groups": [group([[1, 2, 3]] * 3)]}, "two different trajectories in a step, got 3 equal ones"),
        ({"groups": [group(masks=[[0] * len(row) for row in ROWS])]}, "trained token in a step, got none in group a"),
    ],
)
def test_rollouts_that_cannot_be_benchmarked(arguments, message):
    """Named with what was expected."""
    arguments = {"groups": [group()], "vocab_size": 10, **arguments}
    with pytest.raises(ValueError, match=message):
        StepRollouts.of(arguments.pop("groups"), **arguments)
    with pytest.raises(ValueError, match="at least one group per step, got 0"):
        steps_of([group()], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ("tree", "trees")}, "sides among stock, stock sorted, packed, collapsed, tree, got trees"),
        ({"kinds": ("tree", "collapsed")}, "tree and at least one of stock, stock sorted, packed"),
        ({"kinds": ("packed",)}, "tree and at least one of"),
        ({"budgets": ()}, "budgets to be numbers of at least 1"),
        ({"slice_rows": (4, 0)}, "slice_rows to be numbers of at least 1"),
        ({"steps": 0}, "at least one timed step, got 0"),
        ({"seconds_per_side": math.nan}, "seconds per side above 0, got nan"),
    ],
)
def test_options_that_compare_nothing(options, message):
    """Refused before anything is built."""
    with pytest.raises(ValueError, match=message):
        BenchOptions(**options)


@pytest.mark.parametrize("seed", range(4))
def test_collapsing_shares_nested_prefixes_and_nothing_else(seed):
    """Every trajectory keeps its tokens; two of them share rows only where one begins the other."""
    rows = random_trajectories(seed, vocab=VOCAB)
    rows = [*rows, rows[0][: len(rows[0]) // 2], rows[1].copy(), rows[2][:1]]
    tree = RolloutTree.from_trajectories(rows)
    found = collapse(tree)
    paths = [found.path(number) for number in range(len(rows))]
    for tokens, path in zip(rows, paths, strict=True):
        assert found.token_ids[path].tolist() == list(tokens)
    for one in range(len(rows)):
        for other in range(len(rows)):
            shorter, longer = sorted((paths[one], paths[other]), key=len)
            if set(shorter) & set(longer):
                assert set(shorter) <= set(longer)  # on the other's rows as a whole
    texts = {tuple(row) for row in rows}
    alone = [text for text in texts if not any(text == other[: len(text)] for other in texts - {text})]
    assert found.num_tokens == sum(map(len, alone)) and len(alone) == (~is_contained(tree)).sum() < len(rows) - 2
    window = CollapsingPlanner(config=PlannerConfig(sharing="always", max_tokens_per_microbatch=64))(rows)
    assert window.schedule.backward_tokens == found.num_tokens


def test_sorting_keeps_rows_and_drops_padding():
    """Every row comes back with its own values, shortest first, and no batch has a column of padding alone."""
    rng = np.random.default_rng(0)
    prompts, completions = rng.integers(1, 7, 8), rng.integers(1, 9, 8)
    batch = {
        "prompt_mask": torch.tensor([[0] * (6 - p) + [1] * p for p in prompts]),
        "completion_mask": torch.tensor([[1] * c + [0] * (8 - c) for c in completions]),
        "advantages": torch.arange(8.0),
        "num_items_in_batch": torch.tensor(3),
    }
    batch["prompt_ids"] = batch["prompt_mask"] * torch.arange(1, 9)[:, None]
    batch["completion_ids"] = batch["completion_mask"] * torch.arange(1, 9)[:, None]
    pieces = [{k: v[i : i + 2] if v.dim() else v for k, v in batch.items()} for i in range(0, 8, 2)]
    found = sorted_batches(pieces)
    assert len(found) == 4
    lengths = [int(n) for one in found for n in one["prompt_mask"].sum(1) + one["completion_mask"].sum(1)]
    assert lengths == sorted(lengths) == sorted((prompts + completions).tolist())
    for one in found:
        assert one["prompt_mask"].any(0).all() and one["completion_mask"].any(0).all()
        assert int(one["num_items_in_batch"]) == 3
        for row, number in enumerate(one["advantages"].int().tolist()):
            assert int(one["prompt_mask"][row].sum()) == prompts[number]
            assert int(one["completion_ids"][row].sum()) == (number + 1) * completions[number]


def sketches(size: float, seed: int = 0):
    """Of a gradient, and of one that differs by ``size`` of it."""
    model = torch.nn.Linear(300, 200)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    before = sketch_gradients(model)
    for parameter in model.parameters():
        parameter.grad = parameter.grad + size * torch.randn(parameter.shape, generator=generator)
    return sketch_gradients(model), before


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.1])
def test_sketches_say_how_far_gradients_are_apart(size):
    """To a quarter, from 256 buckets of each of two parameters."""
    assert relative_difference(*sketches(size)) == pytest.approx(size, rel=0.25)


def test_nothing_is_not_like_nothing():
    """Two gradients of zero are no agreement: something was to be trained."""
    zero = {"weight": torch.zeros(4, dtype=torch.float64)}
    assert (
        math.isnan(scale_off(zero, zero))
        and math.isnan(relative_difference(zero, zero))
        and judged(half=math.nan)[1]
        and judged(rounded=math.nan)[1]
    )


def judged(
    *, rounded=1e-3, packed=2e-3, tree=2e-3, half=1e-3, sharing=3e-3, entropy=0.0, flips=0.0, dtype=torch.float32
):
    """Limits and failures of differences that float32 has not by itself."""
    differences = {
        name: {"gradients": value, "grad_norm": 0.0, "entropy": entropy if name == "tree 8" else 0.0}
        for name, value in (("stock 1, rounded again", rounded), ("packed 8", packed), ("tree 8", tree))
    }
    return judge(
        differences, {"packed 4": half, "tree 8": sharing}, {"tree 8": flips}, dtype, reference="stock 1"
    )  # fmt: skip


def test_the_verdict_on_sides():
    """Kernels may differ by as much as roundings do, sharing as other microbatches do; nothing by more, or by NaN."""
    limits, failures = judged()
    assert not failures and limits["gradients"] == pytest.approx(3e-3) and limits["sharing"] == pytest.approx(4e-3)
    for wrong, message in (
        ({"packed": 4e-3}, "gradients of packed 8 differ from stock 1's by 4.00e-03, at most 3.00e-03"),
        ({"tree": math.nan}, "gradients of tree 8 differ from stock 1's by nan"),
        ({"sharing": 5e-3}, "sharing moves the gradient of tree 8 by 5.00e-03, at most 4.00e-03"),
        ({"entropy": 2e-3}, "entropy of tree 8 differ"),
        ({"flips": 0.02}, "routers of tree 8 would choose 2.0% of the experts otherwise"),
        ({"rounded": 0.02}, "moves the gradient of stock 1 by 2.00e-02, at most 1e-02 expected: it is nothing but"),
        ({"half": 0.02}, "smaller microbatches move the gradient without sharing by 2.00e-02"),
    ):
        failures = judged(**wrong)[1]
        assert len(failures) == 1 and message in failures[0]
    assert not judged(rounded=0.2, packed=0.3, tree=0.3, half=0.03, sharing=0.1, flips=0.1, dtype=torch.bfloat16)[1]
    assert judged(rounded=1e-9, half=0.0, packed=1e-5, tree=1e-5, sharing=1e-5)[0]["sharing"] == 2e-5  # in any case
    blind = judged(rounded=0.0, half=0.0, packed=0.0, tree=0.0, sharing=0.0)[1]
    assert blind == ["rounding once more behind each layer does not move the gradient of stock 1"]
    # In bfloat16 sharing may move the gradient by 0.4 here, each parameter otherwise, but not the scale by 6 %.
    low = {"from_packed": {"packed 4": 0.1, "tree 8": 0.06}, "flips": {}, "dtype": torch.bfloat16, "reference": "a"}
    assert not judge({}, **low, scales={"packed 4": 0.2, "tree 8": 0.01})[1]
    assert judge({}, **low, scales={"tree 8": 0.06})[1] == [
        "sharing moves the scale of the gradient of tree 8 by 6.00e-02, at most 2.00e-02 expected"
    ]
    (failure,) = judge({"packed 8": {"gradients": 0.1, "scale": 0.1, "entropy": 0.0}}, **low)[1]
    assert failure == "scale of packed 8 differ from a's by 1.00e-01, at most 5.00e-02 expected"
    assert "gradients" not in judge({}, {"tree 8": 0.0}, {}, torch.float32, reference="packed 8")[0]


def test_what_whole_steps_say():
    """Those of the tree and of packed rows; what a trainer does not log is not compared."""
    logs = {"packed 8": {"grad_norm": 1.0, "entropy": 2.0}, "tree 8": {"grad_norm": 1.01, "entropy": 2.001}}
    assert not judge_whole(logs, torch.float32) and not judge_whole({}, torch.float32)
    assert not judge_whole({**logs, "tree 8": {}}, torch.float32)
    for wrong, message in (
        (
            {"grad_norm": 0.5},
            "grad_norm of the timed step of tree 8 differs from packed 8's by 5.00e-01, at most 2e-02",
        ),
        ({"entropy": math.nan}, "entropy of the timed step of tree 8 differs from packed 8's by nan, at most 1e-03"),
    ):
        (failure,) = judge_whole({**logs, "tree 8": {**logs["tree 8"], **wrong}}, torch.float32)
        assert message in failure


def test_a_part_of_a_step_stands_side_by_side_in_the_tree():
    """As many neighbours as fit; two at least; all if they fit."""
    found = StepRollouts.of([group()], vocab_size=10)  # [1] predicts nothing and is left out
    assert found.part(100) is found
    part = found.part(11)  # 5 6 3 4 and its double have 8 tokens, with 5 6 7 they are 11
    assert sorted(map(len, part.token_ids)) == [3, 4, 4] and part.tree.num_tokens == 5
    assert part.rewards == tuple(found.rewards[number] for number in (1, 2, 3))
    assert len(found.part(1).token_ids) == 2
    # Five equal ones would be the most that fit into 10 tokens, and train nothing.
    repeated = StepRollouts.of([group([[5, 6]] * 5 + [[5, 7, 8, 9], [5, 7, 8, 8]])], vocab_size=10)
    assert [ids.tolist() for ids in repeated.part(10).token_ids] == [[5, 6]] * 3 + [[5, 7, 8, 8]]
    assert [ids.tolist() for ids in repeated.part(3).token_ids] == [[5, 6], [5, 7, 8, 8]]


def test_stock_sizes_are_at_most_the_rows_of_the_step():
    """A larger one is the whole step at once, without rows that fill it up."""
    found = StepRollouts.of([group()], vocab_size=10)
    options = BenchOptions(batch_sizes=(8, 2, 64, 1))
    assert [setting.size for setting in options.settings("stock", found)] == [1, 2, 4]


def test_rows_of_a_batch_without_padding(monkeypatch):
    """All rows, or equal parts that are quick; those that are asked for with every budget, all rows at most."""
    found = StepRollouts.of([group()], vocab_size=10)
    assert rows_at_once(found) == 4
    monkeypatch.setattr(sides, "MOST_ON_CPU", 3 * max(map(len, found.masks)))
    assert rows_at_once(found) == 2
    labels = [setting.label for setting in BenchOptions(budgets=(4, 8)).settings("packed", found)]
    assert labels == ["packed 4", "packed 8"]
    options = BenchOptions(budgets=(4, 8), slice_rows=(64, 1), fixed={"tree": 16})
    labels = [setting.label for setting in options.settings("packed", found)]
    assert labels == ["packed 4/1", "packed 4/4", "packed 8/1", "packed 8/4"]
    assert [setting.label for setting in options.settings("tree", found)] == ["tree 16/1", "tree 16/4"]


def test_entropies_are_weighed_by_tokens():
    """Whichever batches TRL has taken the means of."""
    masks = [torch.tensor([[1, 0, 0]]), torch.tensor([[1, 1, 1]])]
    trainer = SimpleNamespace(
        _metrics={"train": {"entropy": [1.0, 2.0]}}, _buffered_inputs=[{"completion_mask": mask} for mask in masks]
    )
    assert entropy_of(trainer) == 1.75


def test_losses_that_depend_on_their_batch_are_compared_in_rows():
    """So are more rows than are quick at once: rows that fill a batch up would change what is trained."""
    found = StepRollouts.of([group()], vocab_size=10)
    chosen = [Setting(kind="stock", size=2), Setting(kind="tree", size=128, rows=2)]
    labels = [setting.label for setting in settings_compared(chosen, found, 64)]
    assert labels == ["stock 1", "packed 64", "tree 64"]
    labels = [setting.label for setting in settings_compared(chosen, found, 64, in_rows=True)]
    assert labels == ["stock 1", "packed 64/1", "tree 64/1"]


def test_labels_of_collapsed_trajectories_are_counted_once():
    """On the rows that trajectories have in common, as the head computes them."""
    found = StepRollouts.of([group()], vocab_size=10)
    assert found.labels_on(expand_tree(found.tree)) == found.num_labels[0] == 12
    assert found.labels_on(collapse(found.tree)) == 7 and found.labels_on(found.tree) == found.num_labels[1] == 6


def test_the_ideal_divides_each_stage_by_its_own_ratio():
    """Optimizer and clipping stay whole, and the constants are those of the tree's own microbatches."""
    phases = dict.fromkeys(("prepare", "old_log_probs", "planning", "clipping", "other"), 0.0)
    phases |= {"prepare": 1.0, "forward_backward": 20.0, "optimizer": 2.0, "clipping": 0.5}
    baseline = Work(rows=100, chunks=10, pairs=400, labels=30, microbatches=4)
    tree = Work(rows=20, chunks=5, pairs=100, labels=30, microbatches=1)
    found = ideal_step(phases, {"attention": 4.0, "rule": 2.0, "head": 3.0}, 0.25, baseline, tree)
    assert found.seconds == pytest.approx(
        {
            "attention": 1.0,
            "rule": 1.0,
            "head": 3.0,
            "rows": 2.0,
            "microbatches": 0.25,
            "optimizer": 2.5,
            "trainer": 0.2,
        }
    )
    assert found.total == pytest.approx(9.95)
    # A second of the baseline's 20 is constants; without any, its rows' part divides by 5, too.
    assert all_divided(found.seconds, 5.0, 4, 1) == pytest.approx(9.95 - 0.25 + 0.2)
    assert microbatch_constant([1, 2, 4], [1.0, 1.5, 2.5]) == pytest.approx(0.5)
    assert microbatch_constant([2, 2], [1.0, 3.0]) == 0 and microbatch_constant([1, 3], [3.0, 1.0]) == 0


class Slow(torch.autograd.Function):
    """Takes 20 ms forward and 30 ms backward."""

    @staticmethod
    def forward(ctx, values):
        time.sleep(0.02)
        return values * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.03)
        return gradient * 2


def test_stages_are_timed_forward_and_backward():
    """What lies between the marks counts in both directions, and what lies around them does not."""
    clock = StageClock(torch.device("cpu"))
    timed = clock._timed("rule", lambda values, table: Slow.apply(values).sum())
    leaf = torch.ones(3, requires_grad=True)
    loss = Slow.apply(timed(Slow.apply(leaf), "a table"))
    loss.backward()
    assert leaf.grad.tolist() == [8.0] * 3
    seconds = clock.seconds()
    assert seconds["attention"] == seconds["head"] == 0
    assert 0.05 <= seconds["rule"] < 0.09  # three of them are 0.15


def test_causes_of_clipping():
    """Roundings, another policy (one-sided), an engine of lower precision; unknown log-probs are left out."""
    rng = np.random.default_rng(0)
    mine = -2 + 0.1 * rng.normal(size=4000)
    noise = 1e-3
    rounded = clipping_of(mine, mine + noise * rng.normal(size=4000), noise, 0.2, True)
    assert rounded.clipped == 0 and rounded.cause.startswith("roundings")
    coarse = clipping_of(mine, mine + 0.1 * rng.normal(size=4000), noise, 0.2, True)
    assert 0.03 < coarse.clipped < 0.07 and coarse.cause.endswith("lower precision")
    other = clipping_of(mine, mine - 0.3 + 0.01 * rng.normal(size=4000), noise, 0.2, True)
    assert other.clipped == 1 and other.cause.startswith("one-sided (+0.3 nats")
    half = np.where(np.arange(4000) < 1000, mine, np.nan)
    assert clipping_of(mine, half, noise, 0.2, True).tokens == 1000
    assert clipping_of(mine, np.full(4000, np.nan), noise, 0.2, True).tokens == 0


def row(name, seconds, tokens, **more):
    """A step as JSON."""
    return {
        "model": "m", "workload": "w", "groups": [name], "trajectories": 2, "tokens": tokens, "unique_tokens": 10,
        "seconds": seconds, "planner_share": 0.01, "peak_memory": None,
        "parity": {"passed": True}, **more,
    }  # fmt: skip


def test_a_total_scales_what_was_sampled_and_says_so():
    """Seconds add up; a side that ran on some groups is scaled by tokens; efficiency needs every step."""
    baseline = {"baseline_seconds": 4.0, "baseline_peak_memory": 7, "efficiency": 0.9, "ideal_seconds": {"a": 0.9}}
    baseline |= {"ideal_at_most": 8.0, "efficiency_at_least": 0.5}
    stock = {"stock_seconds": 10.0, "stock_peak_memory": None}
    rows = [row("a", 1.0, 100, **baseline, **stock), row("b", 1.0, 300, **baseline)]
    total = total_of(rows)
    assert total["speedup"] == 4.0 and total["speedup_stock"] == 20.0
    assert total["scaled"] == {"stock": ["a"]} and total["baseline_peak_memory"] == 7
    assert total["efficiency"] == pytest.approx(0.9) and total["sharing_ratio"] == 20
    assert (total["ideal_at_most"], total["efficiency_at_least"]) == pytest.approx((8.0, 0.5))
    assert total_of([rows[0], row("b", 1.0, 300)])["steps"] == 2
    with pytest.raises(ValueError, match="one step that was timed with a baseline, got none"):
        total_of([row("b", 1.0, 300)])
    with pytest.raises(ValueError, match="passed the parity check"):
        total_of([{**rows[0], "parity": {"passed": False}}])


def test_recorded_log_probs_beside_what_trainers_scored():
    """Trained tokens alone are compared; rows that fill a batch up are left out."""
    old = StepRollouts.of([group(ROWS[:3], masks=[[0, 0, 1, 0, 1], [0, 1, 1], [0, 1, 1, 1]])], vocab_size=10)
    mine = [np.full(len(mask), -2.0) for mask in old.masks]
    stock = [*(values + 1e-6 for values in mine), np.array([5.0])]
    recorded = tuple(np.where(mask, -2.5, np.nan) for mask in old.masks)
    scored = {"tree": mine, "stock": stock}
    found = measure_clipping(replace(old, old_logprobs=recorded), scored, "tree", epsilon=0.2)
    assert {name: (one.tokens, one.clipped) for name, one in found.items()} == {
        "recorded": (7, 1.0),
        "stock": (7, 0.0),
    }
    assert found["recorded"].mean == pytest.approx(0.5) and "one-sided" in found["recorded"].cause
    assert list(measure_clipping(old, scored, "tree", epsilon=0.2)) == ["stock"]
