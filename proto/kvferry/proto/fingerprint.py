"""The fingerprint of a namespace: what must agree for engines to share blocks."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.proto.keys import MAX_KEY_BYTES
from kvferry.proto.specs import Count, Name, Positive


class Fingerprint(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Everything that must agree for the bytes of two engines to be exchangeable.

    It identifies a namespace: engines share blocks only if all fields are equal.
    """

    model: Name
    # Bytes of a host block: at least block_size_factor GPU blocks of the largest group.
    host_block_bytes: Positive
    revision: Name = ""
    dtype: Name = ""
    kv_dtype: Name = ""
    kv_layout: Name = ""
    # Tokens in a host block.
    block_size: Count = 0
    rank: Count = 0
    # Number of tensor and pipeline parallel ranks. Each holds its own part of every block.
    world_size: Positive = 1
    hash_algorithm: Name = ""
    hash_seed: Name = ""
    key_bytes: Annotated[int, Meta(ge=1, le=MAX_KEY_BYTES)] = 36
    # Anything else that must agree, by name.
    extra: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        with suppress(TypeError):  # what cannot be sorted cannot be encoded, and is refused then
            msgspec.structs.force_setattr(self, "extra", tuple(sorted(self.extra)))

    @property
    def name(self) -> str:
        """The name of this fingerprint's namespace: a hash of all fields, 16 characters."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    @property
    def nbytes(self) -> int:
        """Its size in bytes when encoded."""
        return len(msgspec.msgpack.encode(self))

    def differences(self, other: Fingerprint) -> list[str]:
        """The fields that differ, each with both values: "kv_dtype: 'fp8' here, 'bf16' there"."""
        here, there = self._fields(), other._fields()
        return [
            f"{name}: {here.get(name)!r} here, {there.get(name)!r} there"
            for name in here | there
            if here.get(name) != there.get(name)
        ]

    def _fields(self) -> dict[str, object]:
        plain = {name: getattr(self, name) for name in self.__struct_fields__ if name != "extra"}
        return plain | dict(self.extra)
