"""TreeUpdate by itself: the gradient of any loss of named values, scored, unscored or probed, is the stock model's."""

import numpy as np
import pytest
import torch
from support.models import VOCAB, tiny_model
from support.oracle import assert_gradients_close, float64_everywhere, gradients, trajectory_log_probs
from support.parity import GRADIENT_TOLERANCE
from support.trees import branching, random_trajectories
from torch import nn

from harts_hf import PlannerConfig, patch, unpatch
from harts_hf.modeling import RowValue, add_output
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.update import TreeUpdate


class Rows:
    """Trajectories as the rows of a slice; log-probs of every token but the first, values of every token."""

    def __init__(self, rows):
        self.rows = rows

    def trajectories(self):
        """All of them."""
        return list(self.rows)

    def stand_in(self):
        """There always are some."""
        raise AssertionError

    def index(self, paths):
        """``[B, L]``, -1 after the end of a row."""
        table = np.full((len(paths), max(map(len, paths))), -1)
        for row, path in zip(table, paths, strict=True):
            row[: len(path)] = path
        scored = table.copy()
        scored[:, 0] = -1
        return {"log_prob": scored, "entropy": scored, "value": table}


def slices():
    """Two ragged slices that share prefixes with one another."""
    first = branching(65, vocab=VOCAB)
    return [first[:4], first[4:] + random_trajectories(3, vocab=VOCAB, count=4)]


def model_with_critic():
    """float64, with a value head."""
    model = tiny_model("qwen3_5_text", dtype=torch.float64)
    model.critic = nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
    patch(model)
    add_output(model, RowValue(name="value", module="critic"))
    return model


def of_each_row(model, row):
    """Log-probs ``[L - 1]`` and values ``[L]`` of a trajectory on the unpatched model."""
    hidden = model.model(input_ids=torch.from_numpy(row)[None], use_cache=False).last_hidden_state[0]
    return trajectory_log_probs(model, row), model.critic(hidden)[:, 0]


def supervised(rows, values):
    """The negative mean log-prob, by the slice's tokens."""
    return -values["log_prob"].sum() / sum(len(row) - 1 for row in rows)


def actor_critic(rows, values):
    """Squares of both: a loss whose derivatives depend on values."""
    return (values["log_prob"] ** 2).sum() / 50 + (values["value"] - 0.3)[:, ::2].square().sum() / 20


def expected_supervised(model, rows):
    return -sum(of_each_row(model, row)[0].sum() for row in rows) / sum(len(row) - 1 for row in rows)


def expected_actor_critic(model, rows):
    total = 0.0
    longest = max(map(len, rows))
    for row in rows:
        log_probs, values = of_each_row(model, row)
        padded = torch.cat([values, values.new_zeros(longest - len(row))])
        total = total + (log_probs**2).sum() / 50 + (padded - 0.3)[::2].square().sum() / 20
    return total


@pytest.mark.essential("always", "probe-fails")
@pytest.mark.parametrize(
    ("loss", "expected", "options", "needed_by"),
    [
        (supervised, expected_supervised, {"names": ("log_prob",), "unscored": "always"}, None),
        (supervised, expected_supervised, {"unscored": "probe"}, None),
        (supervised, expected_supervised, {"unscored": "never", "reason": "asked"}, "asked"),
        (actor_critic, expected_actor_critic, {"names": ("log_prob", "value")}, "loss"),
        (
            actor_critic,
            expected_actor_critic,
            {"names": ("log_prob", "value"), "unscored": "probe"},
            "loss_of_log_probs",
        ),
    ],
    ids=["always", "probe", "never", "values", "probe-fails"],
)
def test_losses(loss, expected, options, needed_by):
    """Gradient and loss are the unpatched model's; scoring is skipped where that is declared and holds."""
    model, parts = model_with_critic(), slices()
    planner = WindowPlanner(config=PlannerConfig(max_tokens_per_microbatch=64, sharing="always"))
    calls = []

    def counting(rows, values):
        calls.append(torch.is_grad_enabled())
        return loss(rows, values)

    with float64_everywhere(model):
        report = TreeUpdate(model, planner).run(parts, Rows, counting, **options)
        got = gradients(model)
        model.zero_grad()
        unpatch(model)
        total = sum(expected(model, part) for part in parts)
        total.backward()
    assert report.scoring_needed_by == needed_by and report.scoring_skipped == (needed_by is None)
    assert report.loss.item() == pytest.approx(total.item(), rel=1e-12)
    assert len(report.window.batches) > 3
    assert_gradients_close(got, gradients(model), GRADIENT_TOLERANCE)
    assert calls[-1] == (options.get("unscored") != "probe" or needed_by is not None)


def test_score():
    """Values of a slice in the shape of its index, zeros where nothing is asked for."""
    model, (part, _) = model_with_critic(), slices()
    with float64_everywhere(model):
        found = TreeUpdate(model, WindowPlanner()).score(Rows(part), ("log_prob", "value"))
        unpatch(model)
        for number, row in enumerate(part):
            log_probs, values = of_each_row(model, row)
            torch.testing.assert_close(found["log_prob"][number, 1 : len(row)], log_probs, rtol=0, atol=1e-10)
            torch.testing.assert_close(found["value"][number, : len(row)], values, rtol=0, atol=1e-10)
            assert not found["value"][number, len(row) :].any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("execution", ["nested", "replay", "keep"])
