"""A dry run's findings as text."""

import textwrap
from dataclasses import dataclass
from typing import Any

from harts_hf.cli.dry_run.memory import Memory
from harts_hf.cli.dry_run.planning import StepPlan
from harts_hf.cli.dry_run.rollouts import PlannedRollouts, rows_per_step
from harts_hf.cli.launching import Launch
from harts_hf.cli.output import printable
from harts_hf.cli.train_arguments import TrainArguments
from harts_hf.cli.trainer_kinds import TRAINERS
from harts_hf.planner import Schedule
from harts_hf.planner.text import counted
from harts_hf.runtime.budgets import MARGIN, Budget

WIDTH, INDENT = 120, 13


@dataclass(frozen=True, eq=False, kw_only=True)
class Findings:
    """What a dry run has found; None where it did not come so far.

    Attributes:
        recipe: its file.
        arguments: the recipe's own.
        training: the trainer's.
        launch: processes and backend.
        model: the policy, adapters included, on the meta device.
        counts: its parameters: all, and those that are trained.
        num_prompts: to train on, before any is repeated (of supervised training rows); None where nobody knows.
        planned: the rollouts of a step.
        plan: how they are run.
        memory: what the training takes; None if that is not known.
        budget: what "auto" stands for; None where no limit is "auto".
        capacity: bytes of a device that were given; None if none were.
        refused: messages.
        not_checked: what only the training itself can find out.
    """

    recipe: str
    arguments: TrainArguments
    training: Any
    launch: Launch
    model: Any
    counts: tuple[int, int] | None
    num_prompts: int | None
    planned: PlannedRollouts | None
    plan: StepPlan | None
    memory: Memory | None
    budget: Budget | None
    capacity: float | None
    refused: list[str]
    not_checked: list[str]


def format_findings(found: Findings) -> str:
    """The text of `harts train --dry-run`."""
    lines = [f"dry run of {printable(found.recipe)}: nothing is trained, no weights are read"]
    lines += _line("trainer", _trainer(found))
    lines += _line("processes", f"{found.launch.num_processes}, {found.launch.backend} ({found.launch.said_by})")
    if found.counts is not None:
        lines += _line("model", _model(found))
    lines += _line("step", _step(found))
    if found.planned is not None and found.plan is not None:
        lines += _line("rollouts", found.planned.said)
        lines += _line("plan", _plan(found.plan))
        lines += _line("time", _time(found))
        if found.budget is not None:
            lines += _line("limits", _limits(found.budget, found.training.limits(found.budget)))
        if found.memory is not None:
            lines += ["memory       per process; = sizes of tensors, ~ estimates"]
            lines += _memory(found.memory, found.plan.schedule, found.capacity)
    for text in found.not_checked:
        lines += _line("not checked", text)
    for text in found.refused:
        lines += _line("REFUSED", printable(text))
    lines += _line("verdict", f"{len(found.refused)} refused" if found.refused else "nothing is refused")
    return "\n".join(lines)


def _line(name: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{name if not index else '':<{INDENT}}{line}" for index, line in enumerate(wrapped)]


def _trainer(found: Findings) -> str:
    arguments, training = found.arguments, found.training
    source = arguments.source
    if TRAINERS[arguments.trainer].is_supervised:
        return f"{arguments.trainer}; rows from {printable(arguments.dataset_name or arguments.recorded_rollouts)}"
    origin = f"{source} {printable(getattr(arguments, source))}" if source else "TRL's own generation"
    sampler = f"vLLM ({training.vllm_mode})" if training.use_vllm else "the trainer's own model"
    if source == "recorded_rollouts":
        sampler = "nobody: they are recorded"
    return f"{arguments.trainer}; rollouts from {origin}, sampled by {sampler}"


def _model(found: Findings) -> str:
    assert found.counts is not None
    total, trained = found.counts
    config = found.model.config.get_text_config()
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in found.model.parameters()})
    text = f"{config.model_type}, {total:,} parameters in {' and '.join(dtypes)}, {trained:,} of them trained"
    return f"{text} ({100 * trained / total:.2g} %: adapters)" if hasattr(found.model, "peft_config") else text


def _step(found: Findings) -> str:
    training, launch = found.training, found.launch
    own = rows_per_step(training)
    if TRAINERS[found.arguments.trainer].is_supervised:
        return f"{own * launch.num_processes:,} rows ({own} on each process){_number_of('row', found)}"
    prompts = own * launch.num_processes / training.num_generations
    text = (
        f"{own * launch.num_processes:,} rollouts ({own} on each process), of {prompts:g} prompts with "
        f"{training.num_generations} each, at most {training.max_completion_length:,} sampled tokens or so a rollout"
    )
    return text + _number_of("prompt", found)


def _number_of(what: str, found: Findings) -> str:
    return "" if found.num_prompts is None else f"; {counted(found.num_prompts, what)} to train on"


def _plan(plan: StepPlan) -> str:
    schedule, tree = plan.schedule, plan.schedule.tree
    microbatches = counted(len(schedule.microbatches), "microbatch", "microbatches")
    return (
        f"{tree.num_expanded_tokens:,} tokens {plan.said}, {tree.num_tokens:,} of them unique (shared "
        f"{tree.sharing_ratio:.2f}x), in {microbatches}, {schedule.execution} execution"
    )


def _time(found: Findings) -> str:
    assert found.plan is not None
    schedule = found.plan.schedule
    text = f"about {schedule.estimated_seconds:.3g} s an update, by the cost model {schedule.cost.source!r}"
    if found.training.tree_cost is None:
        text += " (whatever model and machine this is: `harts bench --fit-cost` and tree_cost give its own)"
    return f"{text}; forwards and backwards alone, without sampling, communication and the optimizer"


def _limits(budget: Budget, limits: dict[str, Any]) -> str:
    said = [f"{limits['max_tokens_per_microbatch']:,} rows a microbatch"]
    graph, handed = limits["max_graph_tokens"], limits["max_handoff_bytes"]
    said += [] if graph is None else [f"graphs of {graph:,} rows"]
    said += [] if handed is None else [f"{handed / 1e9:,.2f} GB of handed states"]
    return f"auto: {', '.join(said)} ({budget.reason})"


def _memory(memory: Memory, schedule: Schedule, capacity: float | None) -> list[str]:
    lines = []
    for part in memory.parts(schedule):
        size = "unknown" if part.bytes is None else f"{part.bytes / 1e9:,.3f} GB"
        lines += _line("", f"{'=' if part.exact else '~'} {part.name:<20}{size:>12}  {part.note}")
    peak = memory.peak(schedule)
    note = "at once at most, without sampling (kept states), temporary tensors, CUDA"
    lines += _line("", f"~ {'together':<20}{peak / 1e9:>9,.3f} GB  {note}")
    if capacity is not None:
        fits = "fits into" if peak <= capacity * (1 - MARGIN) else "MAY NOT FIT into"
        lines += _line("", f"~ {fits} {capacity / 1e9:,.1f} GB, {MARGIN:.0%} of which are left alone")
    return lines
