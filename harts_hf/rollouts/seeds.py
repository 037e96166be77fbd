"""One number out of several, for whatever is drawn at random in a rollout."""

import hashlib


def seed_of(*numbers: int) -> int:
    """A seed of 32 bits that depends on these integers alone, and looks independent of that of any others.

    How many there are counts too: NumPy's ``SeedSequence`` gives one state for ``(1, 0)`` and ``(1,)``, and the first
    branch of a conversation is its way with a 0 behind.
    """
    return int.from_bytes(hashlib.blake2b(repr(tuple(map(int, numbers))).encode(), digest_size=4).digest(), "little")
