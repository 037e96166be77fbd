"""Training on episodes as a plain loop: one row at a time, the unpatched model in float64.

Ranks are a loop too: a step sees the rows of all of them, and no reduction takes place anywhere.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from support.episode_losses import CLIPPED, Row, clipping, divergence, row_loss, token_losses
from support.episodes import EOS, Episode, Generation

MEANS_OF_ROWS = ("grpo", "sapo", "luspo", "dr_grpo", "gmpo")
Scored = tuple[Row, Tensor, Tensor]  # with log-probs and entropies
TINY = 1e-30  # divides sums over no token


def rows_of(episode: Episode, *, mask_truncated: bool = False, weight: str = "sample") -> list[Row]:
    """The rows of an episode: each sampled token is trained once; an episode without a sample is one masked row."""
    if not episode.samples:
        nothing = torch.zeros(1, dtype=torch.float64)
        weight_of_none = 0.0 if episode.is_absent else 1.0
        return [Row(prompt=[EOS], completion=[EOS], mask=nothing, sampled=nothing, weight=weight_of_none)]
    rows, trained = [], set()
    for sample in episode.samples:
        truncated = mask_truncated and sample.completion_ids[-1] not in (0, EOS)
        tokens = tuple(sample.prompt_ids + sample.completion_ids)
        histories = [tokens[: len(sample.prompt_ids) + place + 1] for place in range(len(sample.completion_ids))]
        mask = [
            int(own and history not in trained and not truncated)
            for own, history in zip(sample.env_mask, histories, strict=True)
        ]
        trained |= {history for history, kept in zip(histories, mask, strict=True) if kept}
        rows.append(
            Row(
                prompt=sample.prompt_ids,
                completion=sample.completion_ids,
                mask=torch.tensor(mask, dtype=torch.float64),
                sampled=torch.tensor(sample.logprobs, dtype=torch.float64),
                weight=1 / len(episode.samples) if weight == "episode" else 1.0,
            )
        )
    return rows


def rewards_of(episodes: list[Episode]) -> Tensor:
    """``[n]``; NaN where there was no sample."""
    return torch.tensor([e.reward if e.samples else float("nan") for e in episodes], dtype=torch.float64)


def advantages_of(rewards: Tensor, group: int, scale: str) -> Tensor:
    """``[n]`` group-relative advantages; 0 where there is no reward."""
    found = torch.zeros_like(rewards)
    for start in range(0, len(rewards), group):
        scored = rewards[start : start + group]
        real = scored[~scored.isnan()]
        spread = rewards[~rewards.isnan()] if scale == "batch" else real
        divisor = 1.0 if scale == "none" else spread.std() + 1e-4 if len(spread) > 1 else torch.nan
        found[start : start + group] = (scored - real.mean()) / divisor
    return found.nan_to_num(nan=0.0)


class EpisodeLoop:
    """Follows a training with settings ``args``.

    Args:
        model: unpatched, float64; it is trained by SGD.
        args: the trainer's configuration.
        reference: the model that ``beta`` holds the policy to.
        gmpo: whether the loss is GMPO's.
        off_policy: whether the policy is compared with what the sampler reported, and with itself at generation
            where that is NaN.

    Attributes:
        logs: for each optimizer step its ``loss`` and the metrics of the loss.
        evaluations: for each evaluation its loss.
        windows: for each optimizer step, each slice, each rank: the rows.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *,
        reference: nn.Module | None = None,
        gmpo: bool = False,
        off_policy: bool = False,
    ) -> None:
        self.model, self.args, self.reference, self.off_policy = model, args, reference, off_policy
        self.loss_type = "gmpo" if gmpo else args.loss_type
        self.logs: list[dict[str, float]] = []
        self.evaluations: list[float] = []
        self.windows: list[list[list[list[Row]]]] = []

    def train(
        self,
        generations: Sequence[list[Generation]],
        evaluations: Sequence[list[Generation]] = (),
        accumulation: list[int] | None = None,
    ) -> None:
        """Takes the steps, evaluating where an evaluation was drawn.

        Args:
            generations: for each, what every rank had.
            evaluations: batches likewise; the mean over those after a step is its evaluation.
            accumulation: slices of each optimizer step; by default always as in ``args``.
        """
        args = self.args
        lasts = args.steps_per_generation * args.num_iterations
        if accumulation is None:
            steps = len(generations) * lasts // args.gradient_accumulation_steps
            accumulation = [args.gradient_accumulation_steps] * steps
        drawn: dict[int, list[list[list[Row]]]] = {}
        micro_step = 0
        for step, size in enumerate(accumulation, start=1):
            window, totals = [], []
            for number in range(micro_step, micro_step + size):
                if number // lasts not in drawn:
                    drawn[number // lasts] = self._slices(generations[number // lasts])
                slices = drawn[number // lasts]
                window.append(slices[number % args.steps_per_generation])
                totals.append(self._trained_tokens(slices, size / args.steps_per_generation))
            micro_step += size
            self._step(window, totals)
            due = [batch for batch in evaluations if batch[0].global_step == step]
            if due:
                self.evaluations.append(sum(map(self._evaluate, due)) / len(due))

    def _step(self, window: list[list[list[Row]]], totals: list[tuple[Tensor, Tensor]]) -> None:
        self.windows.append(window)
        scored = [[[(row, *self._score(row)) for row in rank] for rank in one] for one in window]
        loss = self._loss(scored, totals)
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        metrics = [self._metrics([row for rank in one for row in rank]) for one in scored]
        self.logs.append({"loss": loss.item(), **_means(metrics)})
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter -= self.args.learning_rate * gradient

    @torch.no_grad()
    def _evaluate(self, ranks: list[Generation]) -> float:
        batch = self._batch(ranks, self.args.num_generations_eval or self.args.num_generations)
        one = [[row for episode in rank for row in episode] for rank in batch]
        scored = [[(row, *self._score(row)) for row in rank] for rank in one]
        return self._loss([scored], [self._trained_tokens([one], 1.0)]).item()

    def _slices(self, ranks: list[Generation]) -> list[list[list[Row]]]:
        """For each slice, for each rank, its rows: whole episodes in the shuffled order."""
        size = self.args.per_device_train_batch_size
        batch = self._batch(ranks, self.args.num_generations)
        slices: list[list[list[Row]]] = []
        for number in range(self.args.steps_per_generation):
            slices.append([])
            for generation, episodes in zip(ranks, batch, strict=True):
                assert generation.permutation is not None
                taken = generation.permutation[number * size : (number + 1) * size]
                slices[-1].append([row for episode in taken for row in episodes[episode]])
        return slices

    def _batch(self, ranks: list[Generation], group: int) -> list[list[list[Row]]]:
        """For each rank, for each of its episodes, its rows with advantages and log-probs of now."""
        args = self.args
        episodes = [episode for generation in ranks for episode in generation.episodes]
        advantages = iter(advantages_of(rewards_of(episodes), group, args.scale_rewards))
        options = {
            "mask_truncated": args.mask_truncated_completions,
            "weight": getattr(args, "tree_episode_weight", "sample"),
        }
        batch = [[rows_of(episode, **options) for episode in generation.episodes] for generation in ranks]
        # Where a step begins with each generation and takes all of it, the ratio of a step to itself is meant.
        is_fresh = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
        with torch.no_grad():
            for rows in (rows for rank in batch for rows in rank):
                advantage = next(advantages)[None]
                for row in rows:
                    row.advantage = advantage
                    row.old = None if is_fresh and not self.off_policy else self._score(row)[0]
                    if self.off_policy:
                        row.old = torch.where(row.sampled.isnan(), row.old, row.sampled)
                    row.reference = self._score(row, self.reference)[0] if args.beta else None
        return batch

    def _score(self, row: Row, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies ``[C]`` of a row's completion."""
        ids = torch.tensor([row.prompt + row.completion])
        logits = (model or self.model)(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1]
        log_p = torch.log_softmax(logits / self.args.temperature, dim=-1)
        return log_p.gather(1, torch.tensor(row.completion)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    @staticmethod
    def _trained_tokens(slices: list[list[list[Row]]], part: float) -> tuple[Tensor, Tensor]:
        """A part of all slices' and ranks' trained tokens, with and without the weights of their rows."""
        rows = [row for one in slices for rank in one for row in rank]
        return sum(row.weight * row.count for row in rows) * part, sum(row.count for row in rows) * part

    def _loss(self, scored: list[list[list[Scored]]], totals: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The loss of one step.

        Args:
            scored: for each slice, for each rank, rows with log-probs and entropies.
            totals: for each slice what its generation batch has of trained tokens; see :meth:`_trained_tokens`.
        """
        args, kind = self.args, self.loss_type
        parts = [rank for one in scored for rank in one]  # the slices of every rank
        rows = [row for rank in parts for row in rank]
        weights = sum(row.weight for row, _, _ in rows)
        trained = sum(row.weight * row.count for row, _, _ in rows).clamp(min=TINY)
        counts = [sum(row.count for row, _, _ in rank).clamp(min=1) for rank in parts]
        is_even = len({len(rank) for rank in parts}) == 1 and all(row.weight == 1 for row, _, _ in rows)

        def tokens(rank: list[Scored]) -> Tensor:
            return sum(row.weight * row.sum(token_losses(row, log_p, args, kind)) for row, log_p, _ in rank)

        # Besides the policy's loss: what part the entropy of each slice of each rank has in the bonus.
        if kind in MEANS_OF_ROWS:
            loss = sum(row.weight * row_loss(row, log_p, args, kind) for row, log_p, _ in rows) / weights
            shares = [len(rank) / weights for rank in parts]
        elif kind == "bnpo" and is_even:
            loss = sum(tokens(rank) / count for rank, count in zip(parts, counts, strict=True)) / len(parts)
            shares = [1 / len(parts)] * len(parts)
        elif kind == "bnpo":
            loss = tokens(rows) / trained
            shares = [count / trained for count in counts]
        else:
            weighted, plain = zip(*totals, strict=True)
            loss = sum(
                sum(map(tokens, one)) / total.clamp(min=TINY) for one, total in zip(scored, weighted, strict=True)
            )
            factors = [p.clamp(min=TINY) / w.clamp(min=TINY) for p, w in zip(plain, weighted, strict=True)]
            shares = [factor / len(parts) for one, factor in zip(scored, factors, strict=True) for _ in one]
        if getattr(args, "entropy_coef", 0.0) and kind != "gmpo":
            for rank, share, count in zip(parts, shares, counts, strict=True):
                entropy = sum(row.weight * row.sum(entropies) for row, _, entropies in rank)
                loss = loss - args.entropy_coef * share * entropy / count
        return loss

    @torch.no_grad()
    def _metrics(self, rows: list[Scored]) -> dict[str, float]:
        """TRL's metrics of a slice, over the rows of all ranks."""
        args, kind = self.args, self.loss_type

        def mean(values: list[Tensor], by_row: bool = False) -> float:
            """Over trained tokens, or over rows where there is one value a row."""
            if by_row:
                return torch.cat(values).mean().item()
            total = sum(row.sum(value) for value, (row, _, _) in zip(values, rows, strict=True))
            return (total / sum(row.count for row, _, _ in rows).clamp(min=1)).item()

        found = {"entropy": mean([entropies for _, _, entropies in rows])}
        if args.beta:
            found["kl"] = mean([divergence(row, log_p, args, gmpo=kind == "gmpo") for row, log_p, _ in rows])
        by_row = kind == "vespo" or (kind != "gmpo" and args.importance_sampling_level == "sequence")
        clipped = [clipping(row, log_p, args, kind) for row, log_p, _ in rows]
        for name in clipped[0]:
            values = [one[name] for one in clipped]
            found[f"{name}_mean" if kind in CLIPPED else name] = mean(values, by_row)
        if kind in CLIPPED:
            for name, extreme in (("clip_ratio/low", min), ("clip_ratio/high", max)):
                of_rows = [
                    (one[name] if by_row else row.mean(one[name])).item()
                    for one, (row, _, _) in zip(clipped, rows, strict=True)
                    if by_row or row.count
                ]
                found[f"{name}_{extreme.__name__}"] = extreme(of_rows, default=float("nan"))
        return found


def _means(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Over those slices that have a value."""
    values = {name: [one[name] for one in metrics if one[name] == one[name]] for name in metrics[0]}
    return {name: sum(found) / len(found) for name, found in values.items() if found}
