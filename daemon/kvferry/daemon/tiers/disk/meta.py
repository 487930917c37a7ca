"""The file `meta` of a namespace on disk: the properties of all its slots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.daemon.tiers.disk.slab import slot_bytes_of
from kvferry.daemon.tiers.own_files import read_file
from kvferry.proto.keys import MAX_KEY_BYTES

META = "meta"
# More than the file can have, and more than a block or the slots of a slab can be.
_MAX_FILE_BYTES = 64 << 10
_MAX_BLOCK_BYTES, _MAX_SLOTS = 1 << 40, 1 << 20


class OtherKeyError(Exception):
    """The blocks of a store are encrypted with another key than that of the tier, or only one of
    both has a key."""

    def __str__(self) -> str:
        return "its blocks have another encryption key than tiers.disk.key_file, or none"


class StoreMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The properties of all slots of a namespace. model: for people who list the tier. key_id: of
    the cipher of its blocks; empty if they are not encrypted."""

    block_bytes: Annotated[int, Meta(ge=1, le=_MAX_BLOCK_BYTES)]
    key_bytes: Annotated[int, Meta(ge=1, le=MAX_KEY_BYTES)]
    slots_per_slab: Annotated[int, Meta(ge=1, le=_MAX_SLOTS)]
    model: str = ""
    key_id: str = ""

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.block_bytes)

    @property
    def slab_bytes(self) -> int:
        return self.slot_bytes * self.slots_per_slab


def read_meta(directory: Path) -> StoreMeta:
    """Raises OSError, and MsgspecError if the file is damaged."""
    data = read_file(directory / META, _MAX_FILE_BYTES)
    try:
        return msgspec.json.decode(data, type=StoreMeta)
    except UnicodeDecodeError as error:  # msgspec passes it on
        raise msgspec.DecodeError(str(error)) from error
