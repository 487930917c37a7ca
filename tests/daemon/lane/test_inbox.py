"""Orders come in order, and no nap is longer than asked for."""

from __future__ import annotations

import threading
import time

from kvferry.daemon.lane.inbox import Inbox


def test_orders_come_in_the_order_they_were_put() -> None:
    inbox = Inbox[int]()
    for number in range(5):
        inbox.put(number)
    assert [inbox.get(0) for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_patience_has_an_end() -> None:
    inbox = Inbox[int]()
    assert inbox.get(0.001) is None
    inbox.put(1)
    assert inbox.get(0.001) == 1
    assert inbox.get(0.001) is None  # a bell that rang for an order taken already
    assert inbox.get(0.001) is None


def test_who_sleeps_is_woken() -> None:
    inbox = Inbox[int]()
    woken = threading.Timer(0.05, inbox.put, [7])
    woken.start()
    while (order := inbox.get(None)) is None:
        pass
    assert order == 7


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
        taken += inbox.get(20e-6) is not None
        assert time.monotonic() < began + 30
    for thread in threads:
        thread.join()
    for _ in range(2000):
        assert inbox.get(20e-6) is None
