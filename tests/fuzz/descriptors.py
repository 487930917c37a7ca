"""The descriptor socket: packets with descriptors of any kind.

Each packet has one typed reply, or its connection is closed. A session holds a bounded number of
descriptors, and after its end none is left open.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from fuzz.case import Run, no_log, pick, steps_decoder
from kvferry.daemon.transport.fd_server import FdServer
from kvferry.proto.codec import decode_descriptor_reply, decode_descriptor_request, encode
from kvferry.proto.errors import KVFerryError
from kvferry.proto.fd_passing import FdHandles, FdRequest, FetchFd, SendFds
from kvferry.proto.messages import Error
from support.fuzz import strange_descriptors
from support.time_limits import TIMEOUT

OPEN, MAX_HELD, MAX_PACKETS = "s1", 4, 8
# A packet of more descriptors is not sent by the kernel.
MAX_FDS = 253


class Packet(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """data: of a request. kinds: of the descriptors, numbers of `strange_descriptors`."""

    data: msgspec.Raw
    kinds: tuple[int, ...] = ()

    def data_is(self, kind: type[FdRequest]) -> bool:
        return isinstance(decode_descriptor_request(bytes(self.data)), kind)


decode_packets = steps_decoder(Packet)


def seeds() -> list[bytes]:
    send, fetch = (
        msgspec.Raw(encode(SendFds(OPEN))),
        [msgspec.Raw(encode(FetchFd(OPEN, n))) for n in range(3)],
    )
    stranger = msgspec.Raw(encode(SendFds("s2")))
    cases = [
        [Packet(send, (11,)), Packet(fetch[1])],
        [Packet(send, (11, 13)), Packet(fetch[2]), Packet(fetch[2])],
        *([Packet(send, (kind,))] for kind in range(14)),
        [Packet(stranger, (11,)), Packet(fetch[0], (11,))],
        [Packet(send, (11,) * 5), Packet(send), Packet(send, (4,) * 4)],
    ]
    return [msgspec.msgpack.encode(case) for case in cases]


class ServedSocket:
    """A descriptor socket for one open session."""

    def __init__(self, folder: Path, kinds: list[int]) -> None:
        self._path, self._kinds = folder / "fds.sock", kinds
        self._runner = asyncio.Runner()
        self._baseline = 0

    def close(self) -> None:
        self._runner.close()

    def check_packets(self, data: bytes) -> None:
        packets = decode_packets(data)[:MAX_PACKETS]
        self._runner.run(self._exchange_all(packets))

    async def _exchange_all(self, packets: Sequence[Packet]) -> None:
        self._baseline = self._baseline or _count_fds()
        admission = SimpleNamespace(check_process=lambda process: None)
        endpoint = SimpleNamespace(admission=admission, descriptors=self._path)
        self._path.unlink(missing_ok=True)
        server = FdServer(cast(Any, endpoint), lambda: {OPEN}, _refusal, MAX_HELD)
        try:
            for packet in packets:
                await self._exchange(packet)
                assert len(server._held[OPEN]) <= MAX_HELD
                assert server._held.keys() <= {OPEN}, "descriptors of a session that is not open"
        finally:
            server.close()
        end = time.monotonic() + TIMEOUT
        while _count_fds() > self._baseline:
            assert time.monotonic() < end, "descriptors are left open"
            await asyncio.sleep(0.001)

    async def _exchange(self, packet: Packet) -> None:
        fds = [pick(self._kinds, kind) for kind in packet.kinds[:MAX_FDS]]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.setblocking(False)
            client.connect(str(self._path))
            with suppress(OSError):  # too long for a packet
                socket.send_fds(client, [bytes(packet.data)], fds)
            client.shutdown(socket.SHUT_WR)
            reply, received = await _receive(client)
        for descriptor in received:
            os.close(descriptor)
        if reply:
            message = decode_descriptor_reply(reply)
            is_fetch = isinstance(message, FdHandles) and packet.data_is(FetchFd)
            assert len(received) == int(is_fetch)


async def _receive(client: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(client, readable.set)
    try:
        await asyncio.wait_for(readable.wait(), TIMEOUT)
    finally:
        loop.remove_reader(client)
    try:
        reply, received, _, _ = socket.recv_fds(client, 1 << 20, MAX_FDS)
    except ConnectionResetError:
        return b"", []
    return reply, received


def _refusal(error: KVFerryError) -> Error:
    return Error(None, error.info)


def _count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def open_socket() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder, strange_descriptors() as strange, no_log():
        served = ServedSocket(Path(folder), [*strange.values()])
        try:
            yield served.check_packets
        finally:
            served.close()
