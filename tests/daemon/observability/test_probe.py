"""The probe with a FakeCore."""

from __future__ import annotations

import pytest

from kvferry.daemon.observability.probe import PAGE
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError
from kvferry.proto.messages import AllocateKVCaches, Submit
from support.time_limits import TIMEOUT

from .conftest import FakeCore


async def test_a_round_copies_a_block_to_the_device_and_back(fake_core: FakeCore) -> None:
    for _ in range(3):
        assert await fake_core.probe.run_round() < TIMEOUT
        assert fake_core.memory[:PAGE] == fake_core.memory[PAGE:]
    assert [type(message) for message in fake_core.requests] == [AllocateKVCaches, *[Submit] * 6]
    assert fake_core.device[0] != fake_core.device[1]


async def test_wrong_bytes_are_detected(fake_core: FakeCore) -> None:
    await fake_core.probe.run_round()
    fake_core.wrong = True
    with pytest.raises(KVFerryError, match="other bytes") as caught:
        await fake_core.probe.run_round()
    assert caught.value.code == Code.COPY_FAILED


async def test_refused_memory_is_requested_again(fake_core: FakeCore) -> None:
    fake_core.error = ErrorInfo(Code.DRIVER, "out of memory")
    for _ in range(2):
        with pytest.raises(KVFerryError, match="out of memory"):
            await fake_core.probe.run_round()
    fake_core.error = None
    await fake_core.probe.run_round()
    assert [type(message) for message in fake_core.requests[:3]] == [AllocateKVCaches] * 3
