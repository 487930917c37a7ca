"""Bytes to messages and back: msgpack, one typed decoder for each direction, built once.

An array of block ids travels as a msgpack extension: its type is the width of an id in bytes (4 or
8), its payload the ids, little-endian. What arrives is hostile until it has come through `decode`:
the size is checked before anything is parsed, types, counts and lengths by the decoder, and
unknown fields and trailing bytes are errors. Nothing decoded is nested deeper than the types are.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from kvferry.proto.desk import DescriptorReply, DescriptorRequest
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import ClientMessage, DaemonMessage

MAX_MESSAGE_BYTES = 32 << 20
"""Two sides of MAX_BLOCK_IDS int64 ids each are half of it."""

T = TypeVar("T")


def _enc_hook(value: Any) -> Ext | int:
    if isinstance(value, np.ndarray):  # as_block_ids has made it
        return Ext(value.itemsize, value.data)
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"{type(value).__name__} is not part of the wire")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)


def encode(message: ClientMessage | DaemonMessage | DescriptorRequest | DescriptorReply) -> bytes:
    """The bytes of a message; Refused where they would be more than a daemon accepts."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise Refused(
            Code.MESSAGE_TOO_LARGE,
            f"a message has at most {MAX_MESSAGE_BYTES} bytes: split the transfer",
            len(data),
        )
    return data


def readable(value: object, kind: Any) -> bool:
    """Whether a field of this type can carry a value to the other side."""
    try:
        msgspec.msgpack.decode(_encoder.encode(value), type=kind)
    except (ValueError, TypeError, OverflowError, NotImplementedError, RecursionError):
        return False
    return True


class Decoder(Generic[T]):
    """Decodes one direction's union of messages."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def __call__(self, data: bytes | memoryview) -> T:
        """The message in `data`; Refused (BAD_MESSAGE, MESSAGE_TOO_LARGE) for anything else."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise Refused(
                Code.MESSAGE_TOO_LARGE,
                f"a message has at most {MAX_MESSAGE_BYTES} bytes",
                len(data),
            )
        try:
            message: T = self._decoder.decode(data)
        except Refused:
            raise
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise Refused(Code.BAD_MESSAGE, f"not a message: {error}", bytes(data[:32])) from error
        return message


decode_client_message: Decoder[ClientMessage] = Decoder(ClientMessage)
decode_daemon_message: Decoder[DaemonMessage] = Decoder(DaemonMessage)
decode_descriptor_request: Decoder[DescriptorRequest] = Decoder(DescriptorRequest)
decode_descriptor_reply: Decoder[DescriptorReply] = Decoder(DescriptorReply)
