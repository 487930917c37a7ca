"""Keys that are remembered without a block."""

from __future__ import annotations

from kvferry.daemon.core.cache.remembered_keys import RememberedKeys
from kvferry.daemon.core.cache.use_order import SEGMENT


def test_the_oldest_keys_are_forgotten_across_segments_of_the_order() -> None:
    count = 2 * SEGMENT + 10
    remembered = RememberedKeys(count)
    keys = [number.to_bytes(4, "big") for number in range(count)]
    remembered.add_keys(keys)
    remembered.forget_oldest(SEGMENT + 5)
    assert remembered.keys() == keys[SEGMENT + 5 :]
    remembered.check_integrity()
