"""Worker processes: requests and replies, deadlines, deaths, restarts, and their end."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvferry.daemon.daemon_connection import MAX_DATAGRAM
from kvferry.daemon.processes import ChildProcess, ProcessDied, ProcessTimes, Program
from kvferry.testing.engine import until
from support.eventually import eventually
from support.refused_starts import refuse_starts
from support.time_limits import TIMEOUT

SOON_RESTARTED = ProcessTimes(first_restart=0.01, last_restart=0.01)


@dataclass
class EchoWorker:
    """A process that runs echo_worker.py, and what its hooks were called with."""

    times: ProcessTimes = SOON_RESTARTED
    arguments: tuple[str, ...] = ()
    notices: list[bytes] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        program = Program("echo", "support.echo_worker", self.arguments, ())
        self.process = ChildProcess(program, self.times, self.notices.append, self.losses.append)
        self.running = asyncio.create_task(self.process.run())

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, payload: bytes) -> asyncio.Future[bytes]:
        return self.process.send(payload, bytes)

    async def answer(self, payload: bytes) -> bytes:
        return await asyncio.wait_for(self.ask(payload), TIMEOUT)

    async def close(self) -> None:
        self.running.cancel()
        with suppress(asyncio.CancelledError, ZeroDivisionError):
            await self.running


@pytest.fixture
async def worker() -> AsyncIterator[EchoWorker]:
    worker = EchoWorker()
    await worker.process.until_ready()
    yield worker
    await worker.close()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def block_until_readable(worker: EchoWorker) -> None:
    """Block the event loop until the process has sent something."""
    assert worker.process._socket is not None
    select.select([worker.process._socket], [], [], TIMEOUT)


# Requests


async def test_replies_end_their_own_requests(worker: EchoWorker) -> None:
    held, echoed = worker.ask(b"hold"), worker.ask(b"1")
    assert (await echoed, await held) == (b"1", b"held")
    assert worker.process.in_flight == 0
    assert (worker.notices, worker.losses) == ([b"ready"], [])


async def test_requests_wait_for_room_in_the_socket(worker: EchoWorker) -> None:
    """Also the largest ones, while the process is stopped."""
    os.kill(worker.pid, signal.SIGSTOP)
    large = [bytes([n]) * (MAX_DATAGRAM - 8) for n in range(30)]
    replies = [worker.ask(each) for each in large]
    os.kill(worker.pid, signal.SIGCONT)
    assert await asyncio.wait_for(asyncio.gather(*replies), TIMEOUT) == large


async def test_a_request_fails_once_its_process_is_reaped(worker: EchoWorker) -> None:
    """Not before: the process may still use memory that the request names."""
    await worker.answer(b"1")
    before = worker.pid
    lost = worker.ask(b"hang")
    assert not await worker.process.wait(lost, 0.0)
    assert worker.process.is_late(lost)
    worker.process.kill("test")
    assert not await worker.process.wait(lost, TIMEOUT)
    assert not worker.process.is_late(lost)
    assert (lost.done(), worker.losses, worker.process.in_flight) == (False, ["test"], 1)
    next_one = worker.ask(b"next")
    with pytest.raises(ProcessDied, match="echo: exit status -9"):
        await lost
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert await next_one == b"next"
    assert worker.pid != before


async def test_a_cancelled_caller_does_not_end_its_request(worker: EchoWorker) -> None:
    held = worker.ask(b"hold")
    caller = asyncio.create_task(worker.process.wait(held, TIMEOUT))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await worker.answer(b"1") == b"1"
    assert await held == b"held"


# Deadlines


async def test_a_reply_that_has_arrived_is_not_late(worker: EchoWorker) -> None:
    """Although the event loop was busy until after the deadline."""
    reply = worker.ask(b"1")
    block_until_readable(worker)
    assert await worker.process.wait(reply, -1.0)
    assert reply.result() == b"1"


async def test_progress_postpones_a_deadline(worker: EchoWorker) -> None:
    """Also if the reply that shows it is read only when the deadline is judged."""
    progress, begun = [0.0], time.monotonic()
    reply = worker.ask(b"hang")
    worker.process.send(b"1", lambda _: progress.__setitem__(0, time.monotonic()))
    block_until_readable(worker)
    assert not await worker.process.wait(reply, 0.2, lambda: progress[0])
    assert time.monotonic() >= progress[0] + 0.2 > begun + 0.2
    assert worker.process.is_late(reply)


async def test_a_process_that_is_not_ready_in_time_is_killed() -> None:
    worker = EchoWorker(ProcessTimes(start=0.05, first_restart=0.01), ("slow",))
    request = worker.ask(b"1")
    await eventually(lambda: len(worker.losses) == 2)
    assert worker.losses == ["not ready within 0.05 s"] * 2
    assert not request.done()  # it waits for a process that gets ready
    await worker.close()


# Deaths


async def test_what_a_process_sent_before_its_end_is_handled(worker: EchoWorker) -> None:
    """Although the event loop is busy until then."""
    worker.ask(b"exit")
    until(lambda: not is_alive(worker.pid))
    await eventually(lambda: worker.losses)
    assert (worker.notices, worker.losses) == ([b"ready", b"exits"], ["it has ended"])
    assert await worker.answer(b"1") == b"1"


async def test_a_process_that_keeps_dying_is_started_less_and_less_often() -> None:
    """Until it makes progress."""
    pauses = list[float]()
    worker = EchoWorker(ProcessTimes(first_restart=0.1, last_restart=0.4))
    for _ in range(4):
        await worker.process.until_ready()
        pauses.append(worker.process._restart_in)
        killed = time.monotonic()
        worker.process.kill("test")
        await worker.process.until_ready()
        assert time.monotonic() - killed >= pauses[-1]
    assert pauses == [0.1, 0.2, 0.4, 0.4]
    worker.process.note_progress()
    assert worker.process._restart_in == 0.1
    await worker.close()


async def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = refuse_starts(monkeypatch, OSError("too many"))
    worker = EchoWorker()
    assert await worker.answer(b"1") == b"1"
    assert (refusals, worker.losses) == ([], ["cannot start: too many"])
    await worker.close()
    refuse_starts(monkeypatch, OSError("none"))
    with pytest.raises(OSError, match="none"):
        worker.process.start()


async def test_a_start_without_descriptors_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = list[int]()

    def refuse(pid: int) -> int:
        started.append(pid)
        monkeypatch.undo()
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    worker = EchoWorker()
    assert await worker.answer(b"1") == b"1"
    assert worker.losses == ["cannot start: [Errno 24] too many"]
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    await worker.close()


@pytest.mark.parametrize("hook", ["notice", "receive"])
async def test_an_error_of_a_hook_ends_the_run(worker: EchoWorker, hook: str) -> None:
    def fail(_: bytes) -> None:
        raise ZeroDivisionError

    if hook == "notice":
        worker.process._notice = fail
        worker.ask(b"exit")
    else:
        worker.process.send(b"1", fail)
    with pytest.raises(ZeroDivisionError):
        await worker.running
    assert worker.process.pid is None


# The title


async def test_a_process_shows_its_title_and_no_arguments(worker: EchoWorker) -> None:
    folder = Path(f"/proc/{worker.pid}")
    assert (folder / "cmdline").read_bytes().rstrip(b"\0") == b"kvferryd: echo"
    assert (folder / "comm").read_text() == "kvferryd: echo\n"


# The end


async def test_a_process_ends_by_itself_with_the_run(worker: EchoWorker) -> None:
    process = worker.process._process
    assert process is not None
    await worker.close()
    assert (process.returncode, worker.process.pid, worker.losses) == (0, None, [])


async def test_a_process_that_does_not_end_is_killed() -> None:
    worker = EchoWorker(ProcessTimes(end=0.05), ("stay",))
    await worker.process.until_ready()
    process = worker.process._process
    assert process is not None
    await worker.close()
    assert process.returncode == -signal.SIGKILL


# Starts a worker that it stops at once, and dies. Prints the pid of the worker.
DAEMON = """
import asyncio, os, signal
from kvferry.daemon.processes import ChildProcess, ProcessTimes, Program
async def main():
    process = ChildProcess(Program("echo", "support.echo_worker", ["stay"], []), ProcessTimes())
    process.start()
    os.kill(process.pid, signal.SIGSTOP)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_a_worker_that_is_stopped_at_its_start_ends_with_the_daemon() -> None:
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    try:
        until(lambda: not is_alive(worker))
    finally:
        if is_alive(worker):
            os.kill(worker, signal.SIGKILL)


def test_a_worker_whose_daemon_died_while_it_started_ends() -> None:
    """The kernel ends it only with a daemon that dies later."""
    command = [sys.executable, "-P", "-m", "support.echo_worker", "echo", "0", "1"]
    assert subprocess.run(command, timeout=TIMEOUT).returncode == 2
