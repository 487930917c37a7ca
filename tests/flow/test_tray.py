"""Clients with a tray: what they say there counts as if it had come by the socket, and no more."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.client.outtray import OutTray
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code
from kvferry.proto.messages import (
    ClientMessage,
    Done,
    Error,
    Finished,
    Goodbye,
    Outcome,
    StatusReport,
    StatusRequest,
    UseTray,
)
from kvferry.proto.tray import SLOTS, Tray, new_tray
from kvferry.testing.plugin import StartKvferryd
from kvferry.testing.raw import Raw, store

JOBS = 300


class RawWithTray(Raw):
    tray: OutTray | None = None

    def __init__(self, directory: Path, engine: str) -> None:
        super().__init__(directory, engine)
        tray = OutTray()
        page, bell = self.deposit(*tray.descriptors)
        self.ask(UseTray(1, page, bell), Done)
        tray.handed()
        self.tray = tray

    def send(self, *frames: bytes | ClientMessage) -> None:
        super().send(*frames)
        if self.tray is not None:
            self.tray.passed_by()

    def say(self, data: bytes, *, aloud: bool = False) -> bool:
        """Whether it was laid, and not said aloud."""
        if not aloud and self.tray is not None and self.tray.lay(data):
            return True
        self.send(data)
        return False

    def drop(self) -> None:
        super().drop()
        if self.tray is not None:
            self.tray.close()

    def __enter__(self) -> RawWithTray:
        return self


def results(raw: Raw, count: int) -> list[tuple[int, Outcome]]:
    ended: list[tuple[int, Outcome]] = []
    while len(ended) < count:
        ended += [(result.job_id, result.outcome) for result in raw.recv(Finished).results]
    assert len(ended) == count
    return ended


def test_jobs_end_in_the_order_they_were_submitted(start_kvferryd: StartKvferryd) -> None:
    with RawWithTray(start_kvferryd(limits_max_stores=JOBS).directory, "engine") as raw:
        raw.register()
        for job in range(JOBS):
            raw.say(encode(store(job, [job % 8], [job % 8])), aloud=job % 7 == 3)
        assert results(raw, JOBS) == [(job, Outcome.DONE) for job in range(JOBS)]
        raw.say(encode(Goodbye()))
        raw.recv(Goodbye)


def test_a_wrong_message_is_answered_and_the_next_is_heard(start_kvferryd: StartKvferryd) -> None:
    with RawWithTray(start_kvferryd().directory, "engine") as raw:
        raw.register()
        for junk in (b"", b"junk", b"\xc1" * 1000):
            raw.say(junk)
            assert raw.recv(Error).error.code == Code.BAD_MESSAGE
        raw.say(encode(store(1, [99], [0])))
        raw.say(encode(store(2, [0], [0])))
        assert results(raw, 2) == [(1, Outcome.REFUSED), (2, Outcome.DONE)]


def test_a_page_of_nonsense_ends_the_session_and_no_other(start_kvferryd: StartKvferryd) -> None:
    daemon = start_kvferryd()
    with RawWithTray(daemon.directory, "honest") as honest:
        honest.register()
        page = new_tray()
        with spoilt(daemon.directory, page) as (raw, bell):
            os.pwrite(page, struct.pack("=Q", 7), 0)
            bell.send(b"!")
            raw.session = ""
            while True:
                raw.send(StatusRequest(5))
                answer = raw.recv(object)
                if isinstance(answer, Error) and answer.error.code == Code.NO_SESSION:
                    break
                assert isinstance(answer, StatusReport)
        os.close(page)
        honest.say(encode(store(1, [0], [0])))
        assert results(honest, 1) == [(1, Outcome.DONE)]
    assert "makes no sense" in daemon.log()


def test_a_page_that_changes_all_the_time(start_kvferryd: StartKvferryd) -> None:
    """While the daemon looks: no crash, and an honest engine is served meanwhile."""
    daemon, random_ = start_kvferryd(), random.Random(7)
    with RawWithTray(daemon.directory, "honest") as honest:
        honest.register()
        for number in range(20):
            page = new_tray()
            with spoilt(daemon.directory, page) as (raw, bell):
                raw.session = ""
                tray, over = Tray(page), threading.Event()

                def scribble(page: int = page, over: threading.Event = over) -> None:
                    while not over.is_set():
                        at = random_.choice((0, 64, 128, 128 + 8192, random_.randrange(500_000)))
                        os.pwrite(page, random_.randbytes(8), at)

                scribbler = threading.Thread(target=scribble)
                scribbler.start()
                for _ in range(SLOTS):
                    tray.lay(encode(StatusRequest(1)), random_.randrange(3))
                    try:
                        bell.send(b"!", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    except OSError:
                        break
                over.set()
                scribbler.join()
            os.close(page)
            honest.say(encode(store(number, [0], [0])))
            assert results(honest, 1) == [(number, Outcome.DONE)]
    assert daemon.process.poll() is None
    assert "Traceback" not in daemon.log()


@contextmanager
def spoilt(directory: Path, page: int) -> Iterator[tuple[Raw, socket.socket]]:
    """A session with a tray, whose page is ours to write to."""
    here, theirs = socket.socketpair()
    with Raw(directory, "spoilt") as raw, here:
        tickets = raw.deposit(page, theirs.fileno())
        theirs.close()
        raw.ask(UseTray(1, *tickets), Done)
        yield raw, here


@pytest.mark.parametrize("wrong", ["page", "bell", "ticket"])
def test_what_is_no_tray_is_refused(start_kvferryd: StartKvferryd, wrong: str) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    here, theirs = socket.socketpair()
    with Raw(start_kvferryd().directory, "engine") as raw, here, theirs:
        page, bell = raw.deposit(
            null if wrong == "page" else new_tray(), null if wrong == "bell" else theirs.fileno()
        )
        error = raw.ask(UseTray(3, page, 99 if wrong == "ticket" else bell), Error)
        assert error.request_id == 3
        code = Code.UNKNOWN_TICKET if wrong == "ticket" else Code.NOT_SHAREABLE
        assert error.error.code == code
        raw.register()
        raw.send(store(1, [0], [0]))
        assert results(raw, 1) == [(1, Outcome.DONE)]
    os.close(null)
