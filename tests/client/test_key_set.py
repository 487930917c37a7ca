"""KeySet: a set of keys that consists of many small sets."""

from __future__ import annotations

from kvferry.client.key_set import SHARDS, KeySet


def keys_of(*numbers: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in numbers]


def test_keys_are_added_discarded_and_taken() -> None:
    keys = KeySet()
    keys.add_keys(keys_of(*range(1000), 5))
    keys.discard_keys(keys_of(*range(10), 2000))
    assert len(keys) == 990
    assert sorted(keys) == keys_of(*range(10, 1000))
    assert keys_of(10)[0] in keys
    assert keys_of(9)[0] not in keys
    shards = keys.take_shards()
    assert (len(shards), sum(map(len, shards)), len(keys)) == (SHARDS, 990, 0)


def test_different_keys_are_in_one_of_two_sets() -> None:
    first, second = KeySet(), KeySet()
    first.add_keys(keys_of(*range(100)))
    second.add_keys(keys_of(*range(50, 120)))
    assert sorted(first.different_keys(second)) == keys_of(*range(50), *range(100, 120))
