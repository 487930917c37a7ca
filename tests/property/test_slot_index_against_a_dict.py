"""The index of the disk tier's keys compared with a dictionary, also with many equal places."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.tiers.disk.slot_index import SlotIndex

SLOTS = 400
# Hashes of two parts whose places are few, at the start and at the end of the part, so that most of
# them collide and continue at the start; and hashes of all parts.
near = st.builds(
    lambda part, place, rest: part << 56 | place << 48 | rest,
    st.sampled_from([0, 255]),
    st.sampled_from([0, 1, 127, 254, 255]),
    st.integers(0, 9),
)
hashes = near | st.integers(0, (1 << 64) - 1)
steps = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "remove", "build"]), hashes), max_size=SLOTS
)


@given(steps)
def test_the_index_equals_a_dictionary(script: list[tuple[str, int]]) -> None:
    hash_of = np.zeros(SLOTS, np.uint64)
    index, model = SlotIndex(hash_of), dict[int, int]()
    for slot, (verb, key_hash) in enumerate(script):
        match verb:
            case "insert":
                hash_of[slot] = key_hash
                assert index.insert(slot) == model.get(key_hash)
                model[key_hash] = slot
            case "remove" if model:
                old = min(model, key=lambda each: each ^ key_hash)
                index.remove(model.pop(old))
            case "build":
                slots = np.array([*model.values(), *model.values()][: 3 * len(model) // 2])
                others = index.build(slots.astype(np.int64))
                assert sorted(others.tolist()) == sorted(slots[len(model) :].tolist())
        assert len(index) == len(model)
        assert index.find(key_hash) == model.get(key_hash)
    assert {each: index.find(each) for each in model} == model


@given(st.lists(hashes, max_size=SLOTS))
def test_of_slots_with_one_hash_the_last_is_indexed(given_hashes: list[int]) -> None:
    hash_of = np.array(given_hashes, np.uint64)
    index = SlotIndex(hash_of)
    others = index.build(np.arange(len(given_hashes)))
    last = {key_hash: slot for slot, key_hash in enumerate(given_hashes)}
    assert {key_hash: index.find(key_hash) for key_hash in given_hashes} == last
    assert sorted([*others.tolist(), *last.values()]) == list(range(len(given_hashes)))
    for slot in others.tolist():
        index.remove(slot)  # the index does not have it
    for slot in last.values():
        index.remove(slot)
    assert len(index) == 0
    assert not any(map(any, index._parts))
