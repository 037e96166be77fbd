"""Limits that fit into memory, and steps that are begun again where it runs out: they train as if planned so."""

import copy
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from support.models import tiny_model
from support.trainer_runs import run_trainer
from support.trees import branching
from transformers import HfArgumentParser

from harts_hf import PlannerConfig, TreeGRPOConfig, TreeGRPOTrainer, patch
from harts_hf.errors import HartsWarning
from harts_hf.modeling.memory import row_bytes
from harts_hf.runtime import WindowPlanner, WindowRun
from harts_hf.runtime.budgets import Budget, DoesNotFitError, fitting_budget
from harts_hf.runtime.ranks import Ranks
from harts_hf.trainers.fitting import FittingUpdate, TreeBudgets
from harts_hf.trainers.memory import bytes_to_come, measured_budget

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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "options"),
    [("F", {}), ("B", {"entropy_coef": 0.01}), ("S", {"entropy_coef": 0.01})],
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
            if not name.endswith(("seconds", "step_time", "out_of_memory")):
                assert after[name] == value, name
    assert [log["tree/out_of_memory"] for log in begun_again[1][:-1]] == [1, 0]
    assert [log["tree/max_tokens_per_microbatch"] for log in begun_again[1][:-1]] == [64, 64]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rows", "options"),
    [("auto", {}), (4096, {}), (200, {}), (128, {"tree_execution": "nested"}), (4096, {"tree_execution": "nested"})],
)
def test_half_of_what_ran(rows, options, tmp_path, monkeypatch):
    """A limit far above what a window has: half of it would be the same plan, which would not fit either. Nor would
    nested windows with as many graphs alive as before."""
    most, stock = [], WindowRun._forward

    def forward(self, position, *args):
        alive = self.window.schedule.memory_counts().graph_rows.max()
        if self._ops[position][0] == "F":
            most.append(alive)
            if alive > 0.6 * most[0]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return stock(self, position, *args)

    monkeypatch.setattr(WindowRun, "_forward", forward)
    with pytest.warns(HartsWarning, match="begun again with"):
        trained(tmp_path, rows, max_steps=1, **options)
    assert most[0] > 100 and len(most) > 2


@pytest.mark.exhaustive
def test_scoring_is_begun_again(tmp_path, monkeypatch):
    """Old log-probs, which TRL asks for before the step: equal but for rounding."""
    planned = trained(tmp_path / "planned", 64, num_iterations=2)
    runs_out(monkeypatch, "S", {2})
    with pytest.warns(HartsWarning, match="what ran is begun again with 64"):
        begun_again = trained(tmp_path / "again", 128, num_iterations=2)
    for name, value in planned[0].items():
        torch.testing.assert_close(begun_again[0][name], value, rtol=0, atol=1e-9)
    assert [log["tree/out_of_memory"] for log in begun_again[1][:-1]] == [1, 0]


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


def test_limits_that_are_tried(monkeypatch):
    """The error is the device's own where nothing is to begin again."""
    runs_out(monkeypatch, "F", {1})
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(TreeBudgets, "begins_again", never, raising=False)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate 2.00 GiB.$"):
        updated(OneTrainer())


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
    """A planner's limits after two halvings."""
    trainer = OneTrainer()
    trainer.args = copy.copy(trainer.args)
    trainer.args.tree_max_graph_tokens = 200
    budgets = TreeBudgets(trainer, Ranks())
    planner = WindowPlanner(config=trainer.args.planner_config())
    for rows, graph in ((96, 100), (64, 150)):  # the second of another model, whose limits were larger
        budgets.shrink(PlannerConfig(max_tokens_per_microbatch=rows, max_graph_tokens=graph))
        config = budgets.applied(planner).config
        assert (config.max_tokens_per_microbatch, config.max_graph_tokens) == (rows, 100)
    assert budgets.metrics() == {"max_tokens_per_microbatch": 64.0, "out_of_memory": 2.0}


