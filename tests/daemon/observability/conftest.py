"""Fixture: FakeCore, which replaces the core for probes."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from kvferry.daemon.observability.probe import HOST_BYTES, PAGE, Probe
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    ClientMessage,
    DaemonMessage,
    Error,
    Finished,
    Submit,
)
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import CPULoadStoreSpec, Direction


class FakeCore:
    """Performs the requests of a probe at once, on its own memory.

    wrong: stores other bytes. silent: does not reply. error: its reply.
    """

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, HOST_BYTES)
        self.anchor = ctypes.c_char.from_buffer(self.memory)
        self.device = [b"", b""]
        self.wrong = False
        self.silent = False
        self.error: ErrorInfo | None = None
        self.probe = Probe(self.receive, ctypes.addressof(self.anchor))
        self.requests: list[ClientMessage] = []

    def receive(self, message: ClientMessage) -> None:
        self.requests.append(message)
        if not self.silent:
            self.probe.receive_reply(self.reply(message))

    def reply(self, message: ClientMessage) -> DaemonMessage:
        if isinstance(message, AllocateKVCaches):
            region = HostRegion(2, PAGE, False)
            return Error(0, self.error) if self.error else Allocated(0, region, (), ())
        assert isinstance(message, Submit)
        direction = self.copy(message)
        outcome = Outcome.FAILED if self.error else Outcome.DONE
        return Finished((JobResult(message.job_id, direction, outcome, error=self.error),))

    def copy(self, message: Submit) -> Direction:
        load = isinstance(message.src, CPULoadStoreSpec)
        gpu, host = (message.dst, message.src) if load else (message.src, message.dst)
        assert not isinstance(gpu, type(None))
        block, at = int(gpu.block_ids[0]), int(host.block_ids[0]) * PAGE  # type: ignore[union-attr]
        if load:
            self.device[block] = self.memory[at : at + PAGE]
        elif not self.wrong:
            self.memory[at : at + PAGE] = self.device[block]
        return Direction.LOAD if load else Direction.STORE


@pytest.fixture
def fake_core() -> FakeCore:
    return FakeCore()
