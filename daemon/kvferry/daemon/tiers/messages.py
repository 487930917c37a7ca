"""What the daemon and the process of a tier send each other: one datagram per message.

Requests are answered in any order. Lists of numbers travel as the bytes of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from kvferry.daemon.tiers.base import TierUsage

# Bytes of a datagram, and keys in a request: they fit the default buffer of a socket.
MAX_BYTES = 192 << 10
MAX_KEYS = 1024
# In the answer to a lookup that failed.
FAILED = 2


class TierArguments(msgspec.Struct, frozen=True):
    """What the process gets on its command line, as JSON.

    module: has a function `open_tier(options, memory)`. chunks: descriptors of the pool's chunks,
    all but the last of `chunk_bytes`; together they have `pool_bytes`. daemon: its pid.
    """

    daemon: int
    socket: int
    chunks: tuple[int, ...]
    chunk_bytes: int
    pool_bytes: int
    module: str
    options: dict[str, Any]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """number: of the request, which its answer repeats."""


class ContainsRequest(_Message, frozen=True):
    number: int
    namespace: str
    keys: Sequence[bytes]


class FetchRequest(_Message, frozen=True):
    """offsets: int64, of each block in the pool. deadline: time.monotonic() in seconds."""

    number: int
    namespace: str
    keys: Sequence[bytes]
    offsets: bytes
    block_bytes: int
    deadline: float


class PutRequest(_Message, frozen=True):
    """offsets: int64, of each block in the pool. checksums: uint64.

    generation, model: see Blocks.
    """

    number: int
    namespace: str
    keys: Sequence[bytes]
    offsets: bytes
    block_bytes: int
    checksums: bytes
    generation: int
    model: str = ""


class DropRequest(_Message, frozen=True):
    """keys: None for the whole namespace."""

    number: int
    namespace: str
    keys: Sequence[bytes] | None


class UsageRequest(_Message, frozen=True):
    """namespaces: those in the pool; of one in use the name of its store, else an empty one."""

    number: int
    namespaces: dict[str, str]


class Answer(_Message, frozen=True):
    """results: a byte for each key, a Result; of `contains`, 0, 1 or FAILED. generation: of the
    namespace after a `contains` or a drop; -1: not known."""

    number: int
    results: bytes
    generation: int = -1


class UsageAnswer(_Message, frozen=True):
    """generations: as in Answer, of the namespaces in the request."""

    number: int
    usage: TierUsage
    generations: dict[str, int] = {}


class Started(_Message, frozen=True):
    """The tier is open."""

    usage: TierUsage


class LogLine(_Message, frozen=True):
    """For the daemon's log. The tier could not be opened if `fatal`."""

    level: str
    event: str
    fields: dict[str, Any]
    fatal: bool = False


TierRequest: TypeAlias = ContainsRequest | FetchRequest | PutRequest | DropRequest | UsageRequest
TierReply: TypeAlias = Answer | UsageAnswer | Started | LogLine

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(TierRequest).decode
decode_reply = msgspec.msgpack.Decoder(TierReply).decode
