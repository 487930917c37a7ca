"""The wire codec: bytes are one message or are refused, and a message is encoded as it was.

Also what the daemon computes from a decoded message before any session exists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fuzz.case import Run
from kvferry.proto import codec
from kvferry.proto import messages as wire
from kvferry.proto.codec import Decoder, encode
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.opening import check_opening
from kvferry.proto.specs import KVLayout

DECODERS: dict[str, Decoder[Any]] = {
    "client": codec.decode_client_message,
    "daemon": codec.decode_daemon_message,
    "request": codec.decode_descriptor_request,
    "reply": codec.decode_descriptor_reply,
}
CODES = Code.BAD_MESSAGE, Code.MESSAGE_TOO_LARGE, Code.BAD_SPEC


def golden() -> dict[str, bytes]:
    """The bytes of each kind of message, by "direction/name"."""
    path = Path(__file__).parents[1] / "proto" / "golden.json"
    return {name: bytes.fromhex(data) for name, data in json.loads(path.read_text()).items()}


def seeds() -> list[bytes]:
    return list(golden().values())


@contextmanager
def open_codec() -> Iterator[Run]:
    yield check_bytes


def check_bytes(data: bytes) -> None:
    for decode in DECODERS.values():
        try:
            message = decode(data)
        except Refused as error:
            _check_refusal(error, *CODES)
        else:
            encoded = encode(message)
            assert encode(decode(encoded)) == encoded
            _check_contents(message)


def _check_refusal(error: KVFerryError, *codes: Code) -> None:
    """An error can be sent. codes: those that it may have; all if there are none."""
    assert not codes or error.code in codes
    reply = codec.decode_daemon_message(encode(wire.Error(None, error.info)))
    assert isinstance(reply, wire.Error)
    assert reply.error == error.info


def _check_contents(message: Any) -> None:
    try:
        match message:
            case wire.RegisterKVCaches() | wire.AllocateKVCaches():
                arrays = LayoutArrays.from_layout(message.layout)
                again = msgspec.convert(arrays.to_lists(), KVLayout)
                assert LayoutArrays.from_layout(again) == arrays
                assert min(arrays.span_bytes) > 0
            case wire.OpenNamespace():
                assert len(message.fingerprint.name) == 16
                check_opening(message)
            case wire.Submit():
                message.src.check()
                message.dst.check()
    except Refused as error:
        _check_refusal(error)
