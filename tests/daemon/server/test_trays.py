"""Messages on trays and by the socket are heard as they were said, whoever is faster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.client.outtray import OutTray
from kvferry.daemon.server.trays import AT_ONCE, Trays
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.tray import SLOTS, Tray, new_tray

SESSION = "a session"


class House:
    """A daemon's trays, and a client whose socket is a queue that somebody else moves."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.senseless: list[KVFerryError] = []
        self.trays = Trays(self.hear, lambda _, error: self.senseless.append(error))
        self.out = OutTray()
        self.socket: deque[bytes] = deque()
        self.trays.open(SESSION, *map(os.dup, self.out.descriptors))
        self.trays.heard(SESSION)  # UseTray itself
        self.out.handed()
        self.on_hearing: Callable[[bytes], None] = lambda _: None

    def hear(self, _: str, data: bytes) -> None:
        self.heard.append(data)
        self.on_hearing(data)

    def say(self, data: bytes, *, aloud: bool = False) -> bool:
        """As a client does; aloud: by the socket. Whether it lies on the tray."""
        if not aloud and self.out.lay(data):
            return True
        self.socket.append(data)
        self.out.passed_by()
        return False

    def say_again(self, data: bytes) -> None:
        self.say(data)

    def deliver(self) -> None:
        """The socket's next message comes."""
        if self.socket:
            self.trays.catch_up(SESSION)
            self.heard.append(self.socket.popleft())
            self.trays.heard(SESSION)

    def close(self) -> None:
        self.trays.close(SESSION)
        self.out.close()


@contextlib.contextmanager
def house() -> Iterator[House]:
    built = House()
    try:
        yield built
    finally:
        built.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not ready():
            await asyncio.sleep(0.001)


