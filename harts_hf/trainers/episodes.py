"""Episodes in a TRL trainer: rollouts of one or more samples, each rewarded once.

TRL's trainer has one row per rollout from end to end. Here it still samples, rewards and compares rollouts that way,
each standing for itself with its last sample; the other rows join where TRL pads them into a batch, and stay with
their episode when it shuffles and splits the batch.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import nn
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from harts_hf.rollouts.arrays import ReadArrays
from harts_hf.rollouts.checks import check_rollouts
from harts_hf.rollouts.episodes import (
    ABSENT,
    OFF_POLICY,
    RESERVED_KEYS,
    ROUTED_EXPERTS,
    TOKEN_REWARDS,
    TURN_REWARDS,
    Episodes,
    read_episodes,
    without_absent,
)
from harts_hf.rollouts.recorded_rollouts import RecordedRollouts
from harts_hf.trainers.decoding import decoding, reads_texts, stock_decoding
from harts_hf.trainers.gathering import gathering_ragged
from harts_hf.trainers.generated import Generated
from harts_hf.trainers.grouping import grouped, ungrouped
from harts_hf.trainers.lengths import log_lengths
from harts_hf.trainers.off_policy import has_unknown
from harts_hf.trainers.origins import is_from
from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.replacing import replaced
from harts_hf.trainers.rewarding import guarded
from harts_hf.trainers.weighing import UNITS, WEIGHTED_ITEMS, WEIGHTS, StepTotals, Unit, trained, weighed_loss


class _State(NamedTuple):
    """What a rank's rollout function returned: its error, whether it set two keys, unknown log-probs, absent rows."""

    error: str
    episode: bool
    off_policy: bool
    unknown: bool
    absent: bool