def test_values_that_are_known(execution):
    """A loss on the values of an earlier pass, which had the rows in other batches: the unpatched model's gradient,
    one call of each loss, and no forward but for the backwards and the states of trunks."""
    model, parts = model_with_critic(), slices()
    rows = [row for part in parts for row in part]
    names = ("log_prob", "value")
    config = PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution=execution)
    calls = []

    def loss(rows, values):
        calls.append(len(rows))
        return actor_critic(rows, values)

    with float64_everywhere(model):
        update = TreeUpdate(model, WindowPlanner(config=config))
        _, kept = update.scored(Rows(rows[::-1]), names)
        report = update.run(parts, Rows, loss, names=names, kept=[kept])
        got = gradients(model)
        model.zero_grad()
        unpatch(model)
        sum(expected_actor_critic(model, part) for part in parts).backward()
    assert report.scoring_kept and report.scoring_skipped and report.scoring_needed_by is None
    assert report.recompute_difference < 1e-12
    assert len(report.window.batches) > 3 and calls == [len(part) for part in parts]
    assert_gradients_close(got, gradients(model), GRADIENT_TOLERANCE)


@pytest.mark.parametrize("sharing", ["always", "never"])
def test_values_found_are_the_pass_s(sharing):
    """To the bit, of each trajectory, whichever passes scored it, in which order, and what else they scored."""
    model, parts = model_with_critic(), slices()
    planner = WindowPlanner(config=PlannerConfig(max_tokens_per_microbatch=256, sharing=sharing))
    update, (first, second) = TreeUpdate(model, planner), parts
    others = [np.append(second[0], 1), second[-1][:-1], *random_trajectories(9, vocab=VOCAB, count=2)]
    passes = {
        "one": [[*second[::-1], *first]],
        "a part of one": [[*others, *first, *second]],
        "two": [[*others, *second[::-1]], [*first[1:], first[0], *others]],
    }
    names = ("log_prob", "value")
    for case, groups in passes.items():
        scored = [update.scored(Rows(rows), names) for rows in groups]
        known = [
            {row.tobytes(): {k: values[k][number, : len(row)] for k in names} for number, row in enumerate(rows)}
            for rows, (values, _) in zip(groups, scored, strict=True)
        ]
        seen = []

        def loss(rows, values, seen=seen, known=known, case=case):
            of_pass = next(one for one in known if all(row.tobytes() in one for row in rows))
            for number, row in enumerate(rows):
                for name in names:
                    expected = of_pass[row.tobytes()][name]
                    assert torch.equal(values[name][number, : len(row)], expected), (case, name, number)
                    assert not values[name][number, len(row) :].any()
            seen.append(len(rows))
            return actor_critic(rows, values)

        report = update.run(parts, Rows, loss, names=names, kept=[kept for _, kept in scored])
        assert report.scoring_kept and seen == list(map(len, parts)), case


def test_values_that_are_not_known():
    """All or none: a trajectory that was not scored, or a name that was not, is scored with all others."""
    model, parts = model_with_critic(), slices()
    update = TreeUpdate(model, WindowPlanner())
    _, kept = update.scored(Rows(parts[0]), ("log_prob", "entropy"))
    for asked in ([*parts[0], parts[0][0][:-1]], [parts[0][0][1:]], [np.append(parts[0][0], 1)]):
        # Of a trajectory, not of its beginning, its end, or one that goes on.
        assert not update.run([asked], Rows, supervised, kept=[kept]).scoring_kept
    assert not update.run(parts, Rows, supervised, kept=[kept]).scoring_kept
    names = ("log_prob", "value")
    assert not update.run(parts[:1], Rows, actor_critic, names=names, kept=[kept]).scoring_kept
    assert update.run(parts[:1], Rows, supervised, names=("log_prob",), kept=[kept]).scoring_kept


def test_a_loss_that_reaches_the_model():
    """Its gradient by parameters would be lost."""
    model, parts = model_with_critic(), slices()

    def reaching(rows, values):
        return supervised(rows, values) + model.critic.weight.sum()

    with pytest.raises(ValueError, match=r"also reaches a trainable tensor of shape \[1, 32\]"):
        TreeUpdate(model, WindowPlanner()).run(parts, Rows, reaching)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (supervised, {"names": ("log_prob", "entropy"), "parts": []}, "at least one slice, got none"),
        (lambda rows, values: torch.zeros(()), {}, "depends on none of them"),
        (lambda rows, values: values["log_prob"], {}, r"one number, in a tensor, got a tensor of shape \[4, \d+\]"),
        (lambda rows, values: 1.0, {}, "one number, in a tensor, got float"),
        (supervised, {"rows_of": "without values", "names": ("log_prob", "value")}, "let index.. place value"),
        (supervised, {"rows_of": "without values", "names": ("log_prob", "value"), "unscored": "always"}, "got value"),
        (supervised, {"unscored": "Never"}, "unscored to be one of always, never, probe, got .* and 'Never'"),
        (supervised, {"names": "log_prob"}, "a tuple of names .* got 'log_prob'"),
        (actor_critic, {"names": ("log_prob", "value"), "unscored": "always"}, "derivatives by log_prob depend on no"),
    ],
    ids=[
        "no-slices",
        "constant-loss",
        "vector-loss",
        "float-loss",
        "no-index",
        "no-index-unscored",
        "typo",
        "one-name",
        "not-always",
    ],
)
def test_what_cannot_be_run(loss, options, message):
    """Each is a ValueError that says what was expected."""
    options = dict(options)
    parts = options.pop("parts", slices())

    class WithoutValues(Rows):
        def index(self, paths):
            found = super().index(paths)
            del found["value"]
            return found

    rows_of = WithoutValues if options.pop("rows_of", None) else Rows
    with pytest.raises(ValueError, match=message):
        planner = WindowPlanner(config=PlannerConfig(max_tokens_per_microbatch=64, sharing="always"))
        TreeUpdate(model_with_critic(), planner).run(parts, rows_of, loss, **options)