def is_open(descriptor: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


steps = st.lists(st.sampled_from(["lay", "aloud", "deliver", "loop"]), max_size=200)


@given(steps)
def test_nothing_is_overtaken(steps: list[str]) -> None:
    async def scenario() -> None:
        with house() as there:
            said: list[bytes] = []
            for number, step in enumerate(steps):
                if step in ("lay", "aloud"):
                    said.append(str(number).encode())
                    there.say(said[-1], aloud=step == "aloud")
                elif step == "deliver":
                    there.deliver()
                else:
                    await settle()
                assert there.heard == said[: len(there.heard)]
            while there.socket:
                there.deliver()
            await until(lambda: len(there.heard) == len(said))
            assert there.heard == said

    asyncio.run(scenario())


async def test_what_finds_no_room_goes_by_the_socket_and_is_heard_in_its_place() -> None:
    with house() as there:
        said = [str(number).encode() for number in range(3 * SLOTS)]
        laid = [there.say(data) for data in said]
        assert laid == [True] * SLOTS + [False] * (2 * SLOTS)
        there.deliver()
        assert there.heard == said[: SLOTS + 1]
        while there.socket:
            there.deliver()
        assert there.heard == said


async def test_who_lays_without_end_does_not_keep_the_loop() -> None:
    """Another callback has its turn after so many messages, though there are more."""
    with house() as there:
        turns: list[int] = []
        there.on_hearing = there.say_again
        for _ in range(SLOTS):
            there.say(b"again")
        await until(lambda: len(there.heard) > 3 * SLOTS)
        before = len(there.heard)
        asyncio.get_running_loop().call_soon(lambda: turns.append(len(there.heard)))
        await until(lambda: bool(turns))
        assert turns[0] - before <= 2 * AT_ONCE


async def test_who_laid_very_many_is_heard_when_it_lays_again() -> None:
    with house() as there:
        for _ in range(SLOTS):
            assert there.say(b"again")
        await until(lambda: len(there.heard) == SLOTS)
        await settle()
        assert there.say(b"more")
        await until(lambda: there.heard[SLOTS:] == [b"more"])


async def test_descriptors_that_come_along_with_the_bell_are_closed() -> None:
    with house() as there:
        here, theirs = socket.socketpair()
        there.trays.open("another", new_tray(), theirs.detach())
        given, other = os.pipe()
        socket.send_fds(here, [b"!"], [other])
        os.close(other)
        os.set_blocking(given, False)

        def closed() -> bool:
            try:
                return os.read(given, 1) == b""  # nobody has the other end
            except BlockingIOError:
                return False

        await until(closed)
        there.trays.close("another")
        os.close(given)
        here.close()


async def test_a_session_that_leaves_is_heard_no_more() -> None:
    with house() as there:
        there.on_hearing = lambda _: there.trays.close(SESSION)
        for _ in range(5):
            there.say(b"goodbye")
        await until(lambda: bool(there.heard))
        await settle()
        assert there.heard == [b"goodbye"]


async def test_who_hangs_up_the_bell_is_heard_by_the_socket() -> None:
    with house() as there:
        there.say(b"one")
        there.out._bell.close()
        await until(lambda: there.heard == [b"one"])
        there.say(b"two")
        there.say(b"three", aloud=True)
        there.deliver()
        assert there.heard == [b"one", b"two", b"three"]


async def test_nonsense_is_told_once() -> None:
    with house() as there:
        page = new_tray()
        here, theirs = socket.socketpair()
        kept = os.dup(page)
        there.trays.open("another", page, theirs.detach())
        os.pwrite(kept, b"\1", 0)
        here.send(b"!")
        await until(lambda: bool(there.senseless))
        (error,) = there.senseless
        assert error.code == Code.BAD_MESSAGE
        there.trays.close("another")
        os.close(kept)
        here.close()


@pytest.mark.parametrize("kind", ["pipe", "file", "datagram", "internet", "alone"])
async def test_a_bell_is_a_stream_socket(kind: str) -> None:
    with house() as there:
        page = new_tray()
        match kind:
            case "pipe":
                bell, other = os.pipe()
                os.close(other)
            case "file":
                bell = os.open("/dev/zero", os.O_RDONLY)
            case "alone":
                bell = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach()
            case "datagram":
                bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach()
            case _:
                bell = socket.socket().detach()
        with pytest.raises(Refused) as refusal:
            there.trays.open("another", page, bell)
        assert refusal.value.code == Code.NOT_SHAREABLE
        await until(lambda: not any(map(is_open, (page, bell))))


async def test_a_session_has_one_tray() -> None:
    with house() as there:
        here, theirs = socket.socketpair()
        with here, pytest.raises(Refused) as refusal:
            there.trays.open(SESSION, new_tray(), theirs.detach())
        assert refusal.value.code == Code.BAD_MESSAGE


async def test_another_thread_sees_that_something_was_said_and_not_heard() -> None:
    with house() as built:
        assert built.trays.said() == 0
        built.out.lay(b"one")
        first = built.trays.said()
        built.out.lay(b"two")
        second = await asyncio.to_thread(built.trays.said)
        assert 0 < first < second
        await until(lambda: built.heard == [b"one", b"two"])
        assert built.trays.said() == 0
        built.out.lay(b"three")
        assert built.trays.said() not in (0, first, second)
        await settle()
    assert built.trays.said() == 0


async def test_a_tray_does_not_go_while_another_thread_looks_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, goes, close = list[bool](), list[bool](), Tray.close

    def note(tray: Tray) -> bool:
        looks.append(built.trays._looking.locked())
        return True

    def note_close(tray: Tray) -> None:
        goes.append(built.trays._looking.locked())
        close(tray)

    with house() as built:
        monkeypatch.setattr(Tray, "unheard", property(note))
        assert await asyncio.to_thread(built.trays.said) == 0  # nothing was ever laid there
        monkeypatch.setattr(Tray, "close", note_close)
        built.trays.close(SESSION)
    assert looks == [True]
    assert goes[0]
