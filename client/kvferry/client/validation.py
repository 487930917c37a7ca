"""Checks of a caller's arguments before anything is sent.

The bounds are those of the message's fields, which are defined in the messages only. A daemon that
receives a value out of bounds cannot decode the message; the error raised here names the argument.
"""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import msgspec
from msgspec import inspect

from kvferry.proto.codec import readable
from kvferry.proto.errors import Code, Refused
from kvferry.proto.message import Message
from kvferry.proto.specs import MAX_COUNT

# Message fields whose argument has another name, which is vLLM's.
_ARGUMENT_NAMES = {"quota_bytes": "cpu_bytes_to_use", "policy": "eviction_policy"}


def check_fields(message: type[Message], **given: object) -> None:
    """Raise Refused (BAD_MESSAGE) if a value cannot be encoded as a field of a message.

    The error names the field, also one of a nested struct, and its bounds.
    """
    for field in msgspec.structs.fields(message):
        if field.name in given:
            _check(_ARGUMENT_NAMES.get(field.name, field.name), given[field.name], field.type)


def checked_number(name: str, value: Any, least: int = 0) -> int:
    """A whole number, of Python or numpy. Raises Refused (BAD_LAYOUT)."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number < MAX_COUNT:
        message = f"{name} must be a whole number from {least} to {MAX_COUNT - 1}"
        raise Refused(Code.BAD_LAYOUT, message, value)
    return number


def checked_seconds(name: str, value: Any) -> float:
    """A duration, which may be 0 or in the past. Raises Refused (BAD_SPEC)."""
    try:
        seconds = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise Refused(Code.BAD_SPEC, f"{name} must be a number of seconds", value)
    return seconds


_DEVICE = re.compile(r"cpu(:[0-9]+)?|cuda(:(?P<ordinal>[0-9]+))?")


def checked_device(device: object) -> int | None:
    """The ordinal of a GPU; None for the CPU. Raises Refused (NO_DEVICE)."""
    named = _DEVICE.fullmatch(str(device))
    if named is None:
        message = 'device must be "cpu", "cuda", "cuda:1" or a torch.device of these'
        raise Refused(Code.NO_DEVICE, message, device)
    return int(named["ordinal"] or 0) if named[0].startswith("cuda") else None


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
        case inspect.FloatType(gt=low, le=high) if low is not None and high is not None:
            return f"a number above {low:g} and at most {high:g}"
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
