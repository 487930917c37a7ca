"""A process that reads host blocks and sums them up: what was stored, and what is loaded.

    python -m kvferry.daemon.engine.reader SOCKET THREADS CHUNK_BYTES DESCRIPTOR...

Its threads would share the daemon's GIL, and every block that one of them has read would keep a
small load waiting. Here they do not. XXH3 reads about as fast as one core can. Urgent work, that a
load waits for, has threads of its own.

Each datagram that comes by the socket is a Request, each that goes is its number and the sums. It
ends with the socket: whoever holds the other end is gone then, or wants it to.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

MAX_BYTES = 1 << 20
"""Of a datagram."""
NUMBER = struct.Struct("=Q")
"""An answer begins with the number of its request. Behind it are uint64 sums."""
LOWER = 10
"""How much nicer than the daemon sealing is."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Host blocks to read: numbers in a region that begins at byte `start` of the pool.

    keys: that of each block; none where blocks have none. A sum is of a block's bytes under its
    key, or its number, so that a block in the wrong place does not pass either.
    """

    number: int
    urgent: bool
    start: int
    block_bytes: int
    blocks: bytes
    """int64 each."""
    keys: Sequence[bytes]


class Pool:
    """The host pool to read, from the descriptors of its chunks."""

    def __init__(self, descriptors: Sequence[int], chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks = [_mapped(descriptor) for descriptor in descriptors]

    def sums(self, request: Request) -> array[int]:
        blocks, nbytes = array("q", request.blocks), request.block_bytes
        seeds = [xxhash.xxh3_64_intdigest(key) for key in request.keys] or blocks
        return array(
            "Q",
            (
                self._sum(request.start + block * nbytes, nbytes, seed)
                for block, seed in zip(blocks, seeds, strict=True)
            ),
        )

    def _sum(self, start: int, nbytes: int, seed: int) -> int:
        digest = xxhash.xxh3_64(seed=seed)
        for part in self._parts(start, nbytes):
            digest.update(part)
        return digest.intdigest()

    def _parts(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """A block may lie across two chunks."""
        end = start + nbytes
        while start < end:
            number, at = divmod(start, self._chunk_bytes)
            part = self._chunks[number][at : at + end - start]
            yield part
            start += len(part)


def _mapped(descriptor: int) -> memoryview:
    chunk = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    with contextlib.suppress(OSError):  # the kernel may have no huge pages for shared memory
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(chunk)


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are the daemon's to heed
        signal.signal(number, signal.SIG_IGN)
    descriptor, threads, chunk_bytes, *descriptors = map(int, arguments)
    pool, peer = Pool(descriptors, chunk_bytes), socket.socket(fileno=descriptor)
    for each in descriptors:
        os.close(each)

    def answer(request: Request) -> None:
        try:
            peer.send(NUMBER.pack(request.number) + pool.sums(request).tobytes())
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    urgent = ThreadPoolExecutor(threads, "urgent")
    patient = ThreadPoolExecutor(threads, "patient", _be_nice)
    decoder = msgspec.msgpack.Decoder(Request)
    while data := peer.recv(MAX_BYTES):
        request = decoder.decode(data)
        (urgent if request.urgent else patient).submit(answer, request)
    os._exit(0)  # nobody waits for what the threads have begun


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + LOWER)


if __name__ == "__main__":
    main()
