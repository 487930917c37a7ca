"""Keys of blocks, for tests that count comparisons."""

from __future__ import annotations


class CountedKey(bytes):
    """A key that counts comparisons."""

    times = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.times += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__
