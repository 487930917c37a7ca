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

# Limit for messages with block ids, keys or job ids. Two sides of MAX_BLOCK_IDS int64 ids take an
# eighth of it, the KeyEvents of a store of MAX_KEYS keys and its evictions a quarter.
MAX_MESSAGE_BYTES = 32 << 20
# Limit for other client messages. The largest, a layout of MAX_TENSORS tensors in as many CUDA
# allocations, has 0.7 MiB. Decoding one MiB of small objects takes 30 ms.
MAX_OTHER_BYTES = 1 << 20
# Tags of the client messages that may have MAX_MESSAGE_BYTES.
LARGE_MESSAGES = frozenset({b"submit", b"cancel", b"wait", b"pin", b"unpin", b"touch"})
_FIXSTR, _FIXSTR_BYTES = 0xA0, 0x1F

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
        raise Refused(
            Code.MESSAGE_TOO_LARGE,
            f"the message has {len(data)} bytes, more than {MAX_MESSAGE_BYTES}; split the transfer",
            len(data),
        )
    return data


def readable(value: object, kind: Any) -> bool:
    """Whether `value` can be encoded and decoded again as this type."""
    try:
        msgspec.msgpack.decode(_encoder.encode(value), type=kind)
    except (ValueError, TypeError, OverflowError, NotImplementedError, RecursionError):
        return False
    return True


class Decoder(Generic[T]):
    """Decodes a union of messages.

    large: tags of the messages that may have `most_bytes`; None: all. The others may have
    `other_bytes`.
    """

    def __init__(
        self,
        union: Any,
        large: frozenset[bytes] | None = None,
        most_bytes: int = MAX_MESSAGE_BYTES,
        other_bytes: int = MAX_OTHER_BYTES,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._large = large
        self._most_bytes, self._other_bytes = most_bytes, other_bytes

    def __call__(self, data: bytes | memoryview) -> T:
        """Decode one message. Raises Refused (BAD_MESSAGE, MESSAGE_TOO_LARGE, BAD_SPEC)."""
        most, other, large = self._most_bytes, self._other_bytes, self._large
        if len(data) > other and large is not None and _tag(data) not in large:
            most = other
        if len(data) > most:
            raise Refused(
                Code.MESSAGE_TOO_LARGE,
                f"the message has {len(data)} bytes, more than the {most} of its kind; split it",
                len(data),
            )
        try:
            message: T = self._decoder.decode(data)
        except Refused:
            raise
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            head = bytes(data[:32])
            text = f"not a message ({error}): {head!r}; install the same kvferry on both sides"
            raise Refused(Code.BAD_MESSAGE, text, head) from error
        return message


def _tag(data: bytes | memoryview) -> bytes:
    """The tag of a message: a short string at byte 1, as clients encode it; empty if it is not."""
    head = data[1]
    nbytes = head & _FIXSTR_BYTES if head & ~_FIXSTR_BYTES == _FIXSTR else 0
    return bytes(data[2 : 2 + nbytes])


decode_client_message: Decoder[ClientMessage] = Decoder(ClientMessage, LARGE_MESSAGES)
decode_daemon_message: Decoder[DaemonMessage] = Decoder(DaemonMessage)
decode_descriptor_request: Decoder[FdRequest] = Decoder(FdRequest)
decode_descriptor_reply: Decoder[FdReply] = Decoder(FdReply)
