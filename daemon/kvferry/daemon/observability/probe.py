"""The health probe: copies a small block to the device and back, as a client would.

It is a session inside the daemon, with two blocks of device memory and two host blocks at the front
of the pool. A round writes a random pattern into one host block, loads it, stores it into the other
and compares. So it checks the core, the device worker, the queues, both directions and the memory.
Event loop only.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import time
from collections.abc import Callable

from kvferry.proto.errors import Code, Failed, error_of
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    ClientMessage,
    DaemonMessage,
    Error,
    Finished,
    Submit,
)
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)

PAGE = 4096
LAYOUT = KVLayout((TensorLayout(2, PAGE, PAGE),), ((TensorRef(0, PAGE),),))
# Bytes at the front of the pool, in addition to what engines get.
HOST_BYTES = 2 * PAGE


class Probe:
    """send: passes a message to the core. address: of the first byte of the probe's host blocks.

    One round at a time. A round has no deadline of its own and ends when its copies end.
    """

    def __init__(self, send: Callable[[ClientMessage], None], address: int) -> None:
        self._send = send
        self._address = address
        self._reply: asyncio.Future[DaemonMessage] | None = None
        self._rounds = 0
        self._allocated = False

    def allocate_memory(self) -> None:
        """Request device memory, before any client can. The first round waits for the reply."""
        self._reply = asyncio.get_running_loop().create_future()
        self._send(AllocateKVCaches(0, LAYOUT, HOST_BYTES))

    def receive_reply(self, message: DaemonMessage) -> None:
        """Receive a message of the core to the probe's session."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(message)

    async def run_round(self) -> float:
        """Run one probe and return its seconds. Raises KVFerryError if a copy fails or differs."""
        await self._wait_for_memory()
        began = time.monotonic()
        self._rounds += 1
        block = GPULoadStoreSpec([self._rounds % 2])
        pattern = secrets.token_bytes(PAGE)
        ctypes.memmove(self._address, pattern, PAGE)
        await self._copy_block(0, (CPULoadStoreSpec([0]), block))
        await self._copy_block(1, (block, CPULoadStoreSpec([1])))
        if ctypes.string_at(self._address + PAGE, PAGE) != pattern:
            message = (
                f"probe {self._rounds} read back other bytes; check the GPU and the kernel log"
            )
            raise Failed(Code.COPY_FAILED, message, self._rounds)
        return time.monotonic() - began

    async def _wait_for_memory(self) -> None:
        if self._allocated:
            return
        if self._reply is None:
            self.allocate_memory()
        match await self._take_reply():
            case Allocated():
                self._allocated = True
            case Error(_, info):
                raise error_of(info)

    async def _copy_block(self, job_id: int, spec: TransferSpec) -> None:
        self._reply = asyncio.get_running_loop().create_future()
        self._send(Submit(job_id, *spec))
        match await self._take_reply():
            case Finished((result,)) if result.error is not None:
                raise error_of(result.error)
            case Error(_, info):
                raise error_of(info)

    async def _take_reply(self) -> DaemonMessage:
        assert self._reply is not None
        try:
            return await self._reply
        finally:
            self._reply = None
