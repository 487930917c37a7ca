"""The trailer of an object: proves that a block is whole, and that it is the block of this name.

That of an encrypted block has its seal at the end, and no checksum: that is in the seal.
"""

from __future__ import annotations

import hashlib
import struct
import threading

from kvferry.daemon.tiers.block_memory import BounceBuffer
from kvferry.daemon.tiers.mooncake.store_client import StoreClient

_FORMAT = struct.Struct("<8sIxxxxQQ16s")
_MAGIC, _VERSION = b"kvferry\x00", 1
TRAILER_BYTES = 64
# Trailers that one call has memory for.
MAX_TRAILERS = 1024


class Trailers:
    """Registered memory for the trailers of one call of a thread. nbytes: of each.

    seal_bytes: at the end of each trailer; 0 if blocks are not encrypted.
    """

    def __init__(self, store: StoreClient, seal_bytes: int = 0) -> None:
        self.nbytes = TRAILER_BYTES + seal_bytes
        self._buffer = BounceBuffer(MAX_TRAILERS * self.nbytes)
        store.register(self._buffer.address, self._buffer.nbytes)

    def address(self, place: int) -> int:
        return self._buffer.address + place * self.nbytes

    def clear(self, count: int) -> None:
        """Make the first trailers invalid. A trailer that is valid later came from the store."""
        self._buffer.view[: count * self.nbytes] = bytes(count * self.nbytes)

    def write(self, place: int, name: str, nbytes: int, checksum: int, seal: bytes = b"") -> None:
        at = place * self.nbytes
        _FORMAT.pack_into(self._buffer.view, at, _MAGIC, _VERSION, nbytes, checksum, _hash_of(name))
        self._buffer.view[at + TRAILER_BYTES : at + self.nbytes] = seal

    def read_seal(self, place: int) -> bytes:
        at = place * self.nbytes
        return bytes(self._buffer.view[at + TRAILER_BYTES : at + self.nbytes])

    def read(self, place: int, name: str, nbytes: int) -> int | None:
        """The checksum; None if this is not the trailer of a block of this name and size."""
        fields = _FORMAT.unpack_from(self._buffer.view, place * self.nbytes)
        checksum: int = fields[3]
        expected = (_MAGIC, _VERSION, nbytes, checksum, _hash_of(name))
        return checksum if fields == expected else None


class ThreadTrailers(threading.local):
    """`trailers`: those of the calling thread. seal_bytes: see Trailers."""

    def __init__(self, store: StoreClient, seal_bytes: int = 0) -> None:
        self.trailers = Trailers(store, seal_bytes)


def _hash_of(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
