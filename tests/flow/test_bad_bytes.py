"""The daemon replies to invalid bytes and unexpected messages with a code, and counts them.

A correct client beside the hostile one has a job in flight all the time, and the job succeeds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.client import Code, OffloadClient
from kvferry.proto.codec import MAX_MESSAGE_BYTES, encode
from kvferry.proto.messages import Error, Goodbye, StatusReport, StatusRequest
from kvferry.proto.protocol import make_hello
from kvferry.testing.engine import SmallEngine, StartSmallEngine
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import RawClient, load

VALID = encode(load(1000, [3, 4, 5], [6, 7, 8]))
# tests/proto/test_codec.py covers which bytes the codec rejects.
GARBAGE: dict[str, list[bytes]] = {
    "nothing": [b""],
    "text": [b"GET / HTTP/1.1\r\n\r\n"],
    "a message cut short": [VALID[:-1]],
    "nested deep": [b"\x91" * 8_000 + b"\x90"],
    "two frames": [VALID, VALID],
    "an empty frame before": [b"", VALID],
    "many frames": [VALID] * 50,
}


@pytest.fixture
def beside(start_engine: StartSmallEngine, start_kvferryd: StartKvferryd) -> Iterator[SmallEngine]:
    """An engine with a job that waits for a fence and succeeds at the end of the test."""
    engine = start_engine(start_kvferryd())
    engine.finish(engine.store(range(16), range(16)))
    fence = engine.worker.write([0], 1) + 1
    held = engine.store([0], [0], wait_for=fence)
    yield engine
    assert engine.finish(engine.load([9], [9]))[0].success
    engine.worker.signal()
    assert engine.finish(held)[0].success
    with OffloadClient(engine.directory, engine="newcomer") as newcomer:
        assert newcomer.status().sessions == 3


def refusal_of(raw: RawClient, *frames: bytes) -> str:
    raw.send(*frames)
    error = raw.recv(Error)
    assert error.error.message
    return error.error.code


def test_garbage(beside: SmallEngine) -> None:
    """Sent in an open session and without a session. Both connections stay usable."""
    with (
        RawClient(beside.directory, "other") as in_session,
        RawClient(beside.directory) as without_session,
    ):
        for name, frames in GARBAGE.items():
            assert refusal_of(in_session, *frames) == Code.BAD_MESSAGE, name
            assert refusal_of(without_session, *frames) == Code.BAD_MESSAGE, name
        report = in_session.ask(StatusRequest(5), StatusReport)
        assert report.request_id == 5
        assert report.status.errors == {Code.BAD_MESSAGE: 2 * len(GARBAGE)}


def test_a_message_too_large(beside: SmallEngine) -> None:
    with RawClient(beside.directory, "other") as raw:
        assert refusal_of(raw, bytes(MAX_MESSAGE_BYTES + 1)) == Code.MESSAGE_TOO_LARGE
        assert beside.client.status().errors == {Code.MESSAGE_TOO_LARGE: 1}
        assert refusal_of(raw, bytes(MAX_MESSAGE_BYTES)) == Code.BAD_MESSAGE
    with RawClient(beside.directory) as raw:  # before Hello no large message is decoded
        assert refusal_of(raw, bytes(1 << 20)) == Code.NO_SESSION
        raw.send(bytes(3 * MAX_MESSAGE_BYTES))
    assert beside.client.status().errors[Code.MESSAGE_TOO_LARGE] == 1


def test_unexpected_messages_are_refused(beside: SmallEngine) -> None:
    """Any message before Hello, a second Hello, and any message after Goodbye."""
    with RawClient(beside.directory) as raw:
        assert refusal_of(raw, VALID) == Code.NO_SESSION
        assert refusal_of(raw, encode(StatusRequest(1))) == Code.NO_SESSION
    with RawClient(beside.directory, "other") as raw:
        assert refusal_of(raw, encode(make_hello("raw", "other"))) == Code.BAD_MESSAGE
        assert raw.ask(StatusRequest(2), StatusReport).status.sessions == 3
        raw.ask(Goodbye(), Goodbye)
        assert refusal_of(raw, VALID) == Code.NO_SESSION
        assert beside.client.status().sessions == 2
