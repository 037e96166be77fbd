"""Per-token advantages: from a rollout function, or per turn from the rewards below each turn in the tree."""

from typing import Any

import numpy as np
import torch

from harts_hf.rollouts.credit import tree_advantages
from harts_hf.rollouts.episodes import Episodes
from harts_hf.trainers.generated import Generated
from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.weighing import trained


class TreeAdvantages:
    """Mixin above a GRPO trainer and :class:`TreeEpisodes` that lets ``(B, T)`` advantages reach TRL's batch.

    TRL hands extra keys of a rollout function to the reward functions only, so an ``advantages`` key (one list of
    numbers per completion token and row) is put aside there and attached to the batch here.
    """

    # Whether the trainer's loss knows advantages of shape (B, T).
    accepts_token_advantages = True
    # What TRL's trainer sets.
    model: Any
    args: Any
    accelerator: Any
    rollout_func: Any
    reward_weights: torch.Tensor
    scale_rewards: Any
    num_generations: Any
    num_generations_eval: Any
    # What TreeEpisodes and TreeHooks set.
    _episodes: Episodes | None
    _given_advantages: list[list[float]] | None
    _generated: Generated
    _rewards_per_func: torch.Tensor | None
    _tree: TreePolicy

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch, with ``advantages`` of shape (B, T) where they are given per token or per turn.

        Raises:
            ValueError: advantages of another length than the completions, or not finite.
            OtherRankError: those of another process.
        """
        parent: Any = super()
        output: dict[str, Any] = parent._generate_and_score_completions(inputs)
        with self._tree.ranks.together():
            self._give_advantages(output)
        return output

    def _give_advantages(self, output: dict[str, Any]) -> None:
        """Replaces the advantages of a batch, and checks them."""
        per_token: list[Any] | None = self._given_advantages
        if per_token is None and getattr(self.args, "tree_credit", "trajectory") != "trajectory":
            per_token = self._turn_advantages(output)
        if per_token is not None:
            padded = _pad_like(per_token, output["completion_ids"], output["completion_mask"])
            output["advantages"] = padded if self.accepts_token_advantages else self._of_rows(padded, output)
        finite = torch.isfinite(output["advantages"])
        if not finite.all():
            row = int((~finite).nonzero()[0, 0])
            raise ValueError(f"expected finite advantages, got {output['advantages'][row].tolist()} in row {row}")

    def _turn_advantages(self, output: dict[str, Any]) -> list[np.ndarray]:
        mode = "train" if self.model.training else "eval"
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        assert self._rewards_per_func is not None
        weights = self.reward_weights.to(self._rewards_per_func.device)
        unscorable = self._rewards_per_func.isnan().all(dim=1)  # TRL leaves such rows out of every mean
        total = (self._rewards_per_func * weights).nansum(dim=1).masked_fill(unscorable, torch.nan)
        rows = len(output["completion_ids"])
        index = np.arange(rows) if self._episodes is None else self._episodes.index
        rewards = self._local(total, int(index[-1]) + 1, group_size).cpu().numpy()
        # As they were generated: rows that TRL leaves out as truncated still say what their histories came to.
        trajectories = [
            np.concatenate(pair) for pair in zip(self._generated.prompts, self._generated.completions, strict=True)
        ]
        prompt_lengths = [len(prompt) for prompt in self._generated.prompts]
        by_policy = trained(output).cpu().numpy()
        spans = [
            turn_spans(mask[: len(tokens) - length], length)
            for mask, tokens, length in zip(by_policy, trajectories, prompt_lengths, strict=True)
        ]
        # Rows that stand for no rollout say nothing of the others.
        present = range(rows) if self._episodes is None else np.flatnonzero(~self._episodes.is_absent[index]).tolist()
        advantages = tree_advantages(
            self.args.tree_credit,
            [trajectories[row] for row in present],
            [spans[row] for row in present],
            rewards[index[present]],
            index[present] // group_size,
            scale=self.scale_rewards,
            episodes=index[present],
        )
        found = [np.zeros(len(tokens) - length) for tokens, length in zip(trajectories, prompt_lengths, strict=True)]
        for row, of_row in zip(present, advantages, strict=True):
            found[row] = of_row[prompt_lengths[row] :]
        return found

    def _of_rows(self, padded: torch.Tensor, output: dict[str, Any]) -> torch.Tensor:
        """``[B]``, the advantage that the trained tokens of a row have in common; 0 where none is trained."""
        mask = trained(output).bool()
        low = padded.masked_fill(~mask, torch.inf).amin(dim=1)
        high = padded.masked_fill(~mask, -torch.inf).amax(dim=1)
        if bool((low < high).any()):
            raise ValueError(f"expected one advantage per trajectory: {type(self).__name__} knows none per token")
        return torch.where(mask.any(dim=1), high, 0.0)

    def _local(self, rewards: torch.Tensor, rows: int, group_size: int) -> torch.Tensor:
        """This rank's part of rewards that TRL gathered.

        Raises:
            ValueError: groups that lie on several ranks, or a scale over all ranks: turns are compared on one rank.
        """
        if len(rewards) == rows:
            return rewards
        if rows % group_size or self.scale_rewards == "batch":
            raise ValueError(
                f"expected whole groups on each rank and scale_rewards 'group' or 'none' with "
                f"tree_credit={self.args.tree_credit!r} on several ranks, got {rows} rows a rank for groups of "
                f"{group_size} and scale_rewards={self.scale_rewards!r}"
            )
        first = self.accelerator.process_index * rows
        return rewards[first : first + rows]


def turn_spans(mask: np.ndarray, offset: int) -> list[tuple[int, int]]:
    """Half-open spans, moved by ``offset``, of the runs of ones in ``mask`` [L]: the policy's turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != 0, [0]])))
    return [(int(start) + offset, int(stop) + offset) for start, stop in edges.reshape(-1, 2)]


def _pad_like(rows: list[Any], completion_ids: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """Per-token numbers in the shape of the completions; a row may be given for masked-out tokens too."""
    padded = torch.zeros(completion_ids.shape, dtype=torch.float32)
    if len(rows) != len(padded):
        raise ValueError(f"expected advantages for {len(padded)} rows, got {len(rows)}")
    for number, row in enumerate(rows):
        values = torch.as_tensor(np.asarray(row, dtype=np.float32))
        real = int(completion_mask[number].sum())
        if values.ndim != 1 or len(values) < real or len(values) > padded.shape[1]:
            raise ValueError(
                f"expected {real} advantages (one per completion token) in row {number}, got shape "
                f"{tuple(values.shape)}"
            )
        padded[number, : len(values)] = values
    return padded.to(completion_ids.device)
