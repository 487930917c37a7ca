"""Records of regions and kept tensors, as they are stored for the next daemon.

A record states the owner of a region, its bytes of the host pool and its layout or fingerprint. Its
block table states which blocks are committed and under which key. Both outlive the daemon that
wrote them (persistence/region_store.py, persistence/kept_tensor_store.py). Event loop only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from kvferry.daemon.core.composition import Composition
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Count, Epoch, KVLayout, Positive


@dataclass(frozen=True, slots=True)
class RegionOwner:
    """The owner of a region: an engine or a namespace, by name."""

    kind: str
    name: str


def engine_owner(name: str) -> RegionOwner:
    return RegionOwner("engine", name)


def namespace_owner(name: str) -> RegionOwner:
    return RegionOwner("namespace", name)


Contents: TypeAlias = LayoutArrays | Fingerprint


class RegionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A region: `nbytes` of the pool from `start` on, an engine's (layout) or a namespace's.

    pages, factor: composition of a namespace's host blocks, once an engine has registered in it.
    epoch: of its contents. uid: the user that an engine's region belongs to.
    """

    name: str
    start: Count
    nbytes: Positive
    layout: LayoutArrays | None = None
    fingerprint: Fingerprint | None = None
    policy: str = "lru"
    threshold: Positive = 1
    epoch: Epoch = 0
    pages: tuple[tuple[int, ...], ...] | None = None
    factor: Count = 0
    uid: int | None = None

    @property
    def owner(self) -> RegionOwner:
        return (namespace_owner if self.layout is None else engine_owner)(self.name)

    @property
    def contents(self) -> Contents:
        contents = self.fingerprint or self.layout
        if contents is None or (self.fingerprint and self.layout):
            both = "both a layout and a fingerprint" if contents else "no layout and no fingerprint"
            message = f"the record of region {self.name!r} has {both}"
            raise Refused(Code.BAD_LAYOUT, message, self.name)
        return contents

    @property
    def block_bytes(self) -> int:
        return self.contents.host_block_bytes

    @property
    def num_blocks(self) -> int:
        return self.nbytes // self.block_bytes

    @property
    def composition(self) -> int:
        """The number of the composition of host blocks: blocks of a namespace with another one are
        not exchangeable. 0: no engine has registered in it."""
        return 0 if self.pages is None else Composition(self.pages, self.factor).number

    @property
    def key_bytes(self) -> int:
        """Bytes of a key; 0 where host blocks have none."""
        return 0 if self.fingerprint is None else self.fingerprint.key_bytes


class RecoveredRegion(msgspec.Struct, frozen=True):
    """A region of an earlier daemon.

    lines: the memory of its block table (block_lines.py); None: the region gets new lines.
    """

    record: RegionRecord
    lines: np.ndarray[Any, np.dtype[np.void]] | None = None


class KeptTensorsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV tensors kept for an engine: their layout, and the owner of their host blocks."""

    engine: str
    layout: LayoutArrays
    nbytes: Positive
    owner: RegionOwner
    uid: int | None = None


T = TypeVar("T")


def encode_record(record: RegionRecord | KeptTensorsRecord) -> bytes:
    """Encode a record; a layout is encoded as on the wire."""
    return _encoder.encode(record)


def decode_record(data: bytes, kind: type[T]) -> T:
    """Raises msgspec.MsgspecError or Refused if `data` is not such a record."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_layout)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec passes these on
        raise msgspec.DecodeError(str(error)) from error


def _to_lists(value: object) -> list[Any]:
    if isinstance(value, LayoutArrays):
        return value.to_lists()
    raise NotImplementedError(f"a record cannot contain a {type(value).__name__}")


def _from_layout(kind: type, value: Any) -> LayoutArrays:
    assert kind is LayoutArrays
    return LayoutArrays.from_layout(msgspec.convert(value, KVLayout))


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_lists)
