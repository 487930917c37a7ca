"""Messages between the daemon and the process of a tier, as payloads of daemon_connection.py.

A request has 1 to MAX_TIER_KEYS keys. Requests are answered in any order. Lists of numbers travel
as the bytes of an array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from kvferry.daemon.tiers.base import TierUsage

# In the answer to a lookup that failed.
FAILED = 2
# They must fit a datagram.
MAX_NAMED_STORES = 1024


class TierArguments(msgspec.Struct, frozen=True):
    """The command line of the process, as JSON.

    module: has a function `open_tier(options, memory)`. chunks: descriptors of the pool's chunks,
    all but the last of `chunk_bytes`; together they have `pool_bytes`. is_shared: whether the tier
    must be a SharedTier.
    """

    chunks: tuple[int, ...]
    chunk_bytes: int
    pool_bytes: int
    module: str
    options: dict[str, Any]
    is_shared: bool = False


class TierBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Host blocks of one store. offsets: int64, of each block in the pool. nbytes: of each block.
    model: see Blocks."""

    store: str
    keys: Sequence[bytes]
    offsets: bytes
    nbytes: int
    model: str = ""


class _Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message that begins with the name of its class."""


# Requests


class ContainsRequest(_Tagged, frozen=True):
    store: str
    keys: Sequence[bytes]


class FetchRequest(_Tagged, frozen=True):
    """deadline: time.monotonic() in seconds."""

    blocks: TierBlocks
    deadline: float


class PutRequest(_Tagged, frozen=True):
    """checksums: uint64."""

    blocks: TierBlocks
    checksums: bytes


class DropRequest(_Tagged, frozen=True):
    """keys: None for the whole store."""

    store: str
    keys: Sequence[bytes] | None


class UsageRequest(_Tagged, frozen=True):
    """used: names of the stores that engines use. The reply is a TierUsage; those to most other
    requests are an Answer."""

    used: Sequence[str]


class SettleRequest(_Tagged, frozen=True):
    """See SharedTier.settle. The reply has the epochs that it returns; none if it has failed."""

    epochs: Mapping[str, int]


# Replies


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """results: a byte for each key, a Result; of `contains`, 0, 1 or FAILED."""

    results: bytes


# Notices


class Started(_Tagged, frozen=True):
    """The tier is open. Sent as READY. stores: those that it has, MAX_NAMED_STORES at most."""

    usage: TierUsage
    stores: Sequence[str] = ()


class LogLine(_Tagged, frozen=True):
    """For the daemon's log. The tier could not be opened if `fatal`."""

    level: str
    event: str
    fields: dict[str, Any]
    fatal: bool = False


TierRequest: TypeAlias = (
    ContainsRequest | FetchRequest | PutRequest | DropRequest | UsageRequest | SettleRequest
)

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(TierRequest).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_usage = msgspec.msgpack.Decoder(TierUsage).decode
decode_epochs = msgspec.msgpack.Decoder(dict[str, int]).decode
decode_notice = msgspec.msgpack.Decoder(Started | LogLine).decode
