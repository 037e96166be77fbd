"""Kept states: the longest beginning is found, the least recently used is dropped."""

import random
import zlib

import pytest

from harts_hf.rollouts.engines import kept as module
from harts_hf.rollouts.engines.kept import KeptStates, history_key, key_of_beginning


class Block:
    """States of a size, without a model."""

    def __init__(self, *histories, num_bytes=100):
        self.lengths = [len(history) for history in histories]
        self.keys = [history_key(history) for history in histories]
        self.num_bytes = num_bytes

    def __len__(self):
        return len(self.lengths)


def find(kept, history, max_tokens=None):
    return kept.find(history_key(history), len(history) if max_tokens is None else max_tokens)


def test_the_longest_beginning_is_found():
    """Of all that are kept, and not longer than asked for."""
    kept = KeptStates(10_000)
    first, second = Block((1,), (1, 2, 3), (2, 2)), Block((1, 2), (1, 2, 3, 4, 5))
    for block in (first, second):
        kept.keep(block, block.keys)
    assert len(kept) == 5
    assert find(kept, (1, 2, 3, 4, 5, 6)) == (second, 1)
    assert find(kept, (1, 2, 3, 4, 5)) == (second, 1)
    assert find(kept, (1, 2, 3, 4, 5), 4) == (first, 1)
    assert find(kept, (1, 2, 9)) == (second, 0)
    assert find(kept, (1, 3)) == (first, 0)
    assert find(kept, (3, 1)) is None
    assert find(kept, (1,), 0) is None
    kept.clear()
    assert find(kept, (1, 2, 3)) is None
    assert len(kept) == 0


def test_random_histories_are_found_as_by_brute_force():
    """Many lengths, many blocks, more than there is room for."""
    random.seed(0)
    kept, blocks = KeptStates(3000), []
    for _ in range(300):
        histories = {tuple(random.choices((1, 2), k=random.randint(1, 7))) for _ in range(3)}
        block = Block(*sorted(histories))
        kept.keep(block, block.keys)
        blocks.append(block)
        history = tuple(random.choices((1, 2), k=9))
        alive = [each for each, _, _ in kept._blocks.values()]
        assert sum(each.num_bytes + sum(map(len, each.keys)) for each in alive) <= 3000
        key = history_key(history)
        # The newest block holds all of its beginnings: nothing that it knows may be missed.
        own = zip(block.lengths, block.keys, strict=True)
        longest = max((length for length, beginning in own if key.startswith(beginning)), default=0)
        found = kept.find(key, 9)
        if found is None:
            assert longest == 0
        else:
            states, row = found
            assert states in alive and key.startswith(states.keys[row]) and states.lengths[row] >= longest


def test_the_block_used_least_recently_is_dropped():
    """Looking one up keeps it; a block beyond all room is not kept, and drops no other."""
    kept = KeptStates(350)
    first, second, third = Block((1, 1)), Block((2, 2)), Block((3, 3))
    for block in (first, second, third):
        kept.keep(block, block.keys)
    assert find(kept, (1, 1)) == (first, 0)
    fourth = Block((4, 4))
    kept.keep(fourth, fourth.keys)
    assert find(kept, (2, 2)) is None
    assert [find(kept, (token, token)) for token in (1, 3, 4)] == [(first, 0), (third, 0), (fourth, 0)]
    huge = Block((5, 5), num_bytes=351)
    kept.keep(huge, huge.keys)
    assert find(kept, (5, 5)) is None
    assert len(kept) == 3


def test_checksums_that_collide_find_nothing_wrong(monkeypatch):
    """The tokens decide, so a collision is a miss at worst."""
    monkeypatch.setattr(module.zlib, "crc32", lambda data, start=0: 7)
    kept = KeptStates(1000)
    block = Block((1, 2))
    kept.keep(block, block.keys)
    assert find(kept, (3, 4)) is None
    assert find(kept, (1, 2)) == (block, 0)
    monkeypatch.undo()
    assert zlib.crc32(b"ab") == zlib.crc32(b"b", zlib.crc32(b"a"))


def test_keys_of_beginnings_are_beginnings_of_keys():
    """And token ids that are no small ints have none."""
    key = history_key((1, 70_000, 3))
    assert key_of_beginning(key, 2) == history_key((1, 70_000))
    for tokens in ((1.5,), (2**31,), ("a",)):
        with pytest.raises((TypeError, OverflowError)):
            history_key(tokens)
