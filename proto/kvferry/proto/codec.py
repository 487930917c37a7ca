"""Encodes and decodes messages: msgpack, with one typed decoder per direction.

An array of block ids is a msgpack extension. Its type is the width of an id in bytes (4 or 8), its
payload the little-endian ids. Received bytes are not trusted: their size is checked before they are
parsed; the decoder checks types, counts and lengths, and refuses unknown fields and trailing bytes.
Nothing decoded is nested deeper than the message types. Any thread.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from kvferry.proto.errors import Code, Refused
from kvferry.proto.fd_passing import FdReply, FdRequest
from kvferry.proto.messages import ClientMessage, DaemonMessage

# Limit for client messages: the daemon holds some of each connection. Two sides of MAX_MESSAGE_IDS
# int64 ids take half of it, MAX_KEYS keys a quarter, and a layout of MAX_TENSORS tensors in as many
# CUDA allocations 0.7 of it. Decoding one MiB of small objects takes 30 ms.
MAX_MESSAGE_BYTES = 1 << 20
# Limit for the daemon's messages. The largest is the status of all namespaces.
MAX_REPLY_BYTES = 32 << 20

T = TypeVar("T")


def _enc_hook(value: Any) -> Ext | int:
    if isinstance(value, np.ndarray):  # from as_block_ids
        return Ext(value.itemsize, value.data)
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"a message cannot contain a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)


def encode(message: ClientMessage | DaemonMessage | FdRequest | FdReply) -> bytes:
    """The bytes of a message. Raises Refused (MESSAGE_TOO_LARGE)."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        most = MAX_MESSAGE_BYTES if isinstance(message, ClientMessage) else MAX_REPLY_BYTES
        _check_size(data, most)
    return data


def _check_size(data: bytes | memoryview, most: int) -> None:
    if len(data) > most:
        text = f"the message has {len(data)} bytes, more than {most}; request less at once"
        raise Refused(Code.MESSAGE_TOO_LARGE, text, len(data))


def readable(value: object, kind: Any) -> bool:
    """Whether `value` can be encoded and decoded again as this type."""
    try:
        msgspec.msgpack.decode(_encoder.encode(value), type=kind)
    except (ValueError, TypeError, OverflowError, NotImplementedError, RecursionError):
        return False
    return True


class Decoder(Generic[T]):
    """Decodes a union of messages, of at most `most_bytes` bytes each."""

    def __init__(self, union: Any, most_bytes: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._most_bytes = most_bytes

    def __call__(self, data: bytes | memoryview) -> T:
        """Decode one message. Raises Refused (BAD_MESSAGE, MESSAGE_TOO_LARGE, BAD_SPEC)."""
        _check_size(data, self._most_bytes)
        try:
            message: T = self._decoder.decode(data)
        except Refused:
            raise
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            head = bytes(data[:32])
            text = f"not a message ({error}): {head!r}; install the same kvferry on both sides"
            raise Refused(Code.BAD_MESSAGE, text, head) from error
        return message


decode_client_message: Decoder[ClientMessage] = Decoder(ClientMessage, MAX_MESSAGE_BYTES)
decode_daemon_message: Decoder[DaemonMessage] = Decoder(DaemonMessage, MAX_REPLY_BYTES)
decode_descriptor_request: Decoder[FdRequest] = Decoder(FdRequest, MAX_MESSAGE_BYTES)
decode_descriptor_reply: Decoder[FdReply] = Decoder(FdReply, MAX_MESSAGE_BYTES)
