"""The number of the protocol: a digest of all message types.

Two builds with different messages would misread each other, also if both call themselves 0.1.0. So
the number is computed from the types, and Hello carries it: a change cannot be forgotten. It has
tags, the order of fields, their types and limits, and the values of enums. It must not depend on
the versions of Python and msgspec, which may differ between client and daemon: only attributes that
are set count. Computed once per process, in some milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any

from msgspec import inspect

from kvferry.proto.fd_passing import FdReply, FdRequest
from kvferry.proto.messages import ClientMessage, DaemonMessage, Hello

# Bits of the number: fields of Hello are below MAX_COUNT.
_BITS = 47


@cache
def protocol_number() -> int:
    """The number of this build's protocol."""
    return digest_of([ClientMessage, DaemonMessage, FdRequest, FdReply])


def digest_of(types: Sequence[Any]) -> int:
    """A number of _BITS bits that changes with these types."""
    structs: dict[str, Any] = {}
    described = [_describe(kind, structs) for kind in inspect.multi_type_info(types)]
    text = json.dumps([described, structs], sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest, "big") >> (8 * len(digest) - _BITS)


def format_protocol(number: int) -> str:
    """A short form for people."""
    return f"{number:x}"


def make_hello(client: str, engine: str) -> Hello:
    return Hello(protocol_number(), protocol_number(), client, engine)


def _describe(value: Any, structs: dict[str, Any]) -> Any:
    """A type, or a part of one, as JSON. Structs are added to `structs`, and named elsewhere."""
    match value:
        case inspect.StructType(cls=cls, fields=fields):
            if cls.__name__ not in structs:
                description: list[Any] = [value.tag, value.array_like]
                structs[cls.__name__] = description
                for field in fields:
                    described = _describe(field.type, structs)
                    description.append([field.encode_name, field.required, described])
            return cls.__name__
        case inspect.UnionType(types=types):
            return sorted(json.dumps(_describe(each, structs), sort_keys=True) for each in types)
        case inspect.Type():
            parts = {name: getattr(value, name) for name in value.__struct_fields__}
            described = {k: _describe(v, structs) for k, v in parts.items() if v is not None}
            return [type(value).__name__, described]
        case type() if issubclass(value, Enum):
            return [[member.name, member.value] for member in value]
        case tuple() | list():
            return [_describe(each, structs) for each in value]
    return value
