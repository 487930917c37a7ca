"""Messages of the channel to the process that publishes KV events."""

from __future__ import annotations

from kvferry.daemon.observability.kv_events_process import SIZE, messages_in


def test_messages_of_the_channel_may_be_split() -> None:
    whole = b"".join(SIZE.pack(len(one)) + one for one in (b"a", b"", b"bcd"))
    for cut in range(len(whole) + 1):
        data = bytearray(whole[:cut])
        found = list(messages_in(data))
        data += whole[cut:]
        assert [*found, *messages_in(data)] == [b"a", b"", b"bcd"]
        assert not data
