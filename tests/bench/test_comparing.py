"""Steps that are compared: right ones agree, and a bug of the tree or of all kernels is seen, in bfloat16 too."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import planted
from support.models import VOCAB, tiny_model

from harts_hf.bench import comparing, measure, variants
from harts_hf.bench.parity import Parity
from harts_hf.bench.progress import read_said
from harts_hf.bench.results import BenchOptions
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import PACKED, TREE, BenchStep, Setting, common_arguments
from harts_hf.bench.subject import word_tokenizer
from harts_hf.modeling import forwards
from harts_hf.rollouts.shapes import shape_group

# A trajectory ends inside another, and one is there twice.
SHAPE = {"parent": [-1, 0, 0, 1, 1], "length": [70, 40, 30, 35, 50], "sample_node": [3, 2, 1, 3, 4]}


def verdict(family, dtype, *, checkpointing=False, kinds=("stock",), said=None, **more):
    """Of sides on a tiny model: those of some kinds, without sharing, the tree; ``said`` gets what is done."""
    is_low = dtype == torch.bfloat16
    args = common_arguments(
        bf16=is_low, use_cpu=True, optim="sgd", dataloader_pin_memory=False, router_aux_loss_coef=0.0,
        activation_checkpointing=checkpointing, activation_checkpointing_kwargs={"use_reentrant": False},
        **more,
    )  # fmt: skip
    rollouts = StepRollouts.of([shape_group(SHAPE, "a")], vocab_size=VOCAB)
    step = BenchStep(model=tiny_model(family, dtype=dtype), rollouts=rollouts, args=args, tokenizer=word_tokenizer())
    chosen = [Setting(kind=kind, size=1) for kind in kinds]
    said = [] if said is None else said
    return comparing.Comparison(step, progress=said.append).verdict(chosen, 512, dtype)


@pytest.mark.slow
def test_experts_that_all_sides_are_told(monkeypatch):
    """Drawn at random, they are taken by stock TRL, without sharing and on the tree: their gradients agree."""
    record = comparing.record_routes

    def drawn(*args, **kwargs):
        known = record(*args, **kwargs)
        by_path: dict[bytes, np.ndarray] = {}  # the same for tokens that trajectories share
        rng = np.random.default_rng(0)
        routes = []
        for ids, noted in zip(known.token_ids, known.routes, strict=True):
            rows = [
                by_path.setdefault(
                    ids[: end + 1].tobytes(), rng.permuted(np.tile(np.arange(8), (2, 1)), axis=1)[:, :2]
                )
                for end in range(len(ids))
            ]
            assert noted.shape == (len(ids), 2, 2)
            routes.append(np.stack(rows).astype(np.int16))
        return replace(known, routes=tuple(routes))

    monkeypatch.setattr(comparing, "record_routes", drawn)
    found = verdict("bailing_hybrid", torch.float32, checkpointing=True)
    # Rounding, seen up to 3e-6; of 8 experts a router would take another two.
    assert all(0 < one["gradients"] < 2e-5 for one in found.differences.values())
    assert all(0.5 < part < 0.95 for part in found.flips.values()) and len(found.flips) == 5
    assert len(found.failures) == 5 and all("experts otherwise" in failure for failure in found.failures)


def halved_logprobs(monkeypatch):
    """Log-probs whose gradients are half of what they should be, in all kernels of this package."""
    function = forwards.token_logprobs

    def halved(*args, **kwargs):
        found = function(*args, **kwargs)
        return found._replace(log_prob=0.5 * (found.log_prob + found.log_prob.detach()))

    monkeypatch.setattr(forwards, "token_logprobs", halved)


def advantages_of_other_rows(monkeypatch):
    """Sorted batches of stock TRL whose advantages are those of the next."""
    function = variants.sorted_batches

    def moved(batches):
        found = function(batches)
        advantages = [batch["advantages"] for batch in found]
        return [
            {**batch, "advantages": own} for batch, own in zip(found, [*advantages[1:], advantages[0]], strict=True)
        ]

    monkeypatch.setattr(variants, "sorted_batches", moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (None, None),
        (advantages_of_other_rows, "gradients of stock sorted 1 differ from stock 1's by"),
        (halved_logprobs, "scale of packed 512 differ from stock 1's by 5.00e-01, at most 1.00e-03"),
    ],
)
def test_baselines_and_gradients_that_are_clipped(plant, message, monkeypatch):
    """All sides are compared, and their gradients as they are before they are clipped to one norm."""
    if plant is not None:
        plant(monkeypatch)
    kinds = ("stock", "stock sorted", "collapsed")
    found = verdict("qwen3_5_text", torch.float32, kinds=kinds, max_grad_norm=1e-3)
    assert found.passed is (plant is None)
    assert {"stock sorted 1", "collapsed 512", "tree 225"} < set(found.differences)
    assert plant is None or any(message in failure for failure in found.failures), found.failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (None, None),
        (planted.conv_over_branches, "sharing moves the gradient of tree 225 by"),
        (halved_logprobs, "gradients of packed 512 differ from stock 1's by"),
    ],
)
def test_a_mixture_of_experts_in_bfloat16(plant, message, monkeypatch):
    """Where routers choose for themselves, right gradients are 12 % apart; on the same routes 3 %, and bugs show."""
    if plant is not None:
        plant(monkeypatch)
    said: list[str] = []
    found = verdict("qwen3_5_moe_text", torch.bfloat16, said=said)
    of_kinds = comparing.kinds_compared(("stock", "tree"), routed=True)
    assert sorted(kind for _, kind in map(read_said, said)) == sorted(of_kinds)
    assert found.passed is (plant is None) and found.routes == "same"
    if plant is None:
        told, own = found.differences["packed 512"]["gradients"], found.own_routes["packed 512"]["gradients"]
        assert told < 0.05 < own and found.from_packed["tree 225"] < told
    else:
        assert any(message in failure for failure in found.failures), found.failures


@pytest.mark.parametrize(("once_above", "steps"), [(1.0, 1), (5.0, 3)])
def test_a_long_baseline_is_timed_when_it_is_tried(once_above, steps, monkeypatch):
    """Above so many seconds its step with stages is its timed one; sides that are refused have no times."""
    ran = []

    def side(setting, step):
        clock = SimpleNamespace(seconds=2.0, phases={}, peak_memory=None, clocks=None, report=None)
        made = SimpleNamespace(setting=setting, clock=clock, log={}, rows_per_batch=1)
        made.step = lambda: ran.append(setting.kind)
        return made

    monkeypatch.setattr(measure, "build_side", side)
    options = BenchOptions(kinds=(PACKED, TREE), budgets=(64,), steps=2, stages_when_tried=True, once_above=once_above)
    rollouts = SimpleNamespace(num_tokens=9, token_ids=[[1]], tree=SimpleNamespace(num_tokens=9))
    step = SimpleNamespace(
        model=torch.nn.Linear(1, 1), rollouts=rollouts, args=SimpleNamespace(bf16=False), optimizer=object(),
        old_log_probs=False,
    )  # fmt: skip
    empty = Parity(reference="", differences={}, from_packed={}, limits={}, failures=[], tokens=1, trajectories=1)
    for failures in ([], ["gradients differ"]):
        ran.clear()
        bench = measure._Bench(step, options, lambda text: None)
        for name, stub in {
            "_time_stages": lambda side, timed: side.step(), "_ideals": dict, "_whole_steps": list,
            "_parity": lambda found=failures: replace(empty, failures=found),
        }.items():  # fmt: skip
            monkeypatch.setattr(bench, name, stub)
        found = bench.run()
        assert ran.count(PACKED) == (1 if failures else steps)
        times = [len(found.sides[kind].seconds) for kind in (PACKED, TREE)]
        assert times == ([0, 0] if failures else [max(1, steps - 1), 2])
