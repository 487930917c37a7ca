"""The number of the protocol changes with the message types, and with nothing else."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.proto.messages import Hello
from kvferry.proto.protocol import digest_of, make_hello, protocol_number
from kvferry.proto.specs import MAX_COUNT


def fields(*fields: Any, name: str = "Message", **options: Any) -> Any:
    chosen: dict[str, Any] = {"array_like": True, "tag": "message", **options}
    return msgspec.defstruct(name, fields, **chosen)


class Kind(Enum):
    A = 1


class OtherKind(Enum):
    A = 2


BASE = fields(("number", int), ("text", str))
CHANGED = {
    "another name": fields(("number", int), ("words", str)),
    "another order": fields(("text", str), ("number", int)),
    "another type": fields(("number", float), ("text", str)),
    "one more": fields(("number", int), ("text", str), ("more", int)),
    "one that may be left out": fields(("number", int), ("text", str, "")),
    "a limit": fields(("number", Annotated[int, Meta(ge=0)]), ("text", str)),
    "another limit": fields(("number", Annotated[int, Meta(ge=1)]), ("text", str)),
    "a length": fields(("number", int), ("text", Annotated[str, Meta(max_length=3)])),
    "an object": fields(("number", int), ("text", str), array_like=False),
    "another tag": fields(("number", int), ("text", str), tag="other"),
    "an enum": fields(("number", Kind), ("text", str)),
    "other values": fields(("number", OtherKind), ("text", str)),
    "a nested struct": fields(("number", fields(("n", int), name="N", tag=None)), ("text", str)),
    "another one": fields(("number", fields(("n", str), name="N", tag=None)), ("text", str)),
    "a union": fields(("number", int | None), ("text", str)),
    "a list": fields(("number", tuple[int, ...]), ("text", str)),
}


def test_any_change_of_a_message_changes_the_digest() -> None:
    digests = {name: digest_of([kind]) for name, kind in CHANGED.items()}
    assert len({digest_of([BASE]), *digests.values()}) == 1 + len(CHANGED), digests


def test_equal_types_have_equal_digests() -> None:
    """Also with another docstring, and if a union lists its types in another order."""
    again = fields(("number", int), ("text", str), namespace={"__doc__": "explained"})
    assert digest_of([again]) == digest_of([BASE])
    other = fields(("n", int), name="Other", tag="other")
    assert digest_of([BASE | other]) == digest_of([other | BASE])


def test_hello_carries_the_number_twice() -> None:
    """A build with another Hello could not read it: its fields stay."""
    hello = make_hello("client", "engine")
    assert hello == Hello(protocol_number(), protocol_number(), "client", "engine")
    assert 0 < protocol_number() < MAX_COUNT
