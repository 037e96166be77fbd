"""Samples rollout trees: conversations that fork at chosen turns, environment and model cache forked with them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from harts_hf.rollouts.contract import check_text, fork_environment, play_turn, read_reward
from harts_hf.rollouts.decoding import LockstepDecoder, TokenSampler
from harts_hf.rollouts.environment import Environment

# No token of any vocabulary is longer, so a text of more than so many characters per token is not even encoded.
_MAX_CHARACTERS_PER_TOKEN = 256


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Where conversations fork, and what a conversation may cost.

    Attributes:
        branching: continuations at each fork; their product is the number of leaves of a tree.
        fork_turns: the turn (0 is the first) before which each fork happens, ascending, as many as ``branching``.
        max_turns: a conversation is closed after so many turns, whatever the environment says.
        max_turn_tokens: a turn ends at an end token, or after so many tokens.
        max_completion_tokens: a conversation holds at most so many tokens after its prompt. Where an observation and
            one more token do not fit, it is closed before the observation; a turn that is cut by this limit (not by
            ``max_turn_tokens``) is not played.

    Raises:
        ValueError: numbers below 1, or fork turns that do not match.
    """

    branching: tuple[int, ...]
    fork_turns: tuple[int, ...]
    max_turns: int
    max_turn_tokens: int
    max_completion_tokens: int

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise ValueError(f"expected branching factors of at least 1, got {list(self.branching)}")
        if len(self.fork_turns) != len(self.branching):
            turns, factors = list(self.fork_turns), list(self.branching)
            raise ValueError(f"expected as many fork turns as branching factors, got {turns} for {factors}")
        ascending = all(a < b for a, b in zip((-1, *self.fork_turns), self.fork_turns, strict=False))
        if not ascending or self.fork_turns[-1] >= self.max_turns:
            raise ValueError(
                f"expected ascending fork turns in [0, max_turns = {self.max_turns}), got {list(self.fork_turns)}"
            )
        for name in ("max_turns", "max_turn_tokens", "max_completion_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")

    @property
    def num_leaves(self) -> int:
        """Leaves of a tree."""
        return math.prod(self.branching)


