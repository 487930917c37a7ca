"""Commands arrive in order, and no sleep is longer than asked for."""

from __future__ import annotations

import threading
import time

from kvferry.daemon.device.command_queue import CommandQueue


def wait_and_take(queue: CommandQueue[int], timeout: float | None) -> int | None:
    queue.wait_for_command(timeout)
    return queue.take_command()


def test_commands_arrive_in_the_order_in_which_they_were_put() -> None:
    queue = CommandQueue[int]()
    for number in range(5):
        queue.put_command(number)
    assert [queue.take_command() for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_a_wait_ends_at_its_timeout() -> None:
    queue = CommandQueue[int]()
    assert wait_and_take(queue, 0.001) is None
    queue.put_command(1)
    assert wait_and_take(queue, 0.001) == 1
    assert wait_and_take(queue, 0.001) is None


def test_a_wait_does_not_end_for_commands_that_were_taken_before_it() -> None:
    queue = CommandQueue[int]()
    queue.put_command(1)
    queue.put_command(2)
    assert wait_and_take(queue, 0.05) == 1
    assert wait_and_take(queue, 0.05) == 2
    begin = time.monotonic()
    assert wait_and_take(queue, 0.05) is None
    assert time.monotonic() >= begin + 0.05


def test_a_command_wakes_a_thread_that_waits() -> None:
    queue = CommandQueue[int]()
    timer = threading.Timer(0.05, queue.put_command, [7])
    timer.start()
    while (command := wait_and_take(queue, None)) is None:
        pass
    assert command == 7
    timer.join()


def test_short_waits_end_while_commands_arrive() -> None:
    """The timeout of a SimpleQueue does not survive 20 us and threads that take the GIL away."""
    queue, taken = CommandQueue[int](), 0

    def put() -> None:
        for number in range(3000):
            queue.put_command(number)
            sum(range(50))

    threads = [threading.Thread(target=put) for _ in range(2)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    while taken < 6000:
        taken += wait_and_take(queue, 20e-6) is not None
        assert time.monotonic() < began + 30
    for thread in threads:
        thread.join()
    for _ in range(2000):
        assert wait_and_take(queue, 20e-6) is None
