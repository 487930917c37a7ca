"""The cache with every policy, compared with a simple model."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cache_model import READY, CacheModel
from support.plain_policies import PLAIN

KEYS = st.sampled_from([bytes([letter]) for letter in b"abcdefghij"])
FREQUENT = ["offer", "store", "store", "store", "store", "store", "touch", "touch", "pin", "unpin"]
FREQUENT += ["make_spare"]
PARTS = st.dictionaries(KEYS, st.sampled_from([(0, 2), (0, 3), (1, 4)]), max_size=3)
Step: TypeAlias = tuple[str, list[bytes], int, bool, dict[bytes, tuple[int, int]]]
RARE = ["end_store", "end_store", "end_again", "lookup", "drain", "reset", "restart", "discard"]
RARE += ["verify", "verify", "end_in_part"]
TIERS = ["promote", "promote", "end_promotion", "release_promotion", "take_writes", "end_writes"]
NAMES = FREQUENT * 2 + RARE + TIERS * 2
STEPS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.lists(KEYS, min_size=1, max_size=4),
        st.integers(0, 5),
        st.sampled_from([True, True, False]),
        PARTS,
    ),
    min_size=20,
    max_size=80,
)


def run_step(
    model: CacheModel,
    name: str,
    keys: list[bytes],
    index: int,
    success: bool,
    parts: dict[bytes, tuple[int, int]],
) -> None:
    """Run a step of the model and the cache. index: of a job in flight, or of a ready key."""
    match name:
        case "touch" | "lookup" | "discard" | "verify" | "make_spare":
            getattr(model, name)(keys)
        case "offer":
            model.offer(keys, parts, keep=list(parts))
        case "store":
            model.offer(keys, {k: p for k, p in parts.items() if success}, keep=[])
            model.end_store(-1, success=True)
        case "pin":
            ready = sorted(model.keys_that_are(READY))
            model.pin(ready[index : index + 2] + ready[index : index + 1] if success else keys)
        case "end_in_part":
            model.end_store(index, success=True, lost=1 + success)
        case "end_store" | "end_again":
            getattr(model, name)(index, success)
        case "promote":
            model.promote(keys)
        case "end_promotion" | "end_writes":
            getattr(model, name)(index, success)
        case "unpin" | "release_promotion" | "take_writes":
            getattr(model, name)(index)
        case _:
            getattr(model, name)()


@pytest.mark.parametrize("policy", PLAIN)
@settings(max_examples=150)
@given(st.integers(1, 6), st.sampled_from([1, 1, 1, 2]), st.booleans(), STEPS)
def test_every_result_equals_that_of_the_model(
    policy: str, capacity: int, threshold: int, drains_late: bool, steps: list[Step]
) -> None:
    model = CacheModel(policy, capacity, threshold)
    for step in steps:
        run_step(model, *step)
        model.check()
        if not drains_late:
            model.drain()
    model.drain()
