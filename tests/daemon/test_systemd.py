"""The Supervisor, in its own process, with a service manager that has the protocol of systemd."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
import time
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry.daemon.systemd import MAX_UNSENT, Supervisor
from support.service_manager import ServiceManager
from support.time_limits import PROMPTLY, TIMEOUT

PROGRAM = """
import os, sys, time
from kvferry.daemon.systemd import Supervisor

supervisor = Supervisor()
def memfd(text):
    descriptor = os.memfd_create("test")
    os.write(descriptor, text.encode())
    return descriptor
def kept():
    return {name: os.pread(d, 99, 0).decode() for name, d in supervisor.stored_fds.items()}
def send_status(value):
    supervisor.status(repr(value))
"""

Run = Callable[..., ServiceManager]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """run(lines, **options) -> a manager. Its program runs the lines and sleeps."""
    managers: list[ServiceManager] = []

    def start(lines: str, notify: Path | str | None = None, **options: object) -> ServiceManager:
        path = tmp_path / f"notify-{len(managers)}" if notify is None else notify
        program = f"{PROGRAM}\n{lines}\nsupervisor.ready('up')\ntime.sleep(60)"
        manager = ServiceManager([sys.executable, "-c", program], path, **options)  # type: ignore[arg-type]
        managers.append(manager)
        manager.start()
        return manager

    yield start
    for manager in managers:
        manager.close()


def test_the_sequence_of_notifications(run: Run) -> None:
    manager = run(
        "supervisor.status('one\\ntwo\\udcff'); supervisor.keep_alive(); supervisor.reloading();"
        "supervisor.stopping()"
    )
    first, second, third, fourth, last = manager.messages
    assert first == {"STATUS": r"one two\udcff"}
    assert second == {"WATCHDOG": "1"}
    assert third.keys() == {"RELOADING", "MONOTONIC_USEC"}
    assert fourth == {"STOPPING": "1"}
    assert last == {"READY": "1", "STATUS": "up"}
    assert not manager.ignored


def test_stored_descriptors_are_passed_on_with_their_names(run: Run) -> None:
    """After several restarts. The order has no effect, the newer of two with one name is kept, and
    a pipe stays without its other end: without FDPOLL=0, the manager would drop it."""
    manager = run(
        "pipe = supervisor.stored_fds.pop('pipe', None)\n"
        "send_status((pipe is not None, kept(), len(os.listdir('/proc/self/fd'))))\n"
        "if pipe is None:\n"
        "    for name in ('one', 'two', 'three'): supervisor.store_fd(name, memfd(name))\n"
        "    supervisor.store_fd('one', memfd('new')); supervisor.remove_fd('two')\n"
        "    supervisor.store_fd('pipe', os.pipe()[0])\n",
        notify=f"@kvferry-test-{os.getpid()}",
    )
    *nothing, before = literal_eval(manager.values("STATUS")[0])
    assert nothing == [False, {}]
    for _ in range(2):
        manager.kill()
        manager.start()
        assert sorted(manager.names) == ["one", "one", "pipe", "three"]
        expected = True, {"one": "new", "three": "three"}, before + 3
        assert literal_eval(manager.values("STATUS")[0]) == expected


@pytest.fixture
def full_queue(tmp_path: Path) -> Iterator[tuple[Supervisor, socket.socket]]:
    """A supervisor, and the socket of a manager whose queue is full."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(BlockingIOError):
            sender.connect(path)
            sender.setblocking(False)
            while True:
                sender.send(b"OTHER=1")
        receiver.settimeout(TIMEOUT)
        yield Supervisor({"NOTIFY_SOCKET": path}), receiver


def _receive_queued(supervisor: Supervisor, receiver: socket.socket) -> list[tuple[str, str]]:
    """Receive until STOPPING=1. Returns each message and the content of its descriptor."""
    thread = threading.Thread(target=supervisor.send_queued, args=(20,))
    thread.start()
    received = []
    while ("STOPPING=1", "") not in received:
        data, descriptors, _, _ = socket.recv_fds(receiver, 4096, 1)
        content = "".join(os.pread(descriptor, 9, 0).decode() for descriptor in descriptors)
        received.append((data.decode(), content))
        for descriptor in descriptors:
            os.close(descriptor)
    thread.join()
    return [message for message in received if message[0] != "OTHER=1"]


def _store_memfd(supervisor: Supervisor, name: str) -> None:
    """Store a memfd and close it. The caller owns the descriptor."""
    descriptor = os.memfd_create(name)
    os.write(descriptor, name.encode())
    supervisor.store_fd(name, descriptor)
    os.close(descriptor)