class TreeEpisodes:
    """Mixin above a GRPO trainer: a rollout function may return ``episode``, and any number of rows per prompt.

    Without that key everything is as in TRL; with a row per episode it comes to the same, bit for bit.

    Attributes:
        rollout_inputs: the dataset rows of the prompts that the rollout function is given, all columns: TRL gives it
            the prompts alone.
    """

    # What TRL's trainer sets.
    model: Any
    args: Any
    accelerator: Any
    rollout_func: Any
    use_vllm: bool
    vllm_importance_sampling_correction: bool
    processing_class: Any
    tools: Any
    eos_token_ids: Any
    mask_truncated_completions: bool
    _tokenizer: Any
    loss_type: str
    _calculate_rewards: Any
    reward_funcs: Any
    # What TreeHooks sets.
    _tree: TreePolicy

    # Over what the trainer's loss is a mean; None where its loss type says so.
    _loss_is_mean_over: Unit | None = None
    # Whether the trainer's advantages are made of rewards per turn or token.
    _reads_token_rewards = False

    def __init__(self, model: Any, reward_funcs: Any, args: Any = None, *more: Any, **kwargs: Any) -> None:
        recorded = kwargs.get("rollout_func")
        if isinstance(recorded, RecordedRollouts) and getattr(args, "use_vllm", False):
            recorded.check(args)  # refuses before TRL looks for a server
        self._off_policy = self._has_unknown = False  # of the running generation
        self._episodes: Episodes | None = None
        self._has_samples = False  # whether the rollout function says which rows are an episode
        self._rows: dict[str, Any] = {}  # of the episodes, what the rollout function returned
        self._given_advantages: list[list[float]] | None = None
        self._given_rewards: list[list[float]] | None = None
        self._generated: Generated  # of all rows
        self._arrays = ReadArrays()  # of the running generation
        self._rewards_per_func: torch.Tensor | None = None
        self.rollout_inputs: list[dict[str, Any]] = []
        super().__init__(model, reward_funcs, args, *more, **kwargs)  # type: ignore[call-arg]
        if isinstance(self.rollout_func, RecordedRollouts):
            self.rollout_func.check_trainer(self)
        # Outside whatever a subclass makes of it.
        self._calculates_rewards = self._calculate_rewards
        self._calculate_rewards = functools.partial(self._rewards_of, self._calculate_rewards)

    def _collect(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What the rollout function returns, checked; of each episode its last sample."""
        output: dict[str, Any] = {}
        error: Exception | None = None
        try:
            with stock_decoding(self.processing_class):
                output = self._user_rollout_func(prompts, trainer)
            output = self._checked(output, len(prompts))
        except Exception as found:
            error = found
        state = _state(output, error)
        self._has_unknown, has_absent = self._agree(state, error)
        with self._tree.ranks.together():
            output = dict(output)
            self._off_policy = bool(output.pop(OFF_POLICY, False))
            self._has_samples = state.episode
            if has_absent and not state.episode and not self.tools:  # TRL calls tools for rows, not for episodes
                output = without_absent(output)
            if output.get("episode") is not None:
                ends = (*self.eos_token_ids, self._tokenizer.pad_token_id) if self.mask_truncated_completions else None
                output, self._episodes = read_episodes(output, len(prompts), self.eos_token_ids[0], whole_ends=ends)
                self._rows = output
            routed = output.pop(ROUTED_EXPERTS, None)
            self._tree.routing.take(routed, output["prompt_ids"], output["completion_ids"])
        self._given_advantages = output.pop("advantages", None)
        self._given_rewards = output.pop(TOKEN_REWARDS, None)
        if self._episodes is None:
            return output
        last = self._episodes.last_rows
        keys = [key for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask") if output.get(key) is not None]
        return {**output, **{key: [output[key][row] for row in last] for key in keys}}

    def _checked(self, output: dict[str, Any], num_prompts: int) -> dict[str, Any]:
        check_rollouts(output, num_prompts, vocab_size=self._tree.planner.vocab_size, arrays=self._arrays)
        unread = [key for key in (TURN_REWARDS, TOKEN_REWARDS) if output.get(key) is not None]
        if unread and not self._reads_token_rewards:
            raise ValueError(
                f"expected a TreePPOTrainer for {unread[0]!r}, got a {type(self).__name__}, whose advantages are made "
                "of rewards per episode"
            )
        if output.get(OFF_POLICY) and self.use_vllm and self.vllm_importance_sampling_correction:
            raise ValueError(
                f"expected vllm_importance_sampling_correction=False with {OFF_POLICY!r} (the ratio is to the "
                "rollouts' own log-probs already), got True"
            )
        return output

    def _agree(self, state: _State, error: Exception | None) -> tuple[bool, bool]:
        """Raises on every rank what one rank's rollout function raised, before a collective that it would miss.

        Returns:
            Whether any rank has unknown log-probs, and whether any has absent rows.
        """
        states: list[_State] = [state] if self._tree.ranks.count == 1 else gather_object([state])
        if error is not None:
            raise error
        for rank, of_rank in enumerate(states):
            if of_rank.error:
                raise ValueError(
                    f"expected rollouts from every process, got an error on process {rank}: {of_rank.error}"
                )
        for key in ("episode", OFF_POLICY):
            with_key = [rank for rank, of_rank in enumerate(states) if getattr(of_rank, key)]
            if 0 < len(with_key) < len(states):
                raise ValueError(
                    f"expected the key {key!r} from the rollout functions of all {len(states)} processes or of none, "
                    f"got it from {with_key}"
                )
        return any(of_rank.unknown for of_rank in states), any(of_rank.absent for of_rank in states)

    def _generate(self, prompts: list[Any]) -> Any:
        if self.rollout_func is not None and self.rollout_func != self._collect:
            self._user_rollout_func, self.rollout_func = self.rollout_func, self._collect
        if self.tools:  # which TRL calls in between, and adds what they say
            return self._generate_episodes(prompts, super())
        with decoding(self, self._arrays, reads=reads_texts(self, self._calculates_rewards)):
            return self._generate_episodes(prompts, super())

    def _generate_episodes(self, prompts: list[Any], parent: Any) -> Any:
        generated = parent._generate(prompts)
        if self._episodes is None:
            return generated
        if self.tools:  # TRL has just called them for the last samples
            raise ValueError("expected rollouts without the key 'episode' where the trainer has tools, got it")
        _, _, _, completions, _, extra_fields, *images = generated
        rows = self._rows
        log_lengths(self, rows, self._episodes)
        if self._has_samples:
            extra_fields = {**extra_fields, "samples": self._samples(prompts, completions)}
        tokens = rows["prompt_ids"], rows["completion_ids"]
        return (*tokens, rows.get("env_mask"), completions, rows["logprobs"], extra_fields, *images)

    def _samples(self, prompts: list[Any], completions: list[Any]) -> list[list[Any]]:
        """For each episode the completions of its samples, in the form in which TRL gives the last one."""
        assert self._episodes is not None
        completion_ids = self._rows["completion_ids"]
        decoded: list[Any]
        if not is_conversational({"prompt": prompts[0]}):
            decoded = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        elif any(getattr(self._tokenizer, name, None) for name in ("response_template", "response_schema")):
            pairs = zip(self._rows["prompt_ids"], completion_ids, strict=True)
            decoded = [[parse_response(self._tokenizer, ids, prefix=prompt)] for prompt, ids in pairs]
        else:
            texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            decoded = [[{"role": "assistant", "content": text}] for text in texts]
        samples = self._episodes.of_each(decoded)
        return [
            [] if is_empty else [*earlier[:-1], last]
            for earlier, last, is_empty in zip(samples, completions, self._episodes.is_empty, strict=True)
        ]

    def _rewards_of(
        self, calculate: Any, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """TRL's rewards, or a subclass's, one per episode.

        Raises:
            ValueError: an infinite reward: TRL would turn what follows from it into huge finite advantages.
            OtherRankError: a reward function failed on another process.
        """
        episodes, completion_ids_list = self._episodes, self._generated.completion_lists
        if episodes is not None:
            completion_ids_list = [completion_ids_list[row] for row in episodes.last_rows]
        rewards: torch.Tensor
        errors: list[Exception] = []
        with replaced(self, "reward_funcs", guarded(self.reward_funcs, errors)):
            rewards = calculate(inputs, prompts, completions, completion_ids_list)
        with self._tree.ranks.together():
            if errors:
                raise errors[0]
        if episodes is not None:
            is_empty = torch.as_tensor(episodes.is_empty, device=rewards.device)
            rewards = rewards.masked_fill(self.accelerator.gather(is_empty)[:, None], torch.nan)
        infinite = rewards.isinf()
        if infinite.any():
            row, function = infinite.nonzero()[0].tolist()
            raise ValueError(
                f"expected finite rewards, got {rewards[row, function]} from function {function} in row {row}"
            )
        self._rewards_per_func = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch; of episodes, a row per sample, with its episode's advantage and its own weight."""
        self._episodes = self._given_advantages = self._given_rewards = None
        self._off_policy = self._has_unknown = False
        columns = set(inputs[0])
        self.rollout_inputs = inputs
        parent: Any = super()
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        self._arrays = ReadArrays()
        # Between what a rollout function returns and TRL's tensors nobody changes a list, unless it is told to.
        is_ours = is_from(self._generate, "harts_hf") and not self.tools
        arrays = self._arrays if is_ours else ReadArrays()
        self._generated = Generated(self._generate, corrects=corrects, arrays=arrays)
        with replaced(self, "_generate", self._generated):
            output: dict[str, Any] = parent._generate_and_score_completions(inputs)
        self._generated.add_log_probs(output)
        self._arrays = ReadArrays()
        episodes = self._episodes
        if episodes is None:
            return output
        taken = columns.intersection(RESERVED_KEYS)
        if taken and self._has_samples:
            raise ValueError(
                f"expected a dataset without the column {', '.join(taken)} where rollouts have the key 'episode' "
                "(reward functions get the samples by that name), got one: rename it"
            )
        device = output["advantages"].device
        weights = torch.from_numpy(1.0 - episodes.is_absent[episodes.index])
        if self.args.tree_episode_weight == "episode":
            weights /= torch.from_numpy(episodes.counts[episodes.index])
        output["advantages"] = output["advantages"][torch.from_numpy(episodes.index).to(device)]
        output["episode"] = torch.from_numpy(episodes.index).to(device)
        output[WEIGHTS] = weights.to(device)
        items = (trained(output).sum(dim=1) * output[WEIGHTS]).sum()
        output[WEIGHTED_ITEMS] = self.accelerator.gather(items[None]).sum()
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's, which shuffles and splits a batch by its first dimension: episodes are kept together meanwhile."""
        parent: Any = super()
        if not self.model.training:
            return parent._prepare_inputs(generation_batch)
        score = self._generate_and_score_completions
        with replaced(self, "_generate_and_score_completions", lambda inputs: grouped(score(inputs))):
            return ungrouped(parent._prepare_inputs(generation_batch))

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """TRL's; of episodes as :mod:`harts_hf.trainers.weighing` says."""
        parent: Any = super()
        if WEIGHTS not in inputs:
            return parent.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # An evaluation batch is a step of its own.
        totals = self._tree.totals or StepTotals.of([inputs], self._tree.ranks)
        with gathering_ragged(self.accelerator):
            weights, router = inputs[WEIGHTS], self._tree.router_loss
            # Not the option, which may have changed since the rollouts. Rows of weight 0 have no terms.
            is_plain = bool(((weights == 1) | (weights == 0)).all())
            router_term: torch.Tensor | None = None
            if is_plain and not router.is_on:
                loss = parent.compute_loss(model, inputs, return_outputs, num_items_in_batch)
            else:
                leaves = self._tree.leaves(model, inputs)
                # A mean over a slice's tokens, not over rows: it is neither weighted nor scaled.
                router_term = None if leaves.aux_loss is None else router.term(leaves.aux_loss)

                def loss_of(
                    log_probs: torch.Tensor, entropies: torch.Tensor, batch: Mapping[str, Any]
                ) -> torch.Tensor:
                    with self._tree.handing_out(leaves, log_probs, entropies):
                        found = parent.compute_loss(model, batch, return_outputs, num_items_in_batch)
                    return found if router_term is None else found - router_term.detach()

                if is_plain:
                    loss = loss_of(leaves.log_probs, leaves.entropies, inputs)
                else:
                    loss = weighed_loss(loss_of, inputs, leaves.log_probs, leaves.entropies)
        factor = totals.factor(inputs, self._loss_is_mean_over or UNITS.get(self.loss_type, "rows"))
        loss = loss if factor == 1 else loss * factor
        self._tree.scaled_loss = loss = loss if router_term is None else loss + router_term
        return loss


def _state(output: Mapping[str, Any], error: Exception | None) -> _State:
    if error is not None:
        return _State(f"{type(error).__name__}: {error}", False, False, False, False)
    is_off_policy = bool(output.get(OFF_POLICY))
    has_episodes = output.get("episode") is not None
    unknown = is_off_policy and has_unknown(output)
    return _State("", has_episodes, is_off_policy, unknown, any(output.get(ABSENT) or ()))
