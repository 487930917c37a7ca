"""Checks of a caller's arguments before anything is sent.

The bounds are those of the message's fields, which are defined in the messages only. A daemon that
receives a value out of bounds cannot decode the message; the error raised here names the argument.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from kvferry.proto.codec import readable
from kvferry.proto.errors import Code, Refused
from kvferry.proto.message import Message

# Message fields whose argument has another name, which is vLLM's.
_ARGUMENT_NAMES = {"quota_bytes": "cpu_bytes_to_use", "policy": "eviction_policy"}


def check_fields(message: type[Message], **given: object) -> None:
    """Raise Refused (BAD_MESSAGE) if a value cannot be encoded as a field of a message.

    The error names the field, also one of a nested struct, and its bounds.
    """
    for field in msgspec.structs.fields(message):
        if field.name in given:
            _check(_ARGUMENT_NAMES.get(field.name, field.name), given[field.name], field.type)


def _check(name: str, value: Any, kind: Any) -> None:
    if readable(value, kind):
        return
    for part in _parts(value):
        for field in msgspec.structs.fields(part):
            _check(field.name, getattr(part, field.name), field.type)
    got = len(value) if isinstance(value, tuple | list) else value
    message = f"{name} must be {_allowed(inspect.type_info(kind))}"
    raise Refused(Code.BAD_MESSAGE, message, got)


def _parts(value: Any) -> list[msgspec.Struct]:
    """The structs in a value."""
    if isinstance(value, msgspec.Struct):
        return [value]
    if isinstance(value, tuple | list):
        return [part for one in value for part in _parts(one)]
    return []


def _allowed(kind: inspect.Type) -> str:
    """The values that a field accepts, for the message."""
    match kind:
        case inspect.UnionType(types):
            return " or ".join(_allowed(one) for one in types)
        case inspect.IntType(gt, ge, lt, le):
            low = gt + 1 if gt is not None else ge
            high = lt - 1 if lt is not None else le
            return f"a whole number from {low} to {high}"
        case inspect.StrType(least, most):
            return f"a text of {least or 0} to {most} characters"
        case inspect.VarTupleType(item, least, most):
            return f"a list of {least or 0} to {most} items, each {_allowed(item)}"
        case inspect.TupleType(items):
            return f"({', '.join(_allowed(one) for one in items)})"
        case inspect.StructType(cls):
            return f"a {cls.__name__}"
        case inspect.BoolType():
            return "True or False"
        case _:
            return type(kind).__name__.removesuffix("Type")