def test_limits_as_they_are_given(tmp_path):
    """Numbers, texts of a command line, and "auto", which is the default where a device's memory is not known."""

    def config(**options):
        return TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)

    def limits(args, **fits):
        return tuple(args.limits(Budget(**fits)).values())

    fits = {"max_tokens": 4096, "max_graph_tokens": 4096, "max_handoff_bytes": 10**9}
    assert limits(config()) == (16_384, None, None) and limits(config(), **fits) == (4096, 4096, None)
    assert limits(config(tree_max_tokens_per_microbatch="2_048"), **fits) == (2048, None, None)
    assert limits(config(tree_max_graph_tokens="1000"), **fits) == (1000, 1000, None)
    every = config(tree_max_tokens_per_microbatch=512, tree_max_graph_tokens="auto", tree_max_handoff_bytes="auto")
    assert limits(every, **fits) == (512, 4096, 10**9) and every.asks_for_memory
    assert not config(tree_max_tokens_per_microbatch=512).asks_for_memory
    (parsed,) = HfArgumentParser(TreeGRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--tree_max_tokens_per_microbatch", "256"]
    )
    assert parsed.tree_max_tokens_per_microbatch == 256
    for wrong in (None, "many", 1.5, True, "-64"):
        with pytest.raises(
            ValueError, match="expected tree_max_tokens_per_microbatch to be an integer or 'auto', got"
        ):
            config(tree_max_tokens_per_microbatch=wrong)
    with pytest.raises(ValueError, match="expected max_tokens_per_microbatch of at least 64"):
        config(tree_max_tokens_per_microbatch=1)


class Gpu:
    """A trainer whose device has so many free bytes."""

    def __init__(self, monkeypatch, free, **options):
        for name, value in {
            "mem_get_info": (free - 10**9, 100 * 10**9),
            "memory_reserved": 3 * 10**9,
            "memory_allocated": 2 * 10**9,
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        self.model = tiny_model("qwen3_5_text")
        self.accelerator = SimpleNamespace(
            unwrap_model=lambda model: model, distributed_type=DistributedType.NO, num_processes=1
        )
        self.optimizer = None
        args = {
            "optim": "adamw_torch",
            "bf16": True,
            "tree_offload_handoff": False,
            "gradient_checkpointing": False,
            "gradient_checkpointing_kwargs": None,
        }
        args |= {"gradient_checkpointing_kwargs": None, "tree_fused_modules": "auto"}
        args |= {"device": torch.device("cuda"), "asks_for_memory": True, **options}
        limits = lambda fits: {"max_tokens_per_microbatch": fits.max_tokens}  # noqa: E731
        self.args = SimpleNamespace(**args, limits=limits)


def test_free_memory_is_what_is_left_when_all_has_come(monkeypatch, caplog):
    """Gradients and AdamW's states are taken off while they are not there; so is a margin."""
    gpu = Gpu(monkeypatch, 10 * 10**9 + 5 * 10**8)
    count = sum(parameter.numel() for parameter in gpu.model.parameters())
    assert bytes_to_come(gpu) == (4 + 8) * count
    gpu.model(input_ids=torch.tensor([[1, 2]]), use_cache=False).logits.sum().backward()
    assert bytes_to_come(gpu) == 8 * count
    gpu.args.optim = "unknown"
    assert bytes_to_come(gpu) == 8 * count
    gpu.args.bf16, gpu.optimizer = False, SimpleNamespace(state={"there": 1})
    assert bytes_to_come(gpu) == 0
    rows = row_bytes(gpu.model, checkpointing=False, fused=True)
    expected = fitting_budget(rows, 5e8)
    found = measured_budget(gpu)
    assert found.max_tokens == expected.max_tokens < 65_536 and "10.5 GB free" in found.reason


def test_processes_agree_on_the_smallest(monkeypatch, caplog):
    """Once, and it is logged; a process that finds no room tells the others."""
    gathered = []

    class Two(Ranks):
        count = 2

        def gather(self, *numbers):
            gathered.append(numbers)
            return [numbers, tuple(number // 2 for number in numbers)]

    gpu = Gpu(monkeypatch, 20 * 10**9)
    budgets = TreeBudgets(gpu, Two())
    with caplog.at_level(logging.INFO, logger="harts_hf"):
        found = {budgets.applied(WindowPlanner()).config.max_tokens_per_microbatch for _ in range(3)}
    assert found == {gathered[0][0] // 2} and len(gathered) == 1
    assert [record.message for record in caplog.records] == [
        f"tree_max_tokens_per_microbatch: {gathered[0][0] // 2:,} rows ({measured_budget(gpu).reason})"
    ]
    with pytest.raises(DoesNotFitError, match="beside weights, gradients and optimizer"):
        TreeBudgets(Gpu(monkeypatch, 10**9), Ranks()).applied(WindowPlanner())
