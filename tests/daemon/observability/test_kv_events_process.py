"""Messages of the channel to the process that publishes KV events."""

from __future__ import annotations

from kvferry.daemon.observability.kv_events_process import SIZE, messages_in


def test_messages_of_the_channel_may_be_split() -> None:
    stream = b"".join(SIZE.pack(len(body)) + body for body in (b"a", b"", b"bcd"))
    for cut in range(len(stream) + 1):
        data = bytearray(stream[:cut])
        found = list(messages_in(data))
        data += stream[cut:]
        assert [*found, *messages_in(data)] == [b"a", b"", b"bcd"]
        assert not data
