"""A dry run of supervised training: its rows instead of rollouts."""

import itertools
from typing import Any

from harts_hf.cli.data import TrainPrompts
from harts_hf.cli.dry_run.rollouts import PlannedRollouts
from harts_hf.cli.dry_run.run import DryRun
from harts_hf.cli.supervised import check_rows_named, eval_rows, make_supervised, rows_tokenizer, train_rows
from harts_hf.trainers.texts import LabelledRows
from harts_hf.tree import RolloutTree

# Of the first steps, the one with the most tokens is planned.
STEPS = 20


class SupervisedDryRun(DryRun):
    """The data are read and tokenised, and the largest of the first optimizer steps is planned."""

    def _tokenizer(self) -> None:
        self.parts.tokenizer = rows_tokenizer(self.arguments, self.training, self.model)

    def _source(self) -> None:
        check_rows_named(self.arguments)

    def _data(self) -> None:
        if self.parts.tokenizer is not None and not self.parts.refused:
            self.parts.train = TrainPrompts.of(train_rows(self.arguments, self.parts.tokenizer))
            self.parts.evaluation = eval_rows(self.arguments, self.training)

    def _trainer(self) -> None:
        if self.parts.train.dataset is not None:
            self._make_trainer()

    def _trainer_of(self, policy: Any) -> Any:
        parts = self.parts
        return make_supervised(
            self.arguments,
            self.training,
            self.model,
            parts.tokenizer,
            policy=policy,
            train_dataset=parts.train.dataset,
            eval_dataset=parts.evaluation,
        )

    def _planned(self) -> PlannedRollouts:
        accumulation, count = self.training.gradient_accumulation_steps, self.launch.num_processes
        batches = iter(self.parts.trainer.get_train_dataloader())
        best: list[RolloutTree] = []
        for _ in range(STEPS):
            step = [list(itertools.islice(batches, accumulation)) for _ in range(count)]
            trees = [self._tree(batches_of_one) for batches_of_one in step if batches_of_one]
            if _num_tokens(trees) > _num_tokens(best):
                best = trees
        trees = sorted(best, key=lambda tree: -tree.num_tokens)
        return PlannedRollouts(
            trees=trees[:1],
            others=trees[1:] or trees,
            said=f"rows of the data set: of the first {STEPS} optimizer steps, that with the most tokens",
        )

    def _tree(self, batches: list[dict[str, Any]]) -> RolloutTree:
        """What a process computes in a step."""
        keeps_all = self.parts.trainer.tree_policy.counts_all_tokens
        rows = [LabelledRows.from_batch(batch, keeps_all=keeps_all) for batch in batches]
        trajectories = [trajectory for one in rows for trajectory in one.trajectories()]
        return RolloutTree.from_trajectories(trajectories or [rows[0].stand_in()])

    def _may_skip_scoring(self) -> bool:
        skips: bool = self.training.loss_type == "nll"
        return skips


def _num_tokens(trees: list[RolloutTree]) -> int:
    return sum(tree.num_tokens for tree in trees)