def test_notifications_do_not_wait_for_a_manager_that_does_not_read(
    full_queue: tuple[Supervisor, socket.socket],
) -> None:
    """It receives them in order after it reads again, except those that a later one replaces."""
    supervisor, receiver = full_queue
    began = time.monotonic()
    _store_memfd(supervisor, "one")
    supervisor.ready("up")
    for number in range(100):
        supervisor.keep_alive()
        supervisor.status(f"status {number}")
    supervisor.reloading()
    supervisor.ready("again")
    _store_memfd(supervisor, "two")
    supervisor.remove_fd("one")
    supervisor.stopping()
    assert time.monotonic() - began < PROMPTLY  # a blocking write would never end
    assert not supervisor.send_queued(0.05)
    received = _receive_queued(supervisor, receiver)
    reloading = received[3][0]
    assert reloading.startswith("RELOADING=1\n")
    assert received == [
        ("READY=1\nSTATUS=up", ""),
        ("WATCHDOG=1", ""),
        ("STATUS=status 99", ""),
        (reloading, ""),
        ("READY=1\nSTATUS=again", ""),
        ("FDSTORE=1\nFDNAME=two\nFDPOLL=0", "two"),
        ("FDSTOREREMOVE=1\nFDNAME=one", ""),
        ("STOPPING=1", ""),
    ]
    assert supervisor.send_queued(0)


def test_queued_notifications_are_sent_with_the_next_one(
    full_queue: tuple[Supervisor, socket.socket],
) -> None:
    supervisor, receiver = full_queue
    supervisor.ready("up")
    assert receiver.recv(99) == b"OTHER=1"
    assert receiver.recv(99) == b"OTHER=1"
    supervisor.keep_alive()
    receiver.setblocking(False)
    with suppress(BlockingIOError):
        while (message := receiver.recv(99)) == b"OTHER=1":
            pass
    assert message == b"READY=1\nSTATUS=up"
    assert receiver.recv(99) == b"WATCHDOG=1"


def test_queued_notifications_are_bounded(full_queue: tuple[Supervisor, socket.socket]) -> None:
    supervisor, _ = full_queue
    before = len(os.listdir("/proc/self/fd"))
    supervisor.remove_fd("one")
    supervisor._unsent *= MAX_UNSENT
    supervisor.remove_fd("one too many")
    _store_memfd(supervisor, "one too many")
    supervisor.stopping()
    # A thread may meanwhile have closed a descriptor of an earlier test.
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(supervisor._unsent) == MAX_UNSENT + 1
    assert supervisor._unsent[-1].lines == ("STOPPING=1",)


def test_children_inherit_neither_variables_nor_descriptors(run: Run) -> None:
    manager = run(
        "import subprocess\n"
        "if not supervisor.stored_fds: supervisor.store_fd('one', memfd('1'))\n"
        'code = \'import os; print([n for n in os.environ if n.startswith("LISTEN") '
        'or n.startswith("WATCHDOG") or n in ("NOTIFY_SOCKET", "FDSTORE")], '
        'sorted(os.listdir("/proc/self/fd"))[:-1])\'\n'
        "output = subprocess.run([sys.executable, '-c', code], stdout=-1, close_fds=False).stdout\n"
        "send_status(output.decode().strip())",
        watchdog=60.0,
    )
    manager.kill()
    manager.start()
    assert manager.names == ["one"]
    assert "[] ['0', '1', '2']" in manager.values("STATUS")[0]


def test_the_watchdog_timeout_is_read() -> None:
    environ = {"WATCHDOG_PID": str(os.getpid()), "WATCHDOG_USEC": "2500000"}
    assert Supervisor(environ).watchdog_seconds == 2.5


def test_notifications_for_another_process_are_ignored() -> None:
    reader, writer = os.pipe()
    try:
        environ = {"LISTEN_PID": "1", "LISTEN_FDS": str(writer), "LISTEN_FDNAMES": "a:b"}
        supervisor = Supervisor({**environ, "WATCHDOG_PID": "1", "WATCHDOG_USEC": "1000000"})
        assert supervisor.stored_fds == {}
        assert supervisor.watchdog_seconds is None
        assert fcntl.fcntl(reader, fcntl.F_GETFD) == fcntl.FD_CLOEXEC
    finally:
        os.close(reader)
        os.close(writer)


def test_without_a_service_manager_nothing_is_sent() -> None:
    environ = {"PATH": "/bin"}
    supervisor = Supervisor(environ)
    assert environ == {"PATH": "/bin"}
    assert not supervisor.has_fd_store
    supervisor.ready("up")
    supervisor.store_fd("one", 0)
    assert supervisor.send_queued(0.1)


def test_a_lost_service_manager_is_logged_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "missing")})
    for _ in range(3):
        supervisor.keep_alive()
    output = "".join(capfd.readouterr())
    assert output.count("cannot notify the service manager") == 1
    assert str(tmp_path / "missing") in output


@pytest.mark.parametrize("name", ["", "a:b", "x" * 256, "a\nREADY=1", "schlüssel"])
def test_descriptor_names_that_systemd_refuses_are_refused(name: str) -> None:
    supervisor = Supervisor({})
    with pytest.raises(ValueError, match="descriptor name"):
        supervisor.store_fd(name, 0)
    with pytest.raises(ValueError, match="descriptor name"):
        supervisor.remove_fd(name)


def test_the_fd_store_is_assumed_to_exist_if_its_size_is_unknown() -> None:
    assert Supervisor({"NOTIFY_SOCKET": "/nowhere"}).has_fd_store
    assert Supervisor({"NOTIFY_SOCKET": "/nowhere", "FDSTORE": "9"}).has_fd_store
    assert not Supervisor({"NOTIFY_SOCKET": "/nowhere", "FDSTORE": "0"}).has_fd_store
    assert not Supervisor({"FDSTORE": "9"}).has_fd_store
