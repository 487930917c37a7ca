"""The checksum process: computes XXH3 checksums of host blocks for the daemon.

    python -m kvferry.daemon.persistence.checksum_worker SOCKET THREADS CHUNK_BYTES DESCRIPTOR...

It maps the chunks of the host pool read-only, so it cannot change a block, and its threads do not
share the daemon's GIL. Each received datagram is a ChecksumRequest; each sent datagram has the
request's number followed by the checksums. The process ends when its socket is closed.
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

# Bytes of a datagram.
MAX_BYTES = 1 << 20
# The number of the request, at the head of a reply. uint64 checksums follow.
NUMBER = struct.Struct("=Q")
# Added to the daemon's nice value: copies are more urgent than checksums.
NICER = 10
# Up to this size one call is cheaper than a streaming hash (1.0 against 1.8 us for 4 KiB). Above it
# only a streaming hash releases the GIL in every version of xxhash.
ONE_CALL_BYTES = 64 << 10


class ChecksumRequest(msgspec.Struct, frozen=True, array_like=True):
    """Host blocks to read: int64 numbers in a region that begins at byte `start` of the pool.

    keys: one for each block, or none. A checksum is seeded with the key of its block, or with its
    number, so that a block in the wrong place does not match either.
    """

    number: int
    start: int
    block_bytes: int
    blocks: bytes
    keys: Sequence[bytes]


class PoolReader:
    """The host pool, mapped read-only from the descriptors of its chunks."""

    def __init__(self, descriptors: Sequence[int], chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks = [_mapped(descriptor) for descriptor in descriptors]

    def checksums(self, request: ChecksumRequest) -> array[int]:
        blocks, nbytes = array("q", request.blocks), request.block_bytes
        seeds = [xxhash.xxh3_64_intdigest(key) for key in request.keys] or blocks
        return array(
            "Q",
            (
                self._checksum(request.start + block * nbytes, nbytes, seed)
                for block, seed in zip(blocks, seeds, strict=True)
            ),
        )

    def _checksum(self, start: int, nbytes: int, seed: int) -> int:
        number, at = divmod(start, self._chunk_bytes)
        if nbytes <= ONE_CALL_BYTES and at + nbytes <= self._chunk_bytes:
            return xxhash.xxh3_64_intdigest(self._chunks[number][at : at + nbytes], seed)
        digest = xxhash.xxh3_64(seed=seed)
        for part in self._parts(start, nbytes):
            digest.update(part)
        return digest.intdigest()

    def _parts(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """The parts of a block, which may span chunks of the pool."""
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the daemon handles them
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICER)
    descriptor, threads, chunk_bytes, *descriptors = map(int, arguments)
    pool, peer = PoolReader(descriptors, chunk_bytes), socket.socket(fileno=descriptor)
    for each in descriptors:
        os.close(each)

    def answer(request: ChecksumRequest) -> None:
        try:
            peer.send(NUMBER.pack(request.number) + pool.checksums(request).tobytes())
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    executor = ThreadPoolExecutor(threads)
    decoder = msgspec.msgpack.Decoder(ChecksumRequest)
    while data := peer.recv(MAX_BYTES):
        executor.submit(answer, decoder.decode(data))
    os._exit(0)  # nobody needs the unfinished work of the threads


if __name__ == "__main__":
    main()
