"""The rollouts that a dry run plans: those of a file, or made up from a recipe's numbers."""

import itertools
from dataclasses import dataclass
from typing import Any

from harts_hf.cli.train_arguments import TrainArguments
from harts_hf.planner.text import counted
from harts_hf.rollouts.files import read_rollouts
from harts_hf.tree import RolloutTree

# Prompts are taken to be this long where neither environment nor data set says.
PROMPT_TOKENS = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedRollouts:
    """Trees of one optimizer step.

    Attributes:
        trees: those of the process with the most work, one per group.
        others: what further processes have, over and over again.
        said: what they are, for people.
    """

    trees: list[RolloutTree]
    others: list[RolloutTree]
    said: str

    def of_processes(self, count: int) -> list[RolloutTree]:
        """The trees of so many processes."""
        further = itertools.islice(itertools.cycle(self.others), len(self.trees) * (count - 1))
        return [*self.trees, *further]


def file_rollouts(path: str, training: Any, tokenizer: Any, options: dict[str, Any]) -> PlannedRollouts:
    """As many groups of a file as one process trains in a step, those with the most tokens.

    Args:
        path: of the rollout file.
        training: the trainer's arguments.
        tokenizer: for conversations.
        options: how the file is read: ``format``, ``samples_per``, ``group_key``.

    Raises:
        ValueError: a file that cannot be read.
    """
    groups = read_rollouts(path, tokenizer, **options)
    trees = sorted((group.tree for group in groups), key=lambda tree: -tree.num_tokens)
    count = min(len(trees), -(-rows_per_step(training) // training.num_generations))
    return PlannedRollouts(
        trees=trees[:count],
        others=trees[count:] or trees,
        said=f"{path}: {count} of {counted(len(trees), 'group')}, those with the most tokens, on one process",
    )


def made_up_rollouts(arguments: TrainArguments, training: Any, prompt_tokens: int | None) -> PlannedRollouts:
    """Trees as large as the recipe allows: every turn and every completion as long as it may be.

    Args:
        arguments: the recipe's.
        training: the trainer's arguments.
        prompt_tokens: of the longest prompt, if known.
    """
    rows, size = rows_per_step(training), training.num_generations
    whole, rest = divmod(rows, size)
    trees = [_tree(arguments, training, prompt_tokens or PROMPT_TOKENS, size)] * whole
    if rest:  # a group that is split over processes or steps
        trees.append(_star(prompt_tokens or PROMPT_TOKENS, training.max_completion_length, rest))
    prompt = f"prompts of {prompt_tokens or PROMPT_TOKENS:,} tokens{'' if prompt_tokens else ' (assumed)'}"
    return PlannedRollouts(
        trees=trees, others=trees, said=f"made up, as large as the recipe allows: {prompt}, {_shape(arguments)}"
    )


def rows_per_step(training: Any) -> int:
    """Trajectories that one process trains in an optimizer step."""
    return training.per_device_train_batch_size * training.gradient_accumulation_steps


def _forks(arguments: TrainArguments, size: int) -> dict[int, int]:
    """Continuations before each turn, by the turn."""
    if arguments.source not in ("environment", "environment_factory"):
        return {0: size}
    turns = arguments.max_turns
    if arguments.fork_policy == "turn":
        branching = arguments.branching or [size]
        return dict(zip(arguments.fork_turns or range(len(branching)), branching, strict=False))
    roots = arguments.fork_roots or (1 if arguments.fork_policy == "budget" else max(1, size // 2))
    if arguments.fork_policy == "none" or roots >= size or turns < 2:
        return {0: size}
    return {0: roots, turns // 2: -(-size // roots)}


def _shape(arguments: TrainArguments) -> str:
    source = arguments.source
    if source in ("agent", "agent_command"):
        return "one sample per episode (agents may make more of them: --dry_run_rollouts FILE plans what one did)"
    if source in ("environment", "environment_factory"):
        if arguments.fork_policy in ("entropy", "budget"):
            policy = f"fork_policy {arguments.fork_policy} decides later"
            return f"{arguments.max_turns} turns, forked in the middle ({policy})"
        return f"{arguments.max_turns} turns, forked as the recipe says"
    return "completions that share their prompt only"


def _tree(arguments: TrainArguments, training: Any, prompt: int, size: int) -> RolloutTree:
    forks = _forks(arguments, size)
    turns = max(arguments.max_turns, 1 + max(forks)) if len(forks) > 1 else 1
    longest = max(turns, training.max_completion_length)
    parent, length, level = [-1], [prompt], [0]
    for turn in range(turns):
        tokens = longest * (turn + 1) // turns - longest * turn // turns
        count = min(size, len(level) * forks.get(turn, 1))
        nodes = sorted(level[index % len(level)] for index in range(count))
        level = list(range(len(parent), len(parent) + len(nodes)))
        parent, length = parent + nodes, length + [tokens] * len(nodes)
    return RolloutTree.from_shape(parent, length, level)


def _star(prompt: int, completion: int, leaves: int) -> RolloutTree:
    return RolloutTree.from_shape([-1] + [0] * leaves, [prompt] + [max(1, completion)] * leaves, range(1, leaves + 1))
