"""Retained and released keys. The namespace has 64 blocks: an engine retains 16, a label 4."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.retention import LOOK_EVERY, MAX_ENTRIES, Owner, RetainedBlocks
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Code, Refused
from kvferry.proto.hints import Release, ReleaseRetained, Retain, Retained
from support.namespaces_fixture import (
    FINGERPRINT,
    PAGE,
    NamespacesFixture,
    each,
    store,
)

BLOCKS = 64
LETTERS = bytes(range(BLOCKS))
OTHERS = bytes(range(BLOCKS, 256))


def start(*sessions: str, stored: bytes = LETTERS) -> NamespacesFixture:
    fixture = NamespacesFixture(*(sessions or ("a",)), quota=BLOCKS * PAGE, pool_bytes=1 << 20)
    for at in range(0, len(stored), 16):
        fixture.stored(sessions[0] if sessions else "a", stored[at : at + 16])
    return fixture


def retain(
    fixture: NamespacesFixture,
    letters: bytes,
    seconds: float = 60.0,
    label: str = "",
    session: str = "a",
) -> tuple[int, int, int]:
    """How many keys are kept, missing and clipped."""
    (action,) = fixture.send(session, Retain(9, each(letters), seconds, label))
    reply = action.message
    assert isinstance(reply, Retained)
    assert (action.session, reply.request_id) == (session, 9)
    return reply.kept, reply.missing, reply.clipped


def evict_others(fixture: NamespacesFixture) -> bytes:
    """Store as many other keys as there is room for. Returns the letters that are left."""
    for letter in each(OTHERS[:BLOCKS]):
        fixture.stored("a", letter)
    return fixture.loadable("a", LETTERS)


def test_retained_keys_are_not_evicted() -> None:
    fixture = start()
    fixture.send("a", wire.Spare(each(b"\x00\x01")))
    assert retain(fixture, b"\x01\x00\x02\x01") == (3, 0, 0)
    assert fixture.usage("retained", "pinned") == (3, 3)
    fixture.send("a", wire.Spare(each(b"\x00\x01")))
    assert evict_others(fixture) == b"\x00\x01\x02"


def test_missing_keys_are_counted() -> None:
    fixture = start(stored=b"ab")
    fixture.start("a", store(b"c"))
    assert retain(fixture, b"acbd") == (2, 2, 0)
    assert fixture.usage("hints_accepted", "hints_missing") == (2, 2)


def test_retaining_ends_in_time() -> None:
    """Up to LOOK_EVERY late."""
    fixture = start()
    retain(fixture, b"\x00\x01", 10.0)
    begin = fixture.now
    retain(fixture, b"\x01", 20.5)
    retain(fixture, b"\x01", 1.0)  # a shorter time changes nothing
    left = {2: begin}
    while 0 not in left:
        fixture.advance()
        retained = next(iter(fixture.core._namespaces)).retained
        left.setdefault(len(retained.blocks()), fixture.now)
    assert begin + 10 <= left[1] <= begin + 10 + LOOK_EVERY
    assert begin + 21.5 <= left[0] <= begin + 21.5 + LOOK_EVERY
    assert fixture.usage("pinned") == (0,)


def test_the_number_of_entries_is_bounded() -> None:
    cache = Cache(5 * MAX_ENTRIES)
    keys = [number.to_bytes(4, "big") for number in range(MAX_ENTRIES + 1)]
    reservation = cache.prepare_store(keys)
    assert reservation is not None
    cache.complete_store(reservation, success=True)
    retained = RetainedBlocks(cache)
    first, second = Owner("a", "a", ""), Owner("b", "b", "")
    assert retained.retain(first, keys[:-2], 1.0, 100.0).kept == MAX_ENTRIES - 1
    assert retained.retain(second, keys, 2.0, 100.0) == (1, 0, MAX_ENTRIES)
    retained.expire(101.0)
    assert retained.retain(second, keys, 2.0, 101.0) == (MAX_ENTRIES, 0, 1)


def test_the_tail_of_a_prefix_exceeds_the_share_of_an_engine() -> None:
    fixture = start("a", "a/worker", "b")
    assert retain(fixture, LETTERS[:10]) == (10, 0, 0)
    assert retain(fixture, LETTERS[:20], session="a/worker") == (16, 0, 4)
    assert retain(fixture, LETTERS[40:], session="b") == (16, 0, 8)
    assert fixture.usage("retained", "hints_clipped") == (32, 12)
    fixture.open_namespace("c")
    assert retain(fixture, LETTERS[:18], session="c") == (16, 0, 2)  # the same blocks
    assert retain(fixture, LETTERS[20:], session="c") == (0, 0, 44)


def test_a_label_has_a_smaller_share_and_blocks_of_several_count_once() -> None:
    fixture = start()
    for number in range(100):
        assert retain(fixture, LETTERS[:5], label=f"hostile {number}") == (4, 0, 1)
    assert fixture.usage("retained") == (4,)


def test_a_hostile_label_harms_only_itself() -> None:
    fixture = start()
    assert retain(fixture, LETTERS[:4], label="honest") == (4, 0, 0)
    assert retain(fixture, LETTERS[1:], 3600.0, label="hostile") == (4, 0, 59)
    fixture.send("a", Release(each(LETTERS), "hostile"))
    assert fixture.usage("retained") == (4,)
    assert evict_others(fixture) == LETTERS[:4]


def test_released_keys_are_the_first_victims() -> None:
    fixture = start()
    retain(fixture, LETTERS[40:44], label="x")
    fixture.send("a", Release(each(LETTERS[40:44]), "x"))
    assert fixture.usage("retained", "pinned", "hints_accepted") == (0, 0, 8)
    fixture.stored("a", OTHERS[:4])
    assert fixture.loadable("a", LETTERS) == LETTERS[:40] + LETTERS[44:]


def test_released_keys_of_another_engine_stay() -> None:
    fixture = start("a", "b")
    retain(fixture, LETTERS[40:44])
    fixture.send("a", Release(each(LETTERS[40:44])))
    assert fixture.usage("retained", "hints_refused") == (0, 4)
    fixture.stored("a", OTHERS[:4])
    assert fixture.loadable("a", LETTERS[40:44]) == LETTERS[40:44]


def test_a_reset_ends_retaining() -> None:
    fixture = start()
    retain(fixture, LETTERS[:4])
    fixture.send("a", wire.Reset(3))
    assert fixture.usage("retained", "pinned", "orphaned", "free") == (0, 0, 0, BLOCKS)
    assert retain(fixture, LETTERS[:4]) == (0, 4, 0)


def test_a_session_that_ends_retains_nothing() -> None:
    fixture = start("a", "a/worker")
    retain(fixture, LETTERS[:4], session="a")
    retain(fixture, LETTERS[2:6], session="a/worker")
    fixture.close_sessions("a/worker")
    assert fixture.usage("retained", "pinned") == (4, 4)


def test_a_key_in_another_block_is_held_there() -> None:
    fixture = start(stored=b"ab")
    retain(fixture, b"a")
    namespace = next(iter(fixture.core._namespaces))
    block = namespace.cache._blocks.index.find_number(b"a")
    namespace.cache.discard_blocks(np.array([block]))
    fixture.stored("a", b"a")
    assert fixture.usage("orphaned", "retained") == (1, 1)
    assert retain(fixture, b"a") == (1, 0, 0)
    assert fixture.usage("orphaned", "retained", "pinned") == (0, 1, 1)


def test_an_operator_ends_all_or_those_of_a_label() -> None:
    fixture = start("a", "b")
    retain(fixture, LETTERS[:4], label="x")
    retain(fixture, LETTERS[3:5], label="y", session="b")
    retain(fixture, LETTERS[5:6], session="b")

    def release(label: str | None) -> int:
        *_, action = fixture.send("operator", ReleaseRetained(4, FINGERPRINT.name, label))
        assert isinstance(action.message, wire.Released)
        return action.message.nbytes // PAGE

    assert [release("x"), release("x"), release(None)] == [3, 0, 3]
    assert fixture.usage("retained", "pinned") == (0, 0)
    wrong = ReleaseRetained(4, "unknown")
    assert fixture.error("operator", wrong) == (Code.UNKNOWN_NAMESPACE, "unknown")


@pytest.mark.parametrize("message", [Retain(9, (b"ab",), 1.0), Release((b"ab",))])
def test_wrong_keys_are_refused(message: wire.ClientMessage) -> None:
    fixture = start()
    assert fixture.error("a", message) == (Code.BAD_KEY, "6162")
    assert fixture.usage("hints_refused") == (1,)
    assert fixture.error("outside", message)[0] == Code.UNKNOWN_NAMESPACE


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3600.5, math.nan, math.inf])
def test_the_time_is_bounded(seconds: float) -> None:
    with pytest.raises(Refused):
        decode_client_message(encode(Retain(9, (b"a",), seconds)))
