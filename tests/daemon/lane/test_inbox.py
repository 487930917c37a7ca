"""Orders come in order, and no nap is longer than asked for."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.daemon.lane.inbox import AWAKE, CALLED, RESTED, Inbox
from kvferry.testing.engine import until


def test_orders_come_in_the_order_they_were_put() -> None:
    inbox = Inbox[int]()
    for number in range(5):
        inbox.put(number)
    assert [inbox.take() for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_patience_has_an_end() -> None:
    inbox = Inbox[int]()
    assert slept(inbox, 0.001) is None
    inbox.put(1)
    assert slept(inbox, 0.001) == 1
    assert slept(inbox, 0.001) is None


@pytest.mark.parametrize("patience", [0, 0.05])
def test_a_nap_does_not_end_for_what_was_taken_before_it(patience: float) -> None:
    inbox = Inbox[int]()
    inbox.put(1)
    inbox.put(2)
    assert slept(inbox, patience) == 1
    assert slept(inbox, patience) == 2
    begin = time.monotonic()
    assert slept(inbox, 0.05) is None
    assert time.monotonic() >= begin + 0.05


def test_who_sleeps_is_woken() -> None:
    inbox = Inbox[int]()
    woken = threading.Timer(0.05, inbox.put, [7])
    woken.start()
    while (order := slept(inbox, None)) is None:
        pass
    assert order == 7


def rested(inbox: Inbox[int]) -> None:
    """Wait until whoever takes from this has slept for long enough."""
    until(lambda: inbox.helm.free and inbox._rested())


@pytest.fixture
def lane() -> Iterator[Inbox[int]]:
    """Somebody sleeps until a 0 comes, taking orders."""
    inbox = Inbox[int]()

    def run() -> None:
        while (order := inbox.take()) != 0:
            if order is None:
                inbox.wait(None)

    thread = threading.Thread(target=run)
    thread.start()
    rested(inbox)
    yield inbox
    inbox.put(0)
    thread.join()


def test_while_the_lane_sleeps_who_puts_begins(lane: Inbox[int]) -> None:
    begun: list[int] = []
    at = lane._rested_at
    lane.put(1, begun.append)
    assert begun == [1]
    until(lambda: lane._rested_at != at)  # it has woken, and sleeps again
    rested(lane)
    lane.put(2, begun.append)
    assert begun == [1, 2]


def test_the_helm_is_given_back_whatever_happens(lane: Inbox[int]) -> None:
    def sink(order: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lane.put(1, sink)
    until(lambda: lane.helm.free)


def test_in_a_long_nap_others_begin_and_in_a_short_one_they_do_not() -> None:
    inbox, begun = Inbox[int](), list[int]()
    for patience, number in ((60.0, 1), (RESTED, 2)):
        lane = threading.Thread(target=inbox.wait, args=[patience])
        lane.start()
        if patience > RESTED:
            until(lambda: inbox.helm.free)
        inbox.put(number, begun.append)
        lane.join()
    assert (begun, inbox.take()) == ([1], 2)


def test_while_the_lane_is_awake_or_has_orders_they_wait_for_it() -> None:
    inbox, begun = Inbox[int](), list[int]()
    inbox.put(1, begun.append)
    inbox.helm.leave()
    inbox.put(2, begun.append)
    inbox.helm.take()
    assert [inbox.take(), inbox.take(), begun] == [1, 2, []]


@pytest.mark.parametrize("patience", [None, 60.0])
def test_only_for_an_order_the_lane_waits_less_for_others_than_they_for_it(
    patience: float | None,
) -> None:
    inbox, before = Inbox[int](), sys.getswitchinterval()
    bell, seen = inbox._bell, list[float]()

    def ring() -> None:
        seen.append(sys.getswitchinterval())
        bell.release()

    def put() -> None:
        until(lambda: inbox._sleeps)
        seen.append(sys.getswitchinterval())
        inbox.put(1)

    try:
        inbox.wait(1e-6)
        inbox._bell = cast(Any, SimpleNamespace(acquire=bell.acquire, release=ring))
        other = threading.Thread(target=put)
        other.start()
        inbox.wait(patience)
        other.join()
        seen.append(sys.getswitchinterval())
        inbox.put(2)
    finally:
        sys.setswitchinterval(before)
    assert seen == pytest.approx([AWAKE, CALLED, AWAKE, AWAKE])


def test_short_naps_end_while_orders_come_and_go() -> None:
    """What a SimpleQueue's timeout does not survive: 20 us, and threads that take the GIL away."""
    inbox, taken, done = Inbox[int](), 0, threading.Event()

    def put() -> None:
        for number in range(3000):
            inbox.put(number)
            sum(range(50))
        done.set()

    threads = [threading.Thread(target=put) for _ in range(2)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    naps = 0
    while taken < 6000:
        naps += 1
        taken += slept(inbox, 20e-6) is not None
        assert time.monotonic() < began + 30
    for thread in threads:
        thread.join()
    for _ in range(2000):
        assert slept(inbox, 20e-6) is None


def slept(inbox: Inbox[int], patience: float | None) -> int | None:
    inbox.wait(patience)
    return inbox.take()
