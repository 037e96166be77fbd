"""Kept states: which conversations' states are at hand, and which of them a history extends."""

import zlib
from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence

from harts_hf.rollouts.engines.states import RowStates

_TOKEN = "i"
_TOKEN_BYTES = array(_TOKEN).itemsize


def history_key(tokens: Sequence[int]) -> bytes:
    """Token ids as a key: the key of a history's beginning is the beginning of its key.

    Raises:
        TypeError, OverflowError: anything but ints of 32 bits.
    """
    return array(_TOKEN, tokens).tobytes()


def key_of_beginning(key: bytes, num_tokens: int) -> bytes:
    """The key of a history's first tokens."""
    return key[: num_tokens * _TOKEN_BYTES]


class KeptStates:
    """Finds the longest kept beginning of a history; the states used least recently are dropped when room is short.

    States are kept and dropped in the blocks that they come in: all conversations that ended a turn together.

    Args:
        max_bytes: of states and keys; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: OrderedDict[int, tuple[RowStates, list[bytes], int]] = OrderedDict()
        self._num_blocks_ever = 0
        # By length in tokens, then by checksum: where it is. Blocks that are gone are forgotten on the way.
        self._places: dict[int, dict[int, tuple[int, int]]] = {}
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return sum(len(states) for states, _, _ in self._blocks.values())

    def keep(self, states: RowStates, keys: Sequence[bytes]) -> None:
        """Keeps states that nobody will read into any more.

        Args:
            states: R rows.
            keys: ``[R]`` of the tokens that each row has read (:func:`history_key`).
        """
        size = states.num_bytes + sum(map(len, keys))
        if size > self._max_bytes:
            return
        block = self._num_blocks_ever
        self._num_blocks_ever += 1
        self._blocks[block] = (states, list(keys), size)
        self._num_bytes += size
        for row, key in enumerate(keys):
            length = states.lengths[row]
            if length not in self._places:
                self._places[length] = {}
                insort(self._lengths, length)
            self._places[length][zlib.crc32(key)] = (block, row)
        while self._num_bytes > self._max_bytes:
            self._drop_oldest()

    def find(self, key: bytes, max_tokens: int) -> tuple[RowStates, int] | None:
        """Finds the longest kept beginning of a history.

        Args:
            key: of the history.
            max_tokens: most tokens of the beginning.

        Returns:
            The states and the row in them; None for none. Costs one pass over the key, however much is kept.
        """
        checksum, start, found = 0, 0, None
        for length in self._lengths:
            if length > max_tokens:
                break
            stop = length * _TOKEN_BYTES
            checksum, start = zlib.crc32(key[start:stop], checksum), stop
            block, row = self._places[length].get(checksum, (-1, -1))
            # Checksums may collide: the tokens decide.
            if block >= 0 and self._blocks[block][1][row] == key[:stop]:
                found = (block, row)
        if found is None:
            return None
        self._blocks.move_to_end(found[0])
        return self._blocks[found[0]][0], found[1]

    def clear(self) -> None:
        """Forgets all."""
        while self._blocks:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        block, (states, keys, size) = self._blocks.popitem(last=False)
        self._num_bytes -= size
        for length, key in zip(states.lengths, keys, strict=True):
            places = self._places.get(length, {})
            if places.get(checksum := zlib.crc32(key), (-1, -1))[0] == block:
                del places[checksum]
                if not places:
                    del self._places[length]
                    self._lengths.remove(length)
