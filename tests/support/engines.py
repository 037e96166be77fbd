"""Engines without a model: tokens from seeds, finished in any order."""

from concurrent.futures import Future

import numpy as np

from harts_hf.rollouts.engines.engine import Engine, SampledTurn, TurnRequest


class SeededEngine(Engine):
    """Draws tokens from a request's seed and history alone.

    Args:
        vocab_size: tokens to draw from.
        end_token_id: ends a turn.
        order: which of the queued requests is finished next: ``"first"``, ``"last"``, or ``"any"`` (by ``shuffle``).
        at_once: requests finished before ``until`` is asked again.
        max_positions: as the interface says.
    """

    def __init__(self, vocab_size, end_token_id, *, order="first", shuffle=0, at_once=1, max_positions=None):
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.requests = []
        self._end_token_id = end_token_id
        self._order = order
        self._shuffle = np.random.default_rng(shuffle)
        self._at_once = at_once
        self._queue = []
        self._num_read_tokens = 0

    def submit(self, request: TurnRequest):
        room = np.inf if self.max_positions is None else self.max_positions - len(request.history)
        assert room >= 1, "the caller has to leave room for a token"
        assert all(0 <= token < self.vocab_size for token in request.history)
        future = Future()
        self.requests.append(request)
        self._queue.append((request, future))
        return future

    def run(self, until):
        while not until():
            assert self._queue, "nothing to sample, and the caller waits"
            for _ in range(min(self._at_once, len(self._queue))):
                last = len(self._queue) - 1
                which = {"first": 0, "last": last, "any": int(self._shuffle.integers(last + 1))}[self._order]
                request, future = self._queue.pop(which)
                future.set_result([self._turn(request, index) for index in range(request.count)])

    def wake(self):
        pass

    @property
    def num_read_tokens(self):
        return self._num_read_tokens

    def close(self):
        for _, future in self._queue:
            future.cancel()

    def _turn(self, request, index):
        generator = np.random.default_rng((request.seed, index, *request.history))
        ids = []
        while len(ids) < request.max_tokens and self._end_token_id not in ids:
            ids.append(int(generator.integers(self.vocab_size)))
        self._num_read_tokens += len(ids)
        return SampledTurn(
            token_ids=tuple(ids),
            logprobs=tuple((-generator.exponential(size=len(ids)) - 1e-3).tolist()),
            ended="end_token" if ids[-1] == self._end_token_id else "length",
            entropies=tuple(generator.exponential(size=len(ids)).tolist()) if request.entropies else None,
        )
