"""Memory that runs out in a step: the step is begun again with half the rows, and trains as if planned so."""

import copy
import warnings

import pytest
import torch
from support.models import tiny_model
from support.trainer_runs import run_trainer
from support.trees import branching

from harts_hf import PlannerConfig, TreeGRPOConfig, TreeGRPOTrainer, patch
from harts_hf.errors import HartsWarning
from harts_hf.runtime import WindowPlanner, WindowRun
from harts_hf.runtime.ranks import Ranks
from harts_hf.trainers.fitting import FittingUpdate, TreeBudgets

OPTIONS = {"tree_sharing": "always", "max_steps": 2}


def runs_out(monkeypatch, kind, calls):
    """Plants errors in the numbered calls of all forwards ("S", "F") or backwards ("B") of windows."""
    seen = []

    def planted(method, find):
        stock = getattr(WindowRun, method)

        def run(self, position, *args):
            if find(self._ops[position][0]):
                seen.append(position)
                if len(seen) in calls:
                    if kind == "B":
                        stock(self, position, *args)  # gradients are there already
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return stock(self, position, *args)

        monkeypatch.setattr(WindowRun, method, run)

    planted("_backward" if kind == "B" else "_forward", lambda found: found == kind)
    return seen


def trained(folder, rows, **options):
    """Parameters and log history."""
    options = {**OPTIONS, "tree_max_tokens_per_microbatch": rows, **options}
    return run_trainer(TreeGRPOTrainer, TreeGRPOConfig, folder, **options)[:2]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("F", {}), ("B", {}), ("B", {"beta": 0.1, "entropy_coef": 0.01}), ("S", {"num_iterations": 2})],
)
def test_the_step_is_that_of_half_the_rows(kind, options, tmp_path, monkeypatch):
    """Bit by bit: parameters, losses and every metric of TRL's, in a step of which backwards had run already."""
    planned = trained(tmp_path / "planned", 64, **options)
    seen = runs_out(monkeypatch, kind, {2})
    with pytest.warns(HartsWarning, match="memory ran out with 128 rows a microbatch .*begun again with 64"):
        begun_again = trained(tmp_path / "again", 128, **options)
    assert len(seen) > 2
    for name, value in planned[0].items():
        assert torch.equal(value, begun_again[0][name]), name
    for before, after in zip(planned[1][:-1], begun_again[1][:-1], strict=True):
        for name, value in before.items():
            if "seconds" not in name and name != "tree/out_of_memory":
                assert after[name] == value, name
    assert [log["tree/out_of_memory"] for log in begun_again[1][:-1]] == [1, 0]
    assert [log["tree/max_tokens_per_microbatch"] for log in begun_again[1][:-1]] == [64, 64]


def test_once_in_a_step(tmp_path, monkeypatch):
    """Where half the rows do not fit either, the error says what was tried and what helps."""
    runs_out(monkeypatch, "F", set(range(1, 99)))
    words = "Tried to allocate(.|\n)*64 rows a microbatch after it had run out with 128 in the same step(.|\n)*offload"
    with pytest.warns(HartsWarning, match="begun again"), pytest.raises(torch.OutOfMemoryError, match=words):
        trained(tmp_path, 128)


class OneTrainer:
    """What an update may change of a trainer."""

    def __init__(self):
        self.args = TreeGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, tree_max_tokens_per_microbatch=128)
        self._metrics = {"train": {"loss": [1.0]}}
        self.coefficient = 1.0


class Rows:
    """A slice of trajectories."""

    def __init__(self, rows):
        self.rows = rows

    def trajectories(self):
        """As they are."""
        return self.rows

    def stand_in(self):
        """Is not asked for."""

    def index(self, paths):
        """Nothing is padded: one row after another."""
        return {"log_prob": torch.cat([torch.from_numpy(path[1:].copy()) for path in paths]).numpy()}


def updated(trainer, *, ranks=None, rows=128):
    """Gradients and report of an update that adds to gradients which are there; its loss counts what it is asked."""
    model = patch(tiny_model("qwen3_5_text", dtype=torch.float64))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number / 7)
    ranks = ranks or Ranks()
    budgets = TreeBudgets(trainer, ranks)
    config = PlannerConfig(max_tokens_per_microbatch=rows, sharing="always", execution="replay")
    planner = WindowPlanner(config=config)
    update = FittingUpdate(model, planner, budgets=budgets, trainer=trainer, ranks=ranks)

    def loss(one, values):
        trainer._metrics["train"]["loss"].append(2.0)
        trainer.coefficient = trainer.coefficient / 2
        trainer.more = True
        return (values["log_prob"] ** 2).sum() * trainer.coefficient

    report = update.run([branching(65, vocab=32)], Rows, loss, names=("log_prob",))
    return [p.grad for p in model.parameters()], report, budgets


def test_all_that_an_update_changed_is_brought_back(monkeypatch):
    """Gradients from before, metrics, and attributes that the loss sets."""
    planned = OneTrainer()
    expected, *_ = updated(planned, rows=64)
    runs_out(monkeypatch, "B", {2})
    again = OneTrainer()
    with pytest.warns(HartsWarning, match="begun again"):
        found, report, budgets = updated(again)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert report.window.schedule.config.max_tokens_per_microbatch == 64 and budgets.halvings == 1
    assert again._metrics == planned._metrics == {"train": {"loss": [1.0, 2.0]}}
    assert (again.coefficient, again.more) == (planned.coefficient, planned.more) == (0.5, True)


def test_where_it_cannot_be_begun_again(monkeypatch):
    """Processes that share parameters, and microbatches that cannot be halved: the error has words that help."""

    class Sharing(Ranks):
        count, can_begin_again = 2, False

        def ran_out(self, error):
            return False

    runs_out(monkeypatch, "F", {1, 2})
    with pytest.raises(torch.OutOfMemoryError, match=r"share parameters(.|\n)*tree_max_tokens_per_microbatch=64"):
        sharing = Sharing()
        sharing.count = 1
        updated(OneTrainer(), ranks=sharing)
    with pytest.raises(torch.OutOfMemoryError, match="which cannot be halved"):
        updated(OneTrainer(), rows=64)


def test_other_errors_are_as_they_were(monkeypatch):
    """Nothing is begun again for them."""
    stock = WindowRun._forward
    calls = []

    def failing(self, *args):
        calls.append(1)
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(WindowRun, "_forward", failing)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="device-side assert"):
        warnings.simplefilter("error", HartsWarning)
        updated(OneTrainer())
    assert len(calls) == 1 and stock is not WindowRun._forward


def test_copies_are_not_kept():
    """A planner's limits after two halvings, and again no smaller than a chunk."""
    trainer = OneTrainer()
    trainer.args = copy.copy(trainer.args)
    trainer.args.tree_max_graph_tokens = 200
    budgets = TreeBudgets(trainer, Ranks())
    planner = WindowPlanner(config=trainer.args.planner_config())
    budgets.halvings = 1
    config = budgets.applied(planner).config
    assert (config.max_tokens_per_microbatch, config.max_graph_tokens) == (64, 100)
    budgets.halvings = 9
    assert budgets.applied(planner).config.max_tokens_per_microbatch == 64
    assert budgets.metrics() == {"max_tokens_per_microbatch": 64.0, "out_of_memory": 9.0}