@dataclass(frozen=True, kw_only=True)
class SampledRollout:
    """One leaf of a tree: a whole conversation.

    Attributes:
        prompt_ids: ``[P]`` token ids that the policy read first.
        completion_ids: ``[C]`` token ids after them, C at least 1.
        logprobs: ``[C]`` log-prob of each sampled token, 0.0 at the environment's tokens.
        env_mask: ``[C]`` 1 at the policy's tokens, 0 at the environment's.
        reward: the environment's reward.
        num_turns: turns begun.
        tree: index of the tree (the prompt group) that it is a leaf of.
        path: the branch taken at each fork; a conversation that was over before a fork stands for all its branches.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    reward: float
    num_turns: int
    tree: int
    path: tuple[int, ...]


@dataclass(kw_only=True)
class _Conversation:
    """A conversation that is still going on: one row of the decoder."""

    tree: int
    environment: Environment
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    path: tuple[int, ...] = ()
    turn: int = 0
    turn_tokens: int = 0
    unread: list[int] = field(default_factory=list)  # of the observation: still to be fed

    def fork(self, branch: int) -> "_Conversation":
        # The first branch goes on with the environment itself: one copy fewer.
        return replace(
            self,
            environment=self.environment if branch == 0 else fork_environment(self.environment),
            completion_ids=list(self.completion_ids),
            logprobs=list(self.logprobs),
            env_mask=list(self.env_mask),
            path=(*self.path, branch),
            unread=[],
        )

    def append(self, token: int, logprob: float, *, sampled: bool) -> None:
        self.completion_ids.append(token)
        self.logprobs.append(logprob)
        self.env_mask.append(int(sampled))

    def rollouts(self, shape: TreeShape) -> Iterator[SampledRollout]:
        """Its leaves: one, or as many equal ones as the forks ahead of a conversation that is over would have made.

        So each history keeps its weight: a leaf that is over has only itself as a continuation. Equal trajectories
        cost a tree trainer nothing.
        """
        for _ in range(math.prod(shape.branching[len(self.path) :])):
            yield SampledRollout(
                prompt_ids=list(self.prompt_ids),
                completion_ids=list(self.completion_ids),
                logprobs=list(self.logprobs),
                env_mask=list(self.env_mask),
                reward=read_reward(self.environment),
                num_turns=self.turn + 1,
                tree=self.tree,
                path=self.path,
            )


class TreeSampler:
    """Grows one tree per environment, all of them at once (see :class:`LockstepDecoder`).

    Args:
        decoder: a fresh decoder on the policy.
        sampler: draws the tokens.
        tokenizer: encodes what environments say (no special tokens added) and decodes turns for them.
        end_token_ids: tokens that end a turn.
        shape: where to fork, and the limits.
        max_prompt_tokens: most tokens of a prompt (what the model has positions for); None for no limit.
    """

    def __init__(
        self,
        *,
        decoder: LockstepDecoder,
        sampler: TokenSampler,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        shape: TreeShape,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset(end_token_ids)
        self._shape = shape
        self._max_prompt_tokens = max_prompt_tokens

    def sample(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[SampledRollout]:
        """Samples.

        Args:
            environments: reset, one per tree.
            texts: what each ``reset`` returned.

        Returns:
            ``len(environments) * shape.num_leaves`` rollouts, tree by tree, the leaves of a tree in depth-first order.

        Raises:
            ValueError: a prompt without any token or of too many; an environment that returns something else than its
                contract says.
        """
        live = [
            _Conversation(tree=tree, environment=environment, prompt_ids=self._encode_prompt(text, environment, tree))
            for tree, (environment, text) in enumerate(zip(environments, texts, strict=True))
        ]
        finished: list[_Conversation] = []
        logits = self._decoder.prefill([conversation.prompt_ids for conversation in live])
        while live:
            live, parents = self._fork(live)
            self._advance(live, logits[parents])
            going = [index for index, conversation in enumerate(live) if not self._end_turn(conversation)]
            finished += [conversation for index, conversation in enumerate(live) if index not in set(going)]
            live, parents = [live[index] for index in going], [parents[index] for index in going]
            if live:
                logits = self._decoder.feed([row.completion_ids[-1] for row in live], parents)
        finished.sort(key=lambda conversation: (conversation.tree, conversation.path))
        return [rollout for conversation in finished for rollout in conversation.rollouts(self._shape)]

    def _encode_prompt(self, text: str, environment: Environment, tree: int) -> list[int]:
        name = type(environment).__name__
        check_text(text, f"{name}.reset to return a text", f"tree {tree}")
        limit = self._max_prompt_tokens
        ids = self._encode(text, limit)
        if ids is None:
            raise ValueError(
                f"expected {name}.reset to return at most {limit} tokens, the positions of the model, got a text of "
                f"{len(text):,} characters (tree {tree})"
            )
        if not ids:
            raise ValueError(f"expected a prompt of at least one token, got {text!r} (tree {tree})")
        return ids

    def _encode(self, text: str, limit: int | None) -> list[int] | None:
        """Token ids of ``text``; None for more than ``limit``. A text that must have more is not encoded at all."""
        if limit is not None and len(text) > limit * _MAX_CHARACTERS_PER_TOKEN:
            return None
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids if limit is None or len(ids) <= limit else None

    def _fork(self, live: list[_Conversation]) -> tuple[list[_Conversation], list[int]]:
        """Forks the rows that stand before a forking turn; returns the new rows and the old row of each."""
        rows: list[_Conversation] = []
        parents: list[int] = []
        for index, conversation in enumerate(live):
            forks = len(conversation.path)
            begins_turn = conversation.turn_tokens == 0 and not conversation.unread
            due = forks < len(self._shape.branching) and conversation.turn == self._shape.fork_turns[forks]
            if begins_turn and due:
                count = self._shape.branching[forks]
                rows += [conversation.fork(branch) for branch in range(count)]
                parents += [index] * count
            else:
                rows.append(conversation)
                parents.append(index)
        return rows, parents

    def _advance(self, live: list[_Conversation], logits: Tensor) -> None:
        """Gives each row its next token: the next one of an observation, or a sampled one."""
        sampling = [index for index, conversation in enumerate(live) if not conversation.unread]
        for conversation in live:
            if conversation.unread:
                conversation.append(conversation.unread.pop(0), 0.0, sampled=False)
        if sampling:
            for index, token, logprob in zip(sampling, *self._sampler.draw(logits[sampling]), strict=True):
                live[index].append(token, logprob, sampled=True)
                live[index].turn_tokens += 1

    def _end_turn(self, conversation: _Conversation) -> bool:
        """Plays the turn if its last token has just been sampled; returns whether the conversation is over."""
        count = conversation.turn_tokens
        if count == 0:  # in the middle of an observation
            return False
        room = self._shape.max_completion_tokens - len(conversation.completion_ids)
        if conversation.completion_ids[-1] not in self._end_token_ids and count < self._shape.max_turn_tokens:
            return room == 0
        action = str(self._tokenizer.decode(conversation.completion_ids[-count:], skip_special_tokens=True))
        observation, done = play_turn(conversation.environment, action, conversation.turn)
        if done or conversation.turn + 1 == self._shape.max_turns:
            return True
        unread = self._encode(observation, room - 1)  # and one token of the policy
        if unread is None:
            return True
        conversation.unread = unread
        conversation.turn += 1
        conversation.turn_tokens = 0
        return False
