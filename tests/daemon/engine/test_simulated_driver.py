"""The simulated device keeps the order that CUDA guarantees."""

from __future__ import annotations

import numpy as np

from .simulated_driver import SimulatedDriver


def test_a_wait_keeps_its_record_if_the_event_is_recorded_again() -> None:
    """The handle of a released event is reused for another record."""
    for seed in range(20):
        device = SimulatedDriver(seed)
        first, second, other = (device.create_stream() for _ in range(3))
        memory = np.array([[7] * 64, [1] * 64, [0] * 64], dtype=np.uint8)
        row_0, row_1, row_2 = (row.ctypes.data for row in memory)
        device.call("cuMemcpyAsync", row_1, row_0, 64, first)
        event = device.record(first)
        device.call("cuStreamWaitEvent", second, event.handle, 0)
        device.call("cuMemcpyAsync", row_2, row_1, 64, second)
        handle = event.handle
        del event
        reused = device.record(other)
        assert reused.handle == handle
        while not device.reached(reused):
            pass
        device.settle()
        assert memory[2].tolist() == [7] * 64
