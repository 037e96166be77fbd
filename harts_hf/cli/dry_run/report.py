"""A dry run's findings as text."""

import textwrap
from dataclasses import dataclass
from typing import Any

from harts_hf.cli.dry_run.memory import Part
from harts_hf.cli.dry_run.planning import StepPlan
from harts_hf.cli.dry_run.rollouts import PlannedRollouts, rows_per_step
from harts_hf.cli.launching import Launch
from harts_hf.cli.output import printable
from harts_hf.cli.train_arguments import TrainArguments
from harts_hf.cli.trainer_kinds import TRAINERS

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
        data: prompts (of supervised training rows) to train on.
        planned: the rollouts of a step.
        plan: how they are run.
        memory: its parts.
        refused: messages.
        not_checked: what only the training itself can find out.
    """

    recipe: str
    arguments: TrainArguments
    training: Any
    launch: Launch
    model: Any
    counts: tuple[int, int] | None
    data: Any
    planned: PlannedRollouts | None
    plan: StepPlan | None
    memory: list[Part]
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
        lines += ["memory       per process; = sizes of tensors, ~ estimates", *_memory(found.memory)]
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
        return f"{own * launch.num_processes:,} rows ({own} on each process){_of(found.data, 'rows')}"
    prompts = own * launch.num_processes / training.num_generations
    text = (
        f"{own * launch.num_processes:,} rollouts ({own} on each process), of {prompts:g} prompts with "
        f"{training.num_generations} each, at most {training.max_completion_length:,} sampled tokens or so a rollout"
    )
    return text + _of(found.data, "prompts")


def _of(data: Any, what: str) -> str:
    try:
        return "" if data is None else f"; {len(data):,} {what} to train on"
    except TypeError:  # a stream
        return ""


def _plan(plan: StepPlan) -> str:
    schedule, tree = plan.schedule, plan.schedule.tree
    return (
        f"{tree.num_expanded_tokens:,} tokens {plan.said}, {tree.num_tokens:,} of them unique (shared "
        f"{tree.sharing_ratio:.2f}x), in {len(schedule.microbatches)} microbatches, {schedule.execution} execution"
    )


def _time(found: Findings) -> str:
    assert found.plan is not None
    schedule = found.plan.schedule
    text = f"about {schedule.estimated_seconds:.3g} s an update, by the cost model {schedule.cost.source!r}"
    if found.training.tree_cost is None:
        text += " (whatever model and machine this is: `harts bench --fit-cost` and tree_cost give its own)"
    return f"{text}; forwards and backwards alone, without sampling, communication and the optimizer"


def _memory(parts: list[Part]) -> list[str]:
    lines = []
    for part in parts:
        size = "unknown" if part.bytes is None else f"{part.bytes / 1e9:,.3f} GB"
        lines += _line("", f"{'=' if part.exact else '~'} {part.name:<20}{size:>12}  {part.note}")
    known = sum(part.bytes for part in parts if part.bytes is not None)
    lines += _line(
        "", f"~ {'together':<20}{known / 1e9:>9,.3f} GB  without sampling (kept states), temporary tensors, CUDA"
    )
    return lines
