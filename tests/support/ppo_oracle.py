"""PPO as a plain loop: one trajectory at a time, the unpatched model and a value head beside it, in float64.

Ranks are a loop too: a step sees the rows of all of them, and no reduction takes place anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harts_hf.trainers.ppo_minibatches import deal_trees
from support.episode_oracle import rows_of
from support.episodes import EOS, Episode, Generation


@dataclass(kw_only=True)
class State:
    """A trajectory: what a row of an episode is made of, and what was found out after the rollouts.

    Attributes:
        prompt: token ids.
        completion: ``C`` token ids.
        mask: ``[C]`` 1 where a token is trained.
        rewards: ``[C]`` of tokens.
        chain: rows with equal numbers follow one another.
        tree: its number among the trees of its rank.
        rank: the process that has it.
    """

    prompt: list[int]
    completion: list[int]
    mask: Tensor
    rewards: Tensor
    chain: int
    tree: int
    rank: int
    old: Tensor | None = None
    old_values: Tensor | None = None  # [C + 1]
    reference: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None


class PPOLoop:
    """Follows a training with settings ``args``.

    Args:
        model: unpatched, float64; trained by SGD, as the head is.
        head: ``weight [1, D]``, ``bias [1]``.
        args: the trainer's configuration.
        critic: the model whose hidden states the head reads; the policy by default.
        reference: the model that the KL divergence is from.
        token_rewards: gives the ``[C]`` rewards of each row of an episode, on top of the episode's own.
        is_truncated: whether an episode was cut; by default whether its last token is no end token.

    Attributes:
        logs: for each optimizer step some of what the trainer logs.
    """

    def __init__(
        self,
        model: nn.Module,
        head: tuple[Tensor, Tensor],
        args: Any,
        *,
        critic: nn.Module | None = None,
        reference: nn.Module | None = None,
        token_rewards: Callable[[Episode], list[list[float]]] | None = None,
        is_truncated: Callable[[Episode], bool] | None = None,
    ) -> None:
        self.model, self.args, self.critic, self.reference = model, args, critic or model, reference
        self.weight, self.bias = (value.detach().clone().double().requires_grad_() for value in head)
        self.token_rewards, self.is_truncated = token_rewards, is_truncated
        self._apart = critic is not None
        self.beta = args.beta
        self.logs: list[dict[str, float]] = []

    def train(self, generations: list[list[Generation]], steps: int) -> None:
        """Takes optimizer steps on generations, each what every rank had."""
        for ranks in generations:
            states, kl_coef = self._prepare(ranks), self.beta
            total = sum(state.mask.sum() for state in states)
            self._adapt(states, sum(len(e.samples) > 0 for g in ranks for e in g.episodes))
            count = self.args.num_minibatches
            for _ in range(self.args.num_iterations):
                begin = len(self.logs)
                dealt = [
                    deal_trees(1 + max(s.tree for s in states if s.rank == rank), count, (self.args.seed, begin, rank))
                    for rank in range(len(ranks))
                ]
                for number in range(count):
                    if len(self.logs) < steps:
                        chosen = [s for s in states if s.tree in dealt[s.rank][number]]
                        self._step(chosen, total / count, kl_coef)

    def parameters(self) -> list[Tensor]:
        """What is trained."""
        models = [self.model, self.critic] if self._apart else [self.model]
        return [p for model in models for p in model.parameters() if p.requires_grad] + [self.weight, self.bias]

    def _step(self, states: list[State], num_tokens: Tensor, kl_coef: float) -> None:
        args, warm_up = self.args, len(self.logs) < self.args.value_warmup_steps
        loss, parts = torch.zeros((), dtype=torch.float64), {"policy_loss": 0.0, "value_loss": 0.0, "entropy": 0.0}
        for state in states:
            log_p, entropy, values = (found.unbind() for found in self._run(state, detach=warm_up))
            for t in state.mask.nonzero()[:, 0].tolist():
                ratio, advantage = (log_p[t] - state.old[t]).exp(), state.advantages[t]
                high = args.epsilon if args.epsilon_high is None else args.epsilon_high
                clipped = torch.clamp(ratio, 1 - args.epsilon, 1 + high)
                policy = -torch.min(ratio * advantage, clipped * advantage)
                objective = policy - args.entropy_coef * entropy[t]
                if state.reference is not None and args.kl_in == "loss":
                    gap = state.reference[t] - log_p[t]
                    by = ratio if args.use_bias_correction_kl else 1.0
                    objective = objective + kl_coef * by * (gap.exp() - gap - 1)
                error = (values[t] - state.returns[t]) ** 2
                if args.cliprange_value is not None:
                    low, up = (state.old_values[t] + sign * args.cliprange_value for sign in (-1, 1))
                    error = torch.max(error, (torch.clamp(values[t], low, up) - state.returns[t]) ** 2)
                loss = loss + (0.0 if warm_up else 1.0) * objective + args.vf_coef * error / 2
                parts["policy_loss"] += policy.item()
                parts["value_loss"] += error.item() / 2
                parts["entropy"] += entropy[t].item()
        count = sum(state.mask.sum().item() for state in states)
        loss = loss / num_tokens
        self.logs.append({"loss": loss.item(), **{name: value / count for name, value in parts.items()}})
        parameters = self.parameters()
        valued = {id(p) for p in [self.weight, self.bias, *(self.critic.parameters() if self._apart else ())]}
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    of_values = args.value_learning_rate if id(parameter) in valued else None
                    parameter -= (of_values or args.learning_rate) * gradient

    def _run(self, state: State, *, detach: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies ``[C]`` of the completion, values ``[C + 1]``."""
        log_p, entropy, hidden = self._log_probs(self.model, state)
        if self._apart:
            hidden = self._log_probs(self.critic, state)[2]
        elif detach:
            hidden = hidden.detach()
        return log_p, entropy, hidden @ self.weight[0] + self.bias[0]

    def _log_probs(self, model: nn.Module, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies ``[C]``, and ``[C + 1, D]`` the hidden states that the head gets."""
        ids = torch.tensor([state.prompt + state.completion])
        inner = getattr(model, "get_base_model", lambda: model)()  # adapters are a part of its layers
        hidden = inner.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(state.prompt) - 1 :]
        log_p = torch.log_softmax(inner.get_output_embeddings()(hidden[:-1]) / self.args.temperature, dim=-1)
        of_tokens = log_p.gather(1, torch.tensor(state.completion)[:, None])[:, 0]
        return of_tokens, -(log_p.exp() * log_p).sum(-1), hidden

    @torch.no_grad()
    def _prepare(self, ranks: list[Generation]) -> list[State]:
        states, ends, size = [], {}, self.args.num_generations
        chain = 0
        for rank, generation in enumerate(ranks):
            for number, episode in enumerate(generation.episodes):
                if not episode.samples:
                    continue
                rows = rows_of(episode, mask_truncated=self.args.mask_truncated_completions)
                own = (self.token_rewards or (lambda e: [[0.0] * len(s.completion_ids) for s in e.samples]))(episode)
                of_episode = [
                    State(
                        prompt=row.prompt,
                        completion=row.completion,
                        mask=row.mask,
                        rewards=torch.tensor(rewards, dtype=torch.float64) * row.mask,
                        chain=0,
                        tree=number // size,
                        rank=rank,
                    )
                    for row, rewards in zip(rows, own, strict=True)
                ]
                cut = (self.is_truncated or (lambda e: e.samples[-1].completion_ids[-1] not in (0, EOS)))(episode)
                cut = cut and self.args.bootstrap_truncated
                chain = self._end(of_episode, episode, chain, ends, cut)
                states += of_episode
        for state in states:
            state.old, _, state.old_values = self._run(state)
            if self.reference is not None:
                state.reference = self._log_probs(self.reference, state)[0]
                if self.args.kl_in == "reward":
                    state.rewards = state.rewards - self.beta * (state.old - state.reference) * state.mask
        self._estimate(states, ends)
        return states

    def _end(self, rows: list[State], episode: Episode, chain: int, ends: dict[int, State], cut: bool) -> int:
        """Puts the episode's reward (TRL holds it in float32) where it is earned, and notes where values go on.

        Returns:
            The next free chain.
        """
        trained = [row for row in rows if row.mask.any()]
        # What is masked as truncated is not looked at, so values go on from what is before it.
        kept = [row for row in rows if not self.args.mask_truncated_completions or row.completion[-1] in (0, EOS)]
        chained = self.args.episode_end == "chain"
        later = 0.0
        for row in reversed(trained):
            place = row.mask.nonzero()[-1, 0]
            of_row = row.rewards.sum().item()
            if row is trained[-1] or not chained:
                row.rewards[place] += np.float32(episode.reward) + (0.0 if chained else later)
            later += of_row
        for row in rows:
            row.chain = chain
            if cut and kept:
                ends[chain] = kept[-1]
            chain += not chained
        return chain + chained

    def _estimate(self, states: list[State], ends: dict[int, State]) -> None:
        """Generalised advantages by a loop backwards over each chain, whitened over all trained tokens."""
        args = self.args
        for state in states:
            state.advantages, state.returns = torch.zeros_like(state.mask), torch.zeros_like(state.mask)
        for chain in {state.chain for state in states}:
            end = ends.get(chain)
            following = end.old_values[-1].item() if end is not None else 0.0
            advantage = 0.0
            for state in reversed([state for state in states if state.chain == chain]):
                for t in reversed(state.mask.nonzero()[:, 0].tolist()):
                    value = state.old_values[t].item()
                    delta = state.rewards[t].item() + args.gamma * following - value
                    advantage = delta + args.gamma * args.lam * advantage
                    state.advantages[t], state.returns[t] = advantage, advantage + value
                    following = value
        found = torch.cat([state.advantages[state.mask > 0] for state in states])
        if args.whiten_advantages:
            for state in states:
                white = (state.advantages - found.mean()) / (found.var(correction=0) + 1e-8).sqrt()
                state.advantages = white * state.mask

    @torch.no_grad()
    def _adapt(self, states: list[State], episodes: int) -> None:
        if self.args.kl_target is None:
            return
        total = sum(((state.old - state.reference) * state.mask).sum().item() for state in states)
        error = min(max(total / episodes / self.args.kl_target - 1, -0.2), 0.2)
        self.beta *= 1 + error * episodes / self.args.kl_horizon
