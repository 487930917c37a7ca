"""Encodes and decodes messages: msgpack, with one typed decoder per direction.

An array of block ids is a msgpack extension: its type is the width of an id in bytes (4 or 8), its
payload the little-endian ids. Received bytes are hostile until they are decoded: their size is
checked before they are parsed, and the decoder checks types, counts and lengths and refuses unknown
fields and trailing bytes. Nothing decoded is nested deeper than the types are. Any thread.
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
# eighth of it, the News of a store of MAX_KEYS keys and its evictions a quarter.
MAX_MESSAGE_BYTES = 32 << 20
# Limit for other client messages. The largest, a layout of MAX_TENSORS tensors in as many CUDA
# allocations, has 0.7 MiB. Decoding one MiB of small objects takes 30 ms.
MAX_OTHER_BYTES = 1 << 20
# Tags of the client messages that may have MAX_MESSAGE_BYTES.
MANY = frozenset({b"submit", b"cancel", b"wait", b"pin", b"unpin", b"touch"})
_FIXSTR, _FIXSTR_BYTES = 0xA0, 0x1F

T = TypeVar("T")


def _enc_hook(value: Any) -> Ext | int:
    if isinstance(value, np.ndarray):  # as_block_ids has made it
        return Ext(value.itemsize, value.data)
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"a message cannot contain a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)


def encode(message: ClientMessage | DaemonMessage | FdRequest | FdReply) -> bytes:
    """The bytes of a message; Refused where they would be more than a daemon accepts."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise Refused(
            Code.MESSAGE_TOO_LARGE,
            f"the message has {len(data)} bytes, more than {MAX_MESSAGE_BYTES}; split the transfer",
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
    """Decodes one direction's union of messages.

    many: tags of those that may have `most_bytes`; the others have `other_bytes`. None: all.
    """

    def __init__(
        self,
        union: Any,
        many: frozenset[bytes] | None = None,
        most_bytes: int = MAX_MESSAGE_BYTES,
        other_bytes: int = MAX_OTHER_BYTES,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._many = many
        self._most_bytes, self._other_bytes = most_bytes, other_bytes

    def __call__(self, data: bytes | memoryview) -> T:
        """The message in `data`; Refused (BAD_MESSAGE, MESSAGE_TOO_LARGE) for anything else."""
        most, other = self._most_bytes, self._other_bytes
        if len(data) > other and self._many is not None and _tag(data) not in self._many:
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
    """The tag of a message as clients encode it: a short string that begins at byte 1."""
    head = data[1]
    nbytes = head & _FIXSTR_BYTES if head & ~_FIXSTR_BYTES == _FIXSTR else 0
    return bytes(data[2 : 2 + nbytes])


decode_client_message: Decoder[ClientMessage] = Decoder(ClientMessage, MANY)
decode_daemon_message: Decoder[DaemonMessage] = Decoder(DaemonMessage)
decode_descriptor_request: Decoder[FdRequest] = Decoder(FdRequest)
decode_descriptor_reply: Decoder[FdReply] = Decoder(FdReply)
