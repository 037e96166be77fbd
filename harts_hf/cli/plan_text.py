"""The text of `harts plan`: the gain first, then a line per group, then what the plan does."""

from typing import Any

from harts_hf.cli.output import printable
from harts_hf.cli.plan_report import Gain, PlanReport
from harts_hf.planner.text import counted

# What each column holds.
COLUMNS = {
    "group": "the trajectories that are compared with one another, such as the rollouts of one prompt",
    "trajectories": "lists of tokens to train: one per rollout, or one per request of an agent to its model",
    "expanded": "tokens of all trajectories, each by itself",
    "unique": "tokens of the tree that they make together: those that are computed",
    "ratio": "expanded / unique: how often a token of the tree is used, on average",
    "depth": "tokens of the longest trajectory",
    "replay": "of the tree's tokens, those that linear layers process once more, as their chunks begin above branches",
    "calls": "how often, at least, the rule of a linear layer has to be called one after another",
    "calls (ends)": "the same, if a call could hand on nothing but the state at its end",
}
MAX_GROUPS = 20
MAX_CELL = 40
NOT_ESTIMATED = (
    "Not in them: time of sampling, rewards, the optimizer, communication; memory of weights, gradients, the optimizer"
)


def format_report(report: PlanReport) -> str:
    """The report as text."""
    plan = report.plan()
    lines = [*gain_lines(report), "", *_table(report), "", *_legend(), ""]
    steps = plan["steps"]
    lines += [
        f"{counted(plan['microbatches'], 'microbatch', 'microbatches')} of at most "
        f"{plan['max_tokens_per_microbatch']:,} tokens"
        + (f" in {steps:,} steps" if steps > 1 else "")
        + f" on {counted(plan['world_size'], 'rank')}, {plan['execution']} execution"
        + (" in the longest step" if steps > 1 else "")
        + (", scored before the loss" if plan["scores"] else ""),
        *(f"limits raised: {words}" for words in report.raised),
        f"tokens: forward {plan['forward_tokens']:,}, backward {plan['backward_tokens']:,}, "
        f"replay {plan['replay_tokens']:,}",
        f"peaks: activations of {plan['peak_graph_tokens']:,} tokens; {plan['peak_handoff_tokens']:,} tokens, "
        f"{gigabytes(plan['peak_handoff_bytes'])}, kept for later microbatches",
        plan["decision"],
        *_world_lines(report.world(), plan["world_size"]),
    ]
    return "\n".join(lines)


# Most often a tiny model: then the calls that sharing takes cost more than the tokens that it saves.
NOT_SHARED = "nothing is shared, although tokens could be: it is estimated not to pay for this model and these limits"


def gain_lines(report: PlanReport) -> list[str]:
    """What trees save over all groups, before and after."""
    gain, total, plan = report.gain, report.total, report.plan()
    groups = counted(len(report.groups), "group")
    steps = f" in {plan['steps']:,} steps" if plan["steps"] > 1 else ""
    rows = [["", "before (one by one)", "after (on trees)", ""], *(list(row) for row in gain_rows(gain))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    after = gain.memory[1]
    kept = f"; after: {gigabytes(after.kept)} of it kept for later microbatches" if after.kept else ""
    return [
        f"{counted(total['trajectories'], 'trajectory', 'trajectories')} of {groups}, trained once{steps}:",
        *(
            f"  {name.ljust(widths[0])}  {old.rjust(widths[1])}  {new.rjust(widths[2])}  {words}".rstrip()
            for name, old, new, words in rows
        ),
        *([f"  {NOT_SHARED}"] if gain.tokens[0] == gain.tokens[1] and total["expanded"] > total["unique"] else []),
        f"  time: for {cost_name(plan['cost_model'])}; before: at least, however trajectories are packed",
        f"  memory: for {report.row_bytes.source} in bfloat16 with activation checkpointing; before: of the longest "
        f"trajectory or a microbatch, whole{kept}",
        f"  {NOT_ESTIMATED[0].lower()}{NOT_ESTIMATED[1:]}",
    ]


def cost_name(source: str) -> str:
    """What a cost model is of, for people."""
    return printable(source.removeprefix("default: ").removesuffix("; handed bytes of the model"))


def gain_rows(gain: Gain) -> list[tuple[str, str, str, str]]:
    """Per quantity its name, before, after, and the factor in words."""
    before, after = (memory.total for memory in gain.memory)
    return [
        ("tokens", f"{gain.tokens[0]:,}", f"{gain.tokens[1]:,}", factor(*gain.tokens, "fewer", "more")),
        ("estimated time", seconds(gain.seconds[0]), seconds(gain.seconds[1]), factor(*gain.seconds, "less", "more")),
        ("estimated memory", gigabytes(before), gigabytes(after), factor(before, after, "less", "more")),
    ]


def factor(before: float, after: float, less: str, more: str) -> str:
    """``19.9x fewer``, ``1.20x more``, or ``the same`` to two digits behind the point."""
    if not before or not after:
        return ""
    ratio = max(before, after) / min(before, after)
    if round(ratio, 2) == 1:
        return "the same"
    return f"{ratio:.{1 if ratio >= 10 else 2}f}x {less if before > after else more}"


def seconds(value: float) -> str:
    """Three digits, and the unit."""
    return f"{_significant(value)} s"


def gigabytes(value: float) -> str:
    """Bytes as GB (10^9 bytes) of three digits."""
    return f"{_significant(value / 1e9)} GB"


def _significant(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(report: PlanReport) -> list[str]:
    rows = report.groups
    shown = rows if len(rows) <= MAX_GROUPS else rows[:MAX_GROUPS]
    table = [list(COLUMNS)] + [_cells(row) for row in [*shown, report.total]]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    if len(rows) > len(shown):
        lines.insert(-1, f"... {counted(len(rows) - len(shown), 'more group')}")
    return lines


def _legend() -> list[str]:
    width = max(map(len, COLUMNS))
    return [f"  {name.ljust(width)}  {words}" for name, words in COLUMNS.items()]


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [_cell(column, row[column]) for column in COLUMNS]
    return [cell if len(cell) <= MAX_CELL else cell[: MAX_CELL - 3] + "..." for cell in cells]


def _cell(column: str, value: Any) -> str:
    if column == "ratio":
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else printable(value)


def _world_lines(world: dict[str, Any], world_size: int) -> list[str]:
    """What all ranks do together in the longest step, a line each with what the word means; nothing on one rank."""
    if world_size == 1:
        return []
    waiting = 1 - world["slowest_seconds"] / world["step_seconds"] if world["step_seconds"] else 0.0
    rows = [
        ("balance", f"{world['balance']:.3f}", "seconds of a rank's own work: mean over ranks / slowest rank"),
        ("waiting", f"{waiting:.1%}", "of the step that even the slowest rank waits: ranks run op by op side by side"),
        ("idle ranks", f"{world['idle_ranks']:,}", "have no microbatch at all"),
        (
            "repeated rows",
            f"{world['repeated_tokens']:,} ({world['tokens_per_unique']:.3f}x)",
            "are computed on a rank although another does too (all computed / unique)",
        ),
        (
            "dummies",
            f"{world['dummies']:,} of {world['ops']:,}",
            "ops run one token, so that ranks run equal strings",
        ),
        (
            "exchanged",
            f"{world['exchanged_bytes'] / 1e6:,.1f} MB",
            "to each rank, if all hold as many tokens: at most ids, a value and a coefficient per unique row",
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name.ljust(widths[0])}  {value.ljust(widths[1])}  {words}" for name, value, words in rows]
    return ["", f"all {world_size:,} ranks together:", *lines]
