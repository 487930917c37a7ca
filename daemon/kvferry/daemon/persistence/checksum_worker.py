"""The checksum process: computes XXH3 checksums of host blocks for the daemon.

    python -m kvferry.daemon.persistence.checksum_worker TITLE SOCKET DAEMON THREADS CHUNK FD...

It maps the chunks of the host pool, of CHUNK bytes each, read-only, so it cannot change a block.
Its threads do not share the daemon's GIL. Each request is a ChecksumRequest; a reply has the
checksums as uint64. The process ends when the daemon disconnects.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import traceback
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from kvferry.daemon.daemon_connection import READY, connect_to_daemon

# Added to the daemon's nice value, because copies are more urgent than checksums.
NICE_INCREMENT = 10


class ChecksumRequest(msgspec.Struct, frozen=True, array_like=True):
    """Host blocks to read: int64 numbers in a region that begins at byte `start` of the pool.

    keys: one for each block, or none. The seed of a checksum is the key of its block, or the
    number, so that a block in the wrong place does not match.
    """

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
        digest = xxhash.xxh3_64(seed=seed)  # releases the GIL in all versions of xxhash
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
    with contextlib.suppress(OSError):  # the kernel may not support huge pages of shared memory
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(chunk)


def main() -> None:
    daemon, arguments = connect_to_daemon(NICE_INCREMENT)
    threads, chunk_bytes, *descriptors = map(int, arguments)
    pool = PoolReader(descriptors, chunk_bytes)
    for descriptor in descriptors:
        os.close(descriptor)

    def reply(number: int, request: ChecksumRequest) -> None:
        try:
            daemon.send(number, pool.checksums(request).tobytes())
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    executor = ThreadPoolExecutor(threads)
    decoder = msgspec.msgpack.Decoder(ChecksumRequest)
    daemon.send(READY)
    while (message := daemon.receive()) is not None:
        number, payload = message
        executor.submit(reply, number, decoder.decode(payload))
    os._exit(0)  # do not wait for the threads


if __name__ == "__main__":
    main()
