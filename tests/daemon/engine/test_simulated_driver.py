"""The device on paper keeps the order that CUDA promises."""

from __future__ import annotations

import numpy as np

from .simulated_driver import SimulatedDriver


def test_a_wait_for_an_event_holds_when_it_is_recorded_again() -> None:
    """As its handle is when nobody holds the event any more."""
    for seed in range(20):
        device = SimulatedDriver(seed)
        first, second, other = (device.create_stream() for _ in range(3))
        memory = np.array([[7] * 64, [1] * 64, [0] * 64], dtype=np.uint8)
        one, two, three = (row.ctypes.data for row in memory)
        device.call("cuMemcpyAsync", two, one, 64, first)
        gathered = device.record(first)
        device.call("cuStreamWaitEvent", second, gathered.handle, 0)
        device.call("cuMemcpyAsync", three, two, 64, second)
        handle = gathered.handle
        del gathered
        again = device.record(other)
        assert again.handle == handle
        while not device.reached(again):
            pass
        device.settle()
        assert memory[2].tolist() == [7] * 64
