"""The command queue: order, timeouts and wake-ups."""

from __future__ import annotations

import threading
import time

from kvferry.daemon.device.command_queue import CommandQueue


def take_within(queue: CommandQueue[int], timeout: float | None) -> int | None:
    queue.wait_for_command(timeout)
    return queue.take_command()


def test_commands_taken_before_a_wait_do_not_end_it() -> None:
    queue = CommandQueue[int]()
    queue.put_command(1)
    queue.put_command(2)
    assert take_within(queue, 0.05) == 1
    assert take_within(queue, 0.05) == 2
    begin = time.monotonic()
    assert take_within(queue, 0.05) is None
    assert time.monotonic() >= begin + 0.05


def test_a_command_wakes_a_waiting_thread() -> None:
    queue = CommandQueue[int]()
    timer = threading.Timer(0.05, queue.put_command, [7])
    timer.start()
    while (command := take_within(queue, None)) is None:
        pass
    assert command == 7
    timer.join()


def test_short_waits_end_while_commands_arrive() -> None:
    """A SimpleQueue can wait for ever with a timeout of 20 us if other threads take the GIL."""
    queue, count = CommandQueue[int](), 0

    def put() -> None:
        for number in range(3000):
            queue.put_command(number)
            sum(range(50))

    threads = [threading.Thread(target=put) for _ in range(2)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    while count < 6000:
        count += take_within(queue, 20e-6) is not None
        assert time.monotonic() < began + 30
    for thread in threads:
        thread.join()
    for _ in range(2000):
        assert take_within(queue, 20e-6) is None
