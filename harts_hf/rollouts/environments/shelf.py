"""The shelf task: find out on which shelf an item is, go to the shelf, open it.

An episode that goes well, the policy's words in capitals::

    lamp wanted LOOK LAMP s3 listed GO S3 s3 reached OPEN S3

The shelf is drawn anew for every episode, so it has to be looked up and copied. A call that makes no sense, that opens
the wrong shelf or one where the policy does not stand, is answered ``error`` and may be tried again while turns are
left.
"""

import random
from typing import Any

from transformers import PreTrainedTokenizerBase

from harts_hf.rollouts.environment import Environment, StepResult
from harts_hf.rollouts.environments.words import word_tokenizer

_ITEMS = ("lamp", "book", "cup", "key", "map", "coin", "rope", "bell", "shoe", "ring", "vase", "fork")
_WORDS = ("look", "go", "open", "wanted", "listed", "reached", "error")


class ShelfEnvironment(Environment):
    """The shelf task; the reward is the share of its three steps that were made: looked up, at the shelf, opened.

    Args:
        num_items: items that may be wanted, 1 to 12; each is a prompt.
        num_shelves: shelves that an item may be on.

    Raises:
        ValueError: numbers out of range.
    """

    def __init__(self, *, num_items: int = 4, num_shelves: int = 4) -> None:
        if not 1 <= num_items <= len(_ITEMS):
            raise ValueError(f"expected num_items in [1, {len(_ITEMS)}], got {num_items}")
        if num_shelves < 1:
            raise ValueError(f"expected num_shelves of at least 1, got {num_shelves}")
        self._items = _ITEMS[:num_items]
        self._shelves = tuple(f"s{number}" for number in range(1, num_shelves + 1))
        self._target = ""
        self._shelf = ""
        self._at = ""
        self._steps_made = 0  # 1 looked up, 2 at the shelf, 3 opened

    def reset(self, prompt: Any, *, seed: int) -> str:
        """Begins an episode for a prompt such as ``lamp wanted``.

        Raises:
            ValueError: any other prompt, or an item that this environment does not have.
        """
        words = prompt.split() if isinstance(prompt, str) else []
        if len(words) != 2 or words[0] not in self._items or words[1] != "wanted":
            raise ValueError(f"expected a prompt such as '{self._items[0]} wanted', got {prompt!r}")
        self._target, self._at, self._steps_made = words[0], "", 0
        self._shelf = random.Random(seed).choice(self._shelves)
        return prompt

    def step(self, action: str) -> StepResult:
        """Plays one call, a verb and its argument; words after them are ignored."""
        verb, argument = [*action.split(), "", ""][:2]
        if verb == "look" and argument == self._target and self._steps_made == 0:
            self._steps_made = 1
            return StepResult(f"{self._shelf} listed", done=False)
        if verb == "go" and argument in self._shelves and argument != self._at:
            self._at = argument
            if self._steps_made:
                self._steps_made = 2 if argument == self._shelf else 1
            return StepResult(f"{argument} reached", done=False)
        if verb == "open" and argument == self._shelf and argument == self._at:
            self._steps_made = 3
            return StepResult("", done=True)
        return StepResult("error", done=False)

    @property
    def reward(self) -> float:
        """How far the episode came, in [0, 1]."""
        return self._steps_made / 3

    def fork(self) -> "ShelfEnvironment":
        """A copy that goes on by itself; nothing mutable is shared."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def prompts(self) -> list[str]:
        """One prompt for each item."""
        return [f"{item} wanted" for item in self._items]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A word-level tokenizer of the task's vocabulary; ``<end>`` is its EOS and ``<pad>`` its padding token."""
        return word_tokenizer([*_WORDS, *self._items, *self._shelves])
