"""Bytes are one message, or they are refused. Random damage: fuzz/codec.py."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fuzz.codec import DECODERS, golden
from kvferry.proto import codec
from kvferry.proto import messages as wire
from kvferry.proto.codec import MAX_MESSAGE_BYTES, MAX_REPLY_BYTES, Decoder, encode
from kvferry.proto.errors import Code, ErrorInfo, Refused
from kvferry.proto.memory import CudaAllocation, Location
from kvferry.proto.specs import (
    MAX_COUNT,
    MAX_GROUPS,
    MAX_INT,
    MAX_KEYS,
    MAX_MESSAGE_IDS,
    MAX_REFS,
    MAX_TENSORS,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)

GOLDEN = golden()


def decoder_of(name: str) -> Decoder[Any]:
    return DECODERS[name.partition("/")[0]]


def client_decoder(most_bytes: int) -> Decoder[Any]:
    """decode_client_message with another limit."""
    return Decoder(wire.ClientMessage, most_bytes)


def refusal_of(decode: Decoder[Any], data: bytes) -> str:
    with pytest.raises(Refused) as caught:
        decode(data)
    return caught.value.code


def pack(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def ids(*values: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(8, struct.pack(f"<{len(values)}q", *values))


TENSOR, REF = [4, 64, 64], [0, 64]
LAYOUT = [[TENSOR], [[REF]], 1]
GPU, CPU = ["gpu", ids(1, 2)], ["cpu", ids(3)]


# Bytes that are not a message


@pytest.mark.parametrize("name", GOLDEN)
def test_a_part_of_a_message_or_more_is_refused(name: str) -> None:
    data, decode = GOLDEN[name], decoder_of(name)
    assert {refusal_of(decode, data[:n]) for n in range(len(data))} == {Code.BAD_MESSAGE}
    for tail in (b"\x00", b"\xc0", b"\x90"):
        assert refusal_of(decode, data + tail) == Code.BAD_MESSAGE
    one_field_more = bytes([data[0] + 1]) + data[1:] + b"\xc0"  # every message is a fixarray
    assert refusal_of(decode, one_field_more) == Code.BAD_MESSAGE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        pack(),
        pack("submission", 1, GPU, CPU, 0),
        pack("welcome", 1),  # a message of the daemon
        pack("Submit", 1, GPU, CPU, 0),
        pack(1, 2, 3),
        pack(None),
        pack(b"cancel", [1]),
        msgspec.msgpack.encode({"type": "cancel", "job_ids": [1]}),
        msgspec.msgpack.encode("cancel"),
        msgspec.msgpack.encode(7),
        pack("submit", 1, GPU),
        pack("submit"),
        pack("cancel"),
        pack("registerkvcaches", 1, LAYOUT),
        pack("submit", "1", GPU, CPU),
        pack("submit", 1.5, GPU, CPU),
        pack("submit", None, GPU, CPU),
        pack("submit", True, GPU, CPU),
        pack("submit", -1, GPU, CPU),
        pack("submit", 1 << 63, GPU, CPU),
        pack("submit", 1, GPU, CPU, -1),
        pack("submit", 1, GPU, CPU, None),
        pack("submit", 1, GPU, [ids(3)]),
        pack("submit", 1, GPU, ["disk", ids(3)]),
        pack("submit", 1, GPU, ["cpu", ids(3), 1]),
        pack("submit", 1, GPU, None),
        pack("submit", 1, ["gpu", [1, 2]], CPU),
        pack("submit", 1, ["gpu", 1], CPU),
        pack("submit", 1, ["gpu", None], CPU),
        pack("submit", 1, ["gpu", b"\1\0\0\0\0\0\0\0"], CPU),
        pack("submit", 1, ["gpu", {"shape": [1]}], CPU),
        pack("submit", 1, ["gpu", ids(1), [-1]], CPU),
        pack("submit", 1, ["gpu", ids(1), [1 << 48]], CPU),
        pack("submit", 1, ["gpu", ids(1), ids(1)], CPU),
        pack("submit", 1, ["gpu", ids(1), 1], CPU),
        pack("cancel", 1),
        pack("cancel", ids(1)),
        pack("cancel", [[1]]),
        pack("cancel", {1: 2}),
        pack("hello", 1, 1, "client", ""),
        pack("hello", 1, 1, b"client", "engine"),
        pack("hello", 1, 1, "c" * 257, "engine"),
        pack("hello", 1, 1, "client", "e" * 257),
        b"\x95\xa5hello\x01\x01\xa2\xff\xfe\xa1e",  # invalid UTF-8
        pack("goodbye", "r" * 257),
    ],
)
def test_invalid_client_messages_are_refused(data: bytes) -> None:
    assert refusal_of(codec.decode_client_message, data) == Code.BAD_MESSAGE


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        (5, b"12345", "extension type 5 is unknown"),
        (-1, b"\0\0\0\0", "block_ids|\\$\\[2\\]|Expected"),  # msgpack's own timestamp
        (127, b"", "extension type 127 is unknown"),
        (8, bytes(7), "not a multiple"),
        (8, bytes(9), "not a multiple"),
        (4, bytes(2), "not a multiple"),
        (4, bytes(4 * (MAX_MESSAGE_IDS + 1)), f"more than {MAX_MESSAGE_IDS}"),
        (8, bytes(8 * (MAX_MESSAGE_IDS + 1)), f"more than {MAX_MESSAGE_IDS}"),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, bytes) else None,
)
def test_an_extension_without_valid_block_ids_is_refused(
    kind: int, payload: bytes, message: str
) -> None:
    data = pack("submit", 1, ["gpu", msgspec.msgpack.Ext(kind, payload)], CPU)
    with pytest.raises(Refused, match=message) as caught:
        codec.decode_client_message(data)
    assert caught.value.code == Code.BAD_MESSAGE


BLOCK_IDS_FOLLOW = b"\x94\xa6submit\x01\x92\xa3gpu"


@pytest.mark.parametrize("item", [b"\x90", b"\x01", b"\xa1a", b"\xc0"])
def test_objects_in_place_of_block_ids_are_not_built(item: bytes) -> None:
    """Else decoding 30 MiB of empty arrays would take gigabytes of memory, and seconds."""
    count = 1 << 16
    data = BLOCK_IDS_FOLLOW + b"\xdd" + struct.pack(">I", count) + count * item
    tracemalloc.start()
    try:
        assert refusal_of(codec.decode_client_message, data) == Code.BAD_MESSAGE
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xc0", b"\x81\x91", b"\xdd\0\0\0\1", b"\x92\xc0"])
@pytest.mark.parametrize("head", [b"", BLOCK_IDS_FOLLOW, b"\x92\xa6cancel", b"\x92\xa5error"])
@pytest.mark.parametrize("decode", DECODERS.values(), ids=list(DECODERS))
def test_deep_nesting_is_refused(decode: Decoder[Any], head: bytes, level: bytes) -> None:
    assert refusal_of(decode, head + 100_000 * level + b"\xc0") == Code.BAD_MESSAGE


@pytest.mark.parametrize("claim", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x0f\x00\x00"])
@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x92",
        b"\x92\xa6cancel",
        b"\x93\xa4wait\x01",
        b"\x94\xa6submit\x01",
        BLOCK_IDS_FOLLOW,
        b"\x95\xa5hello\x01\x01",
        b"\x96\xb0registerkvcaches\x01",
        b"\x96\xb0registerkvcaches\x01\x93",
        b"\x92\xa8finished",
        b"\x93\xacstatusreport\x01",
        b"\x93\xa5error\x01",
        b"\x92\xa7tickets",
        b"\x92\xa7deposit",
    ],
)
def test_lengths_beyond_the_end_of_the_message_are_refused(
    head: bytes, claim: bytes, length: bytes
) -> None:
    for decode in DECODERS.values():
        assert refusal_of(decode, head + claim + length + b"\x08\0\0\0") == Code.BAD_MESSAGE


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        (lambda n: ("cancel", [1] * n), 65536),
        (lambda n: ("wait", 1, [1] * n), 65536),
        (lambda n: ("submit", 1, [*GPU, [0] * n], CPU), 256),
        (lambda n: ("submit", 1, [*GPU, None, [0] * n], CPU), 256),
        (lambda n: ("allocatekvcaches", 1, [[TENSOR] * n, [[REF]]]), 4096),
        (lambda n: ("allocatekvcaches", 1, [[TENSOR], [[REF]] * n]), 256),
        (lambda n: ("allocatekvcaches", 1, [[TENSOR], [[REF] * n]]), 4096),
        (lambda n: ("allocatekvcaches", 1, [[TENSOR], [[REF]], n]), 4096),
        (lambda n: ("registerkvcaches", 1, LAYOUT, [["fd", 1, 1]] * n, []), 4096),
        (lambda n: ("registerkvcaches", 1, LAYOUT, [], [[0, 0]] * n), 4096),
        (lambda n: ("registerkvcaches", 1, LAYOUT, [["cuda", "", b"h" * n, 1]], []), 64),
        (lambda n: ("allocatekvcaches", 1, LAYOUT, n), (1 << 48) - 1),
        (lambda n: ("allocatekvcaches", 1, [[[n, 1, 1]], [[REF]]]), (1 << 48) - 1),
        (lambda n: ("allocatekvcaches", 1, [[[1, n, n]], [[REF]]]), (1 << 48) - 1),
        (lambda n: ("statusrequest", n), (1 << 63) - 1),
        (lambda n: ("goodbye", "r" * n), 256),
        (lambda n: ("reset", 1, "l" * n), 256),
        (lambda n: ("submit", 1, GPU, ["keys", [b"k"], n]), (1 << 62) - 1),
    ],
)
def test_counts_above_their_limit_are_refused(
    fields: Callable[[int], tuple[Any, ...]], count: int
) -> None:
    codec.decode_client_message(pack(*fields(count)))
    assert refusal_of(codec.decode_client_message, pack(*fields(count + 1))) == Code.BAD_MESSAGE


@pytest.mark.parametrize(
    "fields",
    [
        ("allocatekvcaches", 1, [[], [[REF]]]),
        ("allocatekvcaches", 1, [[TENSOR], []]),
        ("allocatekvcaches", 1, [[TENSOR], [[]]]),
        ("allocatekvcaches", 1, [[TENSOR], [[REF]], 0]),
        ("allocatekvcaches", 1, [[[0, 1, 1]], [[REF]]]),
        ("allocatekvcaches", 1, [[[1, 0, 1]], [[REF]]]),
        ("allocatekvcaches", 1, [[TENSOR], [[[0, 0]]]]),
        ("allocatekvcaches", 1, [[TENSOR], [[[-1, 1]]]]),
        ("allocatekvcaches", 1, LAYOUT, 0),
        ("registerkvcaches", 1, LAYOUT, [["fd", 1, 0]], []),
        ("registerkvcaches", 1, LAYOUT, [["cuda", "", b"h" * 63, 1]], []),
        ("registerkvcaches", 1, LAYOUT, [["tape", 1, 1]], []),
        ("registerkvcaches", 1, LAYOUT, [], [[0, -1]]),
    ],
)
def test_empty_and_zero_fields_are_refused(fields: tuple[Any, ...]) -> None:
    assert refusal_of(codec.decode_client_message, pack(*fields)) == Code.BAD_MESSAGE


@pytest.mark.parametrize("token", ["", "t" * 65])
def test_a_session_token_has_1_to_64_characters(token: str) -> None:
    assert refusal_of(codec.decode_descriptor_request, pack("deposit", token)) == Code.BAD_MESSAGE


# Large messages


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (wire.Goodbye, MAX_MESSAGE_BYTES),
        (lambda text: wire.Error(1, ErrorInfo(Code.BUSY, text)), MAX_REPLY_BYTES),
    ],
    ids=["client", "daemon"],
)
def test_a_message_above_the_limit_is_not_encoded(make: Callable[[str], Any], most: int) -> None:
    length = 70_000
    text = "x" * (most - len(encode(make("x" * length))) + length)
    assert len(encode(make(text))) == most
    with pytest.raises(Refused) as caught:
        encode(make(text + "x"))
    assert (caught.value.code, caught.value.value) == (Code.MESSAGE_TOO_LARGE, str(most + 1))


def test_a_decoder_refuses_a_message_above_its_limit() -> None:
    message = wire.Cancel(tuple(range(50)))
    data = encode(message)
    assert client_decoder(most_bytes=len(data))(data) == message
    assert refusal_of(client_decoder(most_bytes=len(data) - 1), data) == Code.MESSAGE_TOO_LARGE
    no_message = b"\xc1\xc1\xc1\xc1"  # it is not parsed
    assert refusal_of(client_decoder(most_bytes=3), no_message) == Code.MESSAGE_TOO_LARGE


def test_the_largest_layout_fits_into_a_message() -> None:
    """Each tensor has an allocation of its own, shared by CUDA IPC. All numbers are long."""
    size, groups = 1 << 40, MAX_REFS // 64
    uuid = "GPU-" + "0" * 36
    refs = [TensorRef(MAX_TENSORS - 1, size)] * 64
    largest = wire.RegisterKVCaches(
        1,
        KVLayout((TensorLayout(size, size, size),) * MAX_TENSORS, (tuple(refs),) * groups),
        (CudaAllocation(uuid, bytes(64), size),) * MAX_TENSORS,
        (Location(MAX_TENSORS - 1, size),) * MAX_TENSORS,
    )
    assert codec.decode_client_message(encode(largest)) == largest


@pytest.mark.parametrize("keyed", [False, True])
def test_the_largest_part_of_a_transfer_fits_into_a_message(keyed: bool) -> None:
    blocks, keys = np.zeros(MAX_MESSAGE_IDS, dtype=np.int64), (bytes(64),) * MAX_KEYS
    sizes = (MAX_COUNT - 1,) * MAX_GROUPS
    host = KeyLoadStoreSpec(keys, MAX_COUNT - 1, keys) if keyed else CPULoadStoreSpec(blocks)
    largest = wire.Submit(MAX_INT, GPULoadStoreSpec(blocks, sizes, sizes), host, MAX_INT)
    assert codec.decode_client_message(encode(largest)) == largest


@pytest.mark.parametrize("view", [bytes, bytearray, memoryview])
def test_every_buffer_type_is_decoded(view: Callable[[bytes], Any]) -> None:
    valid = GOLDEN["client/submit-load-int64"]
    assert codec.decode_client_message(view(valid)) == codec.decode_client_message(valid)
    assert refusal_of(codec.decode_client_message, view(valid[:-1])) == Code.BAD_MESSAGE
