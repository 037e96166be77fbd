"""What `harts bench` says while it runs: how large a step is, how many are run, and how long that may take."""

import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from harts_hf.bench import sides
from harts_hf.bench.comparing import kinds_compared
from harts_hf.bench.parity import ROUNDED
from harts_hf.bench.results import BenchOptions
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import COLLAPSED, PACKED, TREE
from harts_hf.planner.text import counted

# Tokens of the forward by which the first guess is made: enough that launches do not count on a GPU.
PROBE_TOKENS = {"cpu": 256, "cuda": 2048}
# A step in units of that forward: a backward is two, recomputation under checkpointing one more.
PASSES = 4


class Progress:
    """Turns what :func:`harts_hf.bench.measure.measure_step` does into lines with the time that is left.

    Seconds are measured between two calls. A side that has not run yet is taken to be as slow as the slowest that has
    (the tree: by its tokens); before any has run, ``guess`` stands for them.

    Args:
        options: what is measured.
        rollouts: of the step.
        say: gets the lines.
        guess: seconds of a step of stock TRL, roughly.
        routed: whether the model is a mixture of experts, of which more steps are compared.
        clock: seconds of some clock.
    """

    def __init__(
        self,
        options: BenchOptions,
        rollouts: StepRollouts,
        say: Callable[[str], None],
        guess: float,
        *,
        routed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._say, self._guess, self._clock = options, say, guess, clock
        self._share = {TREE: rollouts.tree.num_tokens / rollouts.num_tokens}
        self._tries: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        self._stages: Counter[str] = Counter()
        self._compared = Counter(kinds_compared(options.kinds, routed=routed, own_routes=options.own_routes))
        self._part = rollouts.part(options.parity_tokens).num_tokens / rollouts.num_tokens  # that is compared
        self._counters = (self._tries, self._compared, self._steps, self._stages)
        self._seconds: dict[str, float] = {}
        self._running: tuple[str, int, float] | None = None
        for kind in (kind for kind in sides.KINDS if kind in options.kinds):
            settings = options.settings(kind, rollouts)
            if not settings:
                continue
            self._tries[kind] = len(settings) * (2 if len(settings) > 1 else 1)
            self._steps[kind] = options.steps
            self._stages[kind] = int(options.stages and kind in (PACKED, COLLAPSED, TREE))

    @property
    def num_steps(self) -> int:
        """Optimizer steps that are still to be run, at most."""
        return sum(sum(counter.values()) for counter in self._counters)

    @property
    def seconds_left(self) -> float:
        """Roughly; timed steps end after ``seconds_per_side``."""
        left = 0.0
        for kind in self._steps:
            one = self._seconds_of(kind)
            timed = min(self._steps[kind] * one, self._options.seconds_per_side + one)
            left += (self._tries[kind] + self._stages[kind]) * one + timed
        return left + sum(count * self._part * self._seconds_of(kind) for kind, count in self._compared.items())

    def __call__(self, text: str) -> None:
        """Takes what is done now.

        Args:
            text: ``trying LABEL``, ``comparing LABEL ...``, ``noting routes``, ``step I of N: LABEL`` or
                ``stages of LABEL``.
        """
        now = self._clock()
        if self._running is not None:
            kind, runs, since = self._running
            if runs:
                self._seconds[kind] = (now - since) / runs
        what, kind = read_said(text)
        counter = self._counters[what]
        for earlier in self._counters[:what]:  # those that failed, or settled it before all were run
            earlier.update({one: -count for one, count in earlier.items()})
        runs = 1
        if counter is self._tries:
            for one in list(self._steps)[: list(self._steps).index(kind)]:
                self._tries[one] = 0  # larger batches than the fastest are not tried
            runs = min(self._tries[kind], 2 if self._tries[kind] > 1 else 1)
        self._say(f"{text}, about {in_words(self.seconds_left)} left")
        counter[kind] -= runs
        # Of what is compared there may be a part of the rows alone.
        self._running = kind, 0 if counter is self._compared else runs, now

    def _seconds_of(self, kind: str) -> float:
        if kind in self._seconds:
            return self._seconds[kind]
        whole = [seconds / self._share.get(known, 1.0) for known, seconds in self._seconds.items()]
        return max(whole, default=self._guess) * self._share.get(kind, 1.0)


def read_said(text: str) -> tuple[int, str]:
    """Which of a progress's counters a text is about, and the kind of the side."""
    if text == "noting routes":
        return 1, TREE
    words = ("trying ", "comparing ", "step ", "stages of ")
    what = next(number for number, word in enumerate(words) if text.startswith(word))
    label = text.partition(": ")[2] if words[what] == "step " else text.removeprefix(words[what])
    label = label.partition(" on the same")[0].removesuffix(ROUNDED)
    return what, label.rpartition(" ")[0]


def size_in_words(rollouts: StepRollouts) -> str:
    """How large a step is."""
    tokens, unique = rollouts.num_tokens, rollouts.tree.num_tokens
    return (
        f"{counted(len(rollouts.token_ids), 'sample')}, {tokens:,} tokens (the longest "
        f"{max(map(len, rollouts.token_ids)):,}), {unique:,} unique ({tokens / unique:.3g}x)"
    )


def in_words(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@torch.no_grad()
def guess_of_step(model: nn.Module, rollouts: StepRollouts, clock: Callable[[], float] = time.monotonic) -> float:
    """Seconds of a step of stock TRL, by one short forward of the model. That attention grows is left out."""
    device = next(model.parameters()).device
    longest = max(rollouts.token_ids, key=len)[: PROBE_TOKENS.get(device.type, 256)]
    tokens = torch.as_tensor(longest, device=device)[None]
    for _ in range(2):  # the first compiles
        begun = clock()
        model(input_ids=tokens, use_cache=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (clock() - begun) * PASSES * rollouts.num_tokens / len(longest)
