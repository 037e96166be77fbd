"""Reads histories up to their last token, from the longest beginning whose states are kept."""

from collections.abc import Sequence
from typing import TypeAlias

from transformers import PreTrainedModel

from harts_hf.rollouts.engines.batch import Row
from harts_hf.rollouts.engines.kept import KeptStates, key_of_beginning
from harts_hf.rollouts.engines.routes import RouterTap
from harts_hf.rollouts.engines.states import RowStates, join

# A forward of several tokens costs more than one of a single token, so a few tokens are read one a round instead.
# Where the chunkwise rule is Transformers' own, it fills each row's rest up to 64 tokens: on a CPU such a forward
# costs as much as about four rounds and one more for each row (measured on the model of recipes/tiny_grpo.yaml, 1.7 ms
# a round: 5.4 ms for 1 row of 3 tokens, 76 ms for 32).
_SINGLE_TOKENS = 4

_Found: TypeAlias = tuple[Row, RowStates, int]  # a row, and where its longest kept beginning is


class HistoryReader:
    """Prepares histories for decoding.

    Args:
        model: the policy.
        kept: finds states, and gets those that were read here.
        max_prefill_tokens: most tokens, padding included, of one forward of several rows.
        tap: notes experts of the tokens that are read.
        single_tokens: a rest of at most so many tokens is left unread, for the decoding batch to read one by one;
            None for what pays.

    Attributes:
        num_read_tokens: tokens read so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kept: KeptStates,
        *,
        max_prefill_tokens: int,
        single_tokens: int | None,
        tap: RouterTap | None = None,
    ) -> None:
        self._model = model
        self._kept = kept
        self._tap = tap
        self._max_prefill_tokens = max_prefill_tokens
        self._single_tokens = single_tokens
        self._zero = RowStates.zero(model)
        self.num_read_tokens = 0

    def read(self, rows: Sequence[Row]) -> tuple[list[Row], list[tuple[RowStates, list[int]]]]:
        """Reads all of the rows' histories but a few tokens, one at least, which stay their ``unread``.

        Args:
            rows: with their whole history unread.

        Returns:
            The rows, perhaps in another order, and their states as :meth:`DecodingBatch.add` takes them.
        """
        found: list[_Found] = []
        for row in rows:
            states, index = self._kept.find(row.key, row.history_length - 1) or (self._zero, 0)
            row.unread = row.unread[states.lengths[index] :]
            found.append((row, states, index))
        single = self._single_tokens
        if single is None:
            num_long = sum(len(row.unread) - 1 > _SINGLE_TOKENS for row in rows)
            single = _SINGLE_TOKENS + (num_long if self._model.device.type == "cpu" else 0)
        # The last token is always left: what it is followed by is drawn in the decoding batch, for all rows alike.
        short = [entry for entry in found if len(entry[0].unread) - 1 <= single]
        long = [entry for entry in found if len(entry[0].unread) - 1 > single]
        ready, parts = _by_states(short)
        for group in self._groups(long):
            rows_of_group, states = self._read_group(group)
            ready += rows_of_group
            parts.append((states, list(range(len(states)))))
        return ready, parts

    def _groups(self, entries: list[_Found]) -> list[list[_Found]]:
        """Rows that may be read together: from zero, padded; or on top of states, about as many tokens in each."""
        groups: list[list[_Found]] = []
        for row, states, index in sorted(entries, key=lambda entry: (entry[1] is self._zero, -len(entry[0].unread))):
            last = groups[-1] if groups else []
            if last:
                first_row, first_states, _ = last[0]
                same_kind = (states is self._zero) == (first_states is self._zero)
                fits = (len(last) + 1) * len(first_row.unread) <= self._max_prefill_tokens
                # Padding at most doubles the work; on top of states nothing may be padded, and the rest stays unread.
                from_zero = states is self._zero and 2 * len(row.unread) >= len(first_row.unread)
                continued = states is not self._zero and len(row.unread) + _SINGLE_TOKENS >= len(first_row.unread)
                if same_kind and fits and (from_zero or continued):
                    last.append((row, states, index))
                    continue
            groups.append([(row, states, index)])
        return groups

    def _read_group(self, group: list[_Found]) -> tuple[list[Row], RowStates]:
        rows, parts = _by_states(group)
        states = join(parts)
        counts = [len(row.unread) - 1 for row in rows]
        if max(states.lengths) > 0:
            counts = [min(counts)] * len(counts)
        tokens = [row.unread[:count] for row, count in zip(rows, counts, strict=True)]
        states.read(self._model, tokens, tap=self._tap)
        self.num_read_tokens += sum(counts)
        for row, count in zip(rows, counts, strict=True):
            row.unread = row.unread[count:]
        keys = [key_of_beginning(row.key, length) for row, length in zip(rows, states.lengths, strict=True)]
        self._kept.keep(states, keys)
        return rows, states


def _by_states(entries: Sequence[_Found]) -> tuple[list[Row], list[tuple[RowStates, list[int]]]]:
    """The rows in the order of the blocks of states that they continue, and those blocks, once each."""
    blocks: dict[int, tuple[RowStates, list[int], list[Row]]] = {}
    for row, states, index in entries:
        _, indices, rows = blocks.setdefault(id(states), (states, [], []))
        indices.append(index)
        rows.append(row)
    parts = [(states, indices) for states, indices, _ in blocks.values()]
    return [row for _, _, rows in blocks.values() for row in rows], parts
