"""From rollouts to what PPO trains on: values, rewards of tokens, advantages and returns, before anything is split."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from harts_hf.modeling.checkpointing import without_checkpointing
from harts_hf.rollouts.episodes import TRUNCATED, Episodes
from harts_hf.rollouts.fields import shortened
from harts_hf.trainers.gae import Estimates, estimate_advantages
from harts_hf.trainers.generated import Generated
from harts_hf.trainers.ppo_policy import (
    ADVANTAGES,
    KL_COEF,
    NUM_TRAINED,
    OLD_LOG_PROBS,
    OLD_VALUES,
    OTHERWISE,
    REFERENCE,
    RETURNS,
    TreeActorCritic,
)
from harts_hf.trainers.ppo_rewards import as_token_rewards, with_final_rewards
from harts_hf.trainers.ppo_rows import IS_TRAINED
from harts_hf.trainers.rows import ROUTES, token_ids
from harts_hf.trainers.weighing import WEIGHTS, trained

# Entry of a batch: [B], the tree of each row on this process.
TREE = "tree"


class TreePPORollouts:
    """Mixin above :class:`~harts_hf.trainers.off_policy.TreeOffPolicy` and TreeEpisodes.

    A rollout function may return, besides what they read, ``turn_rewards`` or ``token_rewards`` (for each row a list)
    and ``truncated`` (for each prompt whether its episode was cut instead of ending by itself: a list, an array or a
    tensor ``[prompts]``; without it, as in TRL, whether its last token is no end token).
    """

    _reads_token_rewards = True
    # What TRL's trainer sets.
    model: Any
    args: Any
    accelerator: Any
    beta: float
    reward_weights: torch.Tensor
    num_generations: int
    num_generations_eval: int
    eos_token_ids: Any
    _tokenizer: Any
    _metrics: Any
    _logs: Any
    # What TreeOffPolicy, TreeEpisodes and TreeHooks set.
    _is_generating: bool
    _adapters_of_policy: Any
    _active_adapters: Any
    _episodes: Episodes | None
    _given_advantages: Any
    _given_rewards: list[list[float]] | None
    _generated: Generated
    _rewards_per_func: torch.Tensor | None
    _tree: TreeActorCritic

    _truncated: list[bool] | None = None
    # During a generation, what was scored: token ids, log-probs, values.
    _scored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _checked(self, output: dict[str, Any], num_prompts: int) -> dict[str, Any]:
        parent: Any = super()
        output = parent._checked(output, num_prompts)
        if output.get("advantages") is not None:
            raise ValueError("expected no 'advantages' from the rollout function (PPO estimates its own), got some")
        if output.get(TRUNCATED) is not None:  # a list, of which reward functions get each row's entry
            output = {**output, TRUNCATED: _truths(output[TRUNCATED], num_prompts)}
        return as_token_rewards(output)

    def _collect(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        parent: Any = super()
        output: dict[str, Any] = parent._collect(prompts, trainer)
        self._truncated = output.get(TRUNCATED)
        return output

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """TreeHooks'. The policy's log-probs of rollouts come with their values, from one forward."""
        parent: Any = super()
        # Not those of a reference model, nor of other rows than the batch's (a probe of the sampler).
        if self._is_generating and model is self.model and self._active_adapters() == self._adapters_of_policy:
            log_probs, values = self._tree.score(input_ids, attention_mask, logits_to_keep)
            self._scored = input_ids, log_probs, values
            return log_probs, None, None
        found: tuple[torch.Tensor, torch.Tensor | None, Any] = parent._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **more
        )
        return found

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch with advantages, returns, old values and log-probs ``[B, C]``, and which tokens are trained.

        The group advantages that TRL makes are not used.
        """
        self._scored = self._truncated = None
        parent: Any = super()
        output: dict[str, Any] = parent._generate_and_score_completions(inputs)
        own, values = self._own_values(output)
        index = np.arange(len(inputs)) if self._episodes is None else self._episodes.index
        final = self._final_rewards(len(inputs))
        kl = None if REFERENCE not in output else own - output[REFERENCE]
        with self._tree.ranks.together():  # values that are no numbers, on one rank
            mask, estimates = self._masked_estimates(output, values, kl, index, final)
        kl_coef = self.beta  # what rewards or losses of these rollouts have; the next line adapts it for later ones
        advantages, num_trained = self._whitened_and_logged(estimates, values, mask, kl, index, final)

        device, dtype = values.device, values.dtype
        output |= {
            ADVANTAGES: torch.from_numpy(advantages).to(device, dtype),
            RETURNS: torch.from_numpy(estimates.returns).to(device, dtype),
            OLD_VALUES: values[:, :-1],
            OLD_LOG_PROBS: output.get(OLD_LOG_PROBS, own),
            IS_TRAINED: torch.from_numpy(mask).to(device),
            NUM_TRAINED: torch.tensor(num_trained, dtype=torch.float64),
            KL_COEF: torch.tensor(kl_coef, dtype=torch.float64),
            TREE: torch.from_numpy(self._trees(index, len(inputs))).to(device),
            OTHERWISE: output["prompt_ids"][0][output["prompt_mask"][0] > 0],
        }
        return output

    def _masked_estimates(
        self,
        output: dict[str, Any],
        values: torch.Tensor,
        kl: torch.Tensor | None,
        index: NDArray[np.int64],
        final: NDArray[np.float64],
    ) -> tuple[NDArray[np.bool_], Estimates]:
        """``[B, C]``, which tokens are trained; and what is estimated of them."""
        mask = trained(output).bool().cpu().numpy() & np.isfinite(final)[index][:, None]
        if WEIGHTS in output:  # rows that stand for no rollout have weight 0
            mask &= output[WEIGHTS].cpu().numpy()[:, None] > 0
        rewards = with_final_rewards(
            self._token_rewards(mask.shape), mask, index, final, of_samples=self.args.episode_end == "sample"
        )
        if kl is not None and self.args.kl_in == "reward":
            rewards -= np.where(mask, self.beta * kl.double().cpu().numpy(), 0.0)
        estimates = self._estimates(output, values, rewards, mask, index)
        largest, limit = np.abs(estimates.returns).max(initial=0.0), _largest_return(values.dtype, int(mask.sum()))
        if not largest < limit:
            raise ValueError(
                f"expected rewards whose sums stay below {limit:.1e} in size (their squares are added up in "
                f"{values.dtype}), got {largest:.1e}"
            )
        return mask, estimates

    def _own_values(self, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's log-probs ``[B, C]`` and values ``[B, C + 1]`` of a batch, scored by now or not.

        The batch gets the routes of that pass, if steps are to take them.
        """
        ids = token_ids(output)
        if self._scored is not None and torch.equal(self._scored[0], ids):
            return self._scored[1:]
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        with (
            torch.no_grad(),
            without_checkpointing(self.model, self.args.activation_checkpointing_kwargs),
            self._tree.routing.generating() as generation,
        ):
            found = self._tree.score(ids, mask, output["completion_ids"].shape[1], output)
        routes = generation.of_batch(output)
        if routes is not None:
            output[ROUTES] = routes
        return found

    def _final_rewards(self, count: int) -> NDArray[np.float64]:
        """``[count]`` weighted rewards of this rank's episodes; NaN for one that no reward function knows."""
        per_func = self._rewards_per_func
        assert per_func is not None
        unscorable = per_func.isnan().all(dim=1)
        total = (per_func.double() * self.reward_weights.to(per_func.device)).nansum(dim=1)
        total = total.masked_fill(unscorable, torch.nan)
        first = self.accelerator.process_index * count
        return total[first : first + count].cpu().numpy()

    def _token_rewards(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        found = np.zeros(shape)
        for number, row in enumerate(self._given_rewards or []):
            found[number, : len(row)] = row
        return found

    def _estimates(
        self,
        output: dict[str, Any],
        values: torch.Tensor,
        rewards: NDArray[np.float64],
        mask: NDArray[np.bool_],
        index: NDArray[np.int64],
    ) -> Estimates:
        states = values.double().cpu().numpy()
        lengths = output["completion_mask"].sum(dim=1).cpu().numpy()
        last_rows = np.cumsum(np.bincount(index)) - 1
        # Of each episode its end; where TRL masks that as truncated, the end of the last row before.
        seen = np.maximum.accumulate(np.where(lengths > 0, np.arange(len(index)), -1))[last_rows]
        leaf = states[seen, lengths[seen]]
        return estimate_advantages(
            states[:, :-1],
            rewards,
            mask,
            index if self.args.episode_end == "chain" else np.arange(len(index)),
            np.where(self._is_continued(last_rows), leaf, 0.0)[index],
            gamma=self.args.gamma,
            lam=self.args.lam,
        )

    def _is_continued(self, last_rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``[n]``, the episodes that were cut where something was still to be earned."""
        if not self.args.bootstrap_truncated:
            return np.zeros(len(last_rows), np.bool_)
        if self._truncated is not None:
            return np.asarray(self._truncated, np.bool_)
        ends = (*self.eos_token_ids, self._tokenizer.pad_token_id)
        return np.array([self._generated.completions[row][-1] not in ends for row in last_rows.tolist()])

    def _trees(self, index: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """``[B]``, which tree (rollouts of one prompt) each row belongs to, from 0."""
        size = self.num_generations if self.model.training else self.num_generations_eval
        group = (self.accelerator.process_index * count + index) // size
        return group - group[0]

    def _whitened_and_logged(
        self,
        estimates: Estimates,
        values: torch.Tensor,
        mask: NDArray[np.bool_],
        kl: torch.Tensor | None,
        index: NDArray[np.int64],
        final: NDArray[np.float64],
    ) -> tuple[NDArray[np.float64], float]:
        """Logs statistics over all ranks, and adapts the KL's weight.

        Returns:
            Advantages ``[B, C]``, whitened if that is asked for; the number of trained tokens of all ranks.
        """
        mode = "train" if self.model.training else "eval"
        states = values[:, :-1].double().cpu().numpy()[mask]
        given = {
            "advantages": estimates.advantages[mask],
            "returns": estimates.returns[mask],
            "values": states,
            "errors": estimates.returns[mask] - states,
        }
        sums = {"tokens": float(mask.sum()), "episodes": float(np.isfinite(final).sum())}
        for name, numbers in given.items():
            sums |= {name: float(numbers.sum()), f"{name}_squared": float((numbers**2).sum())}
        if kl is not None:
            sums["kl"] = float(kl.double().cpu().numpy()[mask].sum())
        total, _ = self._tree.ranks.totals(sums, {})
        count, log = max(total["tokens"], 1.0), self._metrics[mode]
        mean = {name: total[name] / count for name in given}
        variance = {name: max(total[f"{name}_squared"] / count - mean[name] ** 2, 0.0) for name in given}
        for name in ("advantages", "returns", "values"):
            log[f"{name}/mean"].append(mean[name])
            log[f"{name}/std"].append(math.sqrt(variance[name]))
        # Of equal returns nothing is left to explain but rounding.
        says = variance["returns"] > 1e-12 * max(1.0, mean["returns"] ** 2)
        log["explained_variance"].append(1 - variance["errors"] / variance["returns"] if says else math.nan)
        if kl is not None:
            log["kl_coef"].append(self.beta)
            log["kl_per_episode"].append(total["kl"] / max(total["episodes"], 1.0))
            if mode == "train":
                self.beta = self._adapted(self.beta, log["kl_per_episode"][-1], total["episodes"])
        if (self.num_generations if mode == "train" else self.num_generations_eval) == 1:
            log.pop("frac_reward_zero_std", None)  # of groups of one
        advantages = estimates.advantages
        if self.args.whiten_advantages:
            advantages = np.where(
                mask, (advantages - mean["advantages"]) / math.sqrt(variance["advantages"] + 1e-8), 0.0
            )
        self._show_advantages(advantages, mask, index, len(final))
        return advantages, total["tokens"]

    def _adapted(self, coefficient: float, found: float, episodes: float) -> float:
        """Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2."""
        target = self.args.kl_target
        if target is None:
            return coefficient
        error = min(max(found / target - 1, -0.2), 0.2)
        # Of more episodes than the horizon a step may not be larger: the coefficient would become negative.
        return coefficient * (1 + error * min(1.0, episodes / self.args.kl_horizon))

    def _show_advantages(
        self, advantages: NDArray[np.float64], mask: NDArray[np.bool_], index: NDArray[np.int64], count: int
    ) -> None:
        """In TRL's table of completions, the mean of each episode instead of its group advantage."""
        tokens = np.bincount(index, weights=mask.sum(axis=1), minlength=count)
        sums = np.bincount(index, weights=(advantages * mask).sum(axis=1), minlength=count)
        means = torch.from_numpy(sums / np.maximum(tokens, 1)).float().to(self.accelerator.device)
        shown = self.accelerator.gather(means).tolist()
        table = self._logs["advantages"]
        for _ in shown[: len(table)]:
            table.pop()
        table.extend(shown)


def _largest_return(dtype: torch.dtype, num_tokens: int) -> float:
    """Up to which as many squares have a sum."""
    return math.sqrt(torch.finfo(dtype).max / max(num_tokens, 1))


def _truths(truncated: Any, count: int) -> list[bool]:
    """``[count]``, of a list, an array or a tensor of true and false."""
    found = truncated.tolist() if isinstance(truncated, torch.Tensor | np.ndarray) else truncated
    is_list = isinstance(found, list | tuple) and len(found) == count
    if not is_list or any(value not in (True, False) for value in found):
        raise ValueError(
            f"expected {TRUNCATED!r} to be a list of {count} of true and false, one per prompt, got "
            f"{shortened(truncated)}"
        )
    return list(map(bool, found))
