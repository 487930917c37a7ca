"""Pins of a session."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.daemon.core.actions import FreeDeferred, SendMessage
from kvferry.daemon.core.session_pins import LEAST_PINS, SOME
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import MAX_KEYS
from support.counted_key import CountedKey
from support.namespaces_fixture import PAGE, NamespacesFixture, each, free_all, store


def test_pins_are_counted() -> None:
    fixture = NamespacesFixture("a", "b")
    fixture.stored("a", b"abcd")
    fixture.send("a", wire.Pin(each(b"abab")))
    fixture.send("b", wire.Pin(each(b"a")))
    assert fixture.usage("pinned") == (2,)
    assert fixture.refused("a", store(b"efg")) == Code.CACHE_FULL
    fixture.send("a", wire.Unpin(each(b"aab")))
    assert fixture.usage("pinned") == (2,)
    fixture.send("a", wire.Unpin(each(b"b")))
    assert fixture.usage("pinned") == (1,)
    fixture.stored("a", b"efg")
    assert fixture.loadable("a") == b"aefg"
    fixture.send("b", wire.Unpin(each(b"a")))
    fixture.stored("a", b"bcd")
    assert fixture.loadable("a", b"a") == b""


def test_the_reply_to_a_pin_says_which_keys_are_loadable() -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"abc")
    fixture.submit("a", store(b"d"))  # pending
    for keys, held in ((b"ab", 2), (b"adb", 1), (b"xab", 0), (b"", 0)):
        assert fixture.send("a", wire.Pin(each(keys), 7)) == [
            SendMessage("a", wire.Pinned(7, held))
        ]
    assert fixture.usage("pinned") == (2,)
    assert fixture.refused("a", store(b"efg")) == Code.CACHE_FULL  # a and b are held


def test_the_oldest_pin_of_a_key_is_released_first() -> None:
    """Pins from before a reset hold blocks that are orphaned."""
    fixture = NamespacesFixture("a")
    for number in range(3):
        fixture.stored("a", b"a")
        fixture.send("a", wire.Pin(each(b"a")))
        if number < 2:
            fixture.send("a", wire.Reset(number))
    usage = [fixture.usage("orphaned", "pinned")]
    for _ in range(3):
        fixture.send("a", wire.Unpin(each(b"a")))
        usage.append(fixture.usage("orphaned", "pinned"))
    assert usage == [(2, 1), (1, 1), (0, 1), (0, 0)]


def test_unpinning_more_often_than_pinned_unpins_nothing() -> None:
    fixture = NamespacesFixture("a", "b")
    fixture.stored("a", b"ab")
    fixture.send("a", wire.Pin(each(b"ab")))
    fixture.send("b", wire.Pin(each(b"b")))
    assert fixture.error("a", wire.Unpin(each(b"abb"))) == (Code.NOT_PINNED, b"b".hex())
    assert fixture.usage("pinned") == (2,)


def test_pins_of_a_session_are_bounded() -> None:
    """Pins of absent keys count, because the daemon stores each pin."""
    fixture = NamespacesFixture("a", "b")
    fixture.stored("a", b"abcd")
    for _ in range(LEAST_PINS // MAX_KEYS - 1):
        fixture.send("a", wire.Pin((b"w",) * MAX_KEYS))
    fixture.send("a", wire.Pin((b"w",) * (MAX_KEYS - 16)))
    fixture.send("a", wire.Pin(each(b"aaaabbbbxxxyyy")))
    assert fixture.error("a", wire.Pin(each(b"cda"))) == (Code.BUSY, "3")
    assert fixture.usage("pinned") == (2,)
    assert fixture.send("a", wire.Pin(each(b"cz"))) == []
    assert fixture.error("a", wire.Pin(each(b"d")))[0] == Code.BUSY
    assert fixture.send("b", wire.Pin(each(b"d"))) == []
    fixture.send("a", wire.Unpin(each(b"xz")))
    assert fixture.send("a", wire.Pin(each(b"da"))) == []
    fixture.close_sessions("a", "b")
    assert fixture.usage("pinned") == (0,)


def test_many_pins_of_a_key_are_released_in_linear_time() -> None:
    fixture = NamespacesFixture("a", "b")
    fixture.stored("a", b"a")
    fixture.send("b", wire.Pin(each(b"a" * 200)))
    assert count_calls(lambda: fixture.core.close_session("b")) < 4 * 200


def test_many_pins_of_an_ended_session_are_released_in_steps() -> None:
    """A million take seconds, in which the event loop would do nothing else."""
    fixture = NamespacesFixture("a", "b")
    fixture.stored("a", b"ab")
    fixture.send("b", wire.Pin(each(b"ab") * (2 * SOME)))
    (*_, sweep) = fixture.core.close_session("b")
    assert isinstance(sweep, FreeDeferred)
    assert fixture.usage("pinned") != (0,)
    assert free_all(sweep) > 1
    assert fixture.usage("pinned") == (0,)


def test_a_further_pin_of_a_key_takes_little_memory() -> None:
    """A client may have 65,536 pins, and 8 such clients at most 512 MB."""
    fixture = NamespacesFixture("a", fingerprint=Fingerprint("llama", PAGE, key_bytes=2))
    keys = tuple(n.to_bytes(2, "big") for n in range(MAX_KEYS))
    tracemalloc.start()
    try:
        fixture.send("a", wire.Pin(keys))
        first, _ = tracemalloc.get_traced_memory()
        fixture.send("a", wire.Pin(keys))
        second, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert second - first < 300 * len(keys)


@pytest.mark.parametrize("make", [wire.Pin, wire.Touch])
def test_keys_of_another_length_are_refused(make: Any) -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"a")
    assert fixture.error("a", make((b"a", b"bc"))) == (Code.BAD_KEY, b"bc".hex())
    assert fixture.usage("pinned") == (0,)


def count_calls(function: Callable[[], object]) -> int:
    """The number of Python functions that it calls."""
    profiled, events = sys.getprofile(), list[str]()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(profiled)
    return events.count("call")


def test_unpinning_a_key_many_times_takes_linear_time() -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"a")
    many = each(b"a" * 200)
    fixture.send("a", wire.Pin(many))
    assert count_calls(lambda: fixture.send("a", wire.Unpin(many))) < 10 * len(many)


def test_unpinning_many_keys_takes_linear_time() -> None:
    fixture = NamespacesFixture("a")
    fixture.send("a", wire.Pin(each(bytes(range(250)))))
    CountedKey.times = 0
    fixture.send("a", wire.Unpin(tuple(CountedKey([n]) for n in range(250))))
    assert CountedKey.times < 10 * 250
