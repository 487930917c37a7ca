"""Messages between the daemon and the process of a tier, as payloads of daemon_connection.py.

A request has 1 to MAX_TIER_KEYS keys. Requests are answered in any order. Lists of numbers travel
as the bytes of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from kvferry.daemon.tiers.base import TierUsage

# In the answer to a lookup that failed.
FAILED = 2


class TierArguments(msgspec.Struct, frozen=True):
    """The command line of the process, as JSON.

    module: has a function `open_tier(options, memory)`. chunks: descriptors of the pool's chunks,
    all but the last of `chunk_bytes`; together they have `pool_bytes`.
    """

    chunks: tuple[int, ...]
    chunk_bytes: int
    pool_bytes: int
    module: str
    options: dict[str, Any]


class TierBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Host blocks of one namespace. offsets: int64, of each block in the pool. nbytes: of each
    block. model: see Blocks."""

    namespace: str
    keys: Sequence[bytes]
    offsets: bytes
    nbytes: int
    model: str = ""


class _Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message that begins with the name of its class."""


# Requests


class ContainsRequest(_Tagged, frozen=True):
    namespace: str
    keys: Sequence[bytes]


class FetchRequest(_Tagged, frozen=True):
    """deadline: time.monotonic() in seconds."""

    blocks: TierBlocks
    deadline: float


class PutRequest(_Tagged, frozen=True):
    """checksums: uint64. generation: see Blocks."""

    blocks: TierBlocks
    checksums: bytes
    generation: int


class DropRequest(_Tagged, frozen=True):
    """keys: None for the whole namespace."""

    namespace: str
    keys: Sequence[bytes] | None


class UsageRequest(_Tagged, frozen=True):
    """namespaces: those in the pool; of one in use the name of its store, else an empty one.

    The reply is a UsageAnswer; those to other requests are an Answer.
    """

    namespaces: dict[str, str]


# Replies


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """results: a byte for each key, a Result; of `contains`, 0, 1 or FAILED. generation: of the
    namespace after a `contains` or a drop; -1: not known."""

    results: bytes
    generation: int = -1


class UsageAnswer(msgspec.Struct, frozen=True, array_like=True):
    """generations: as in Answer, of the namespaces in the request."""

    usage: TierUsage
    generations: dict[str, int] = {}


# Notices


class Started(_Tagged, frozen=True):
    """The tier is open. Sent as READY."""

    usage: TierUsage


class LogLine(_Tagged, frozen=True):
    """For the daemon's log. The tier could not be opened if `fatal`."""

    level: str
    event: str
    fields: dict[str, Any]
    fatal: bool = False


TierRequest: TypeAlias = ContainsRequest | FetchRequest | PutRequest | DropRequest | UsageRequest

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(TierRequest).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_usage = msgspec.msgpack.Decoder(UsageAnswer).decode
decode_notice = msgspec.msgpack.Decoder(Started | LogLine).decode
