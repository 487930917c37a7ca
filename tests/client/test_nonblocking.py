"""Clients that end: their resources are released, even if no code closes them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from kvferry.client import (
    AsyncOffloadClient,
    CPULoadStoreSpec,
    Gone,
    GPULoadStoreSpec,
    LocalDaemon,
    OffloadClient,
    TransferSpec,
)
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT

BEGIN = """
import asyncio, atexit, gc, logging, os, signal, sys, threading, time
from kvferry.client import AsyncOffloadClient, Gone, OffloadClient
from support.time_limits import TIMEOUT

def connect():
    client = OffloadClient(sys.argv[1], engine="dropped")
    client.status()
    return client

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
"""
END = """
gc.collect()
deadline = time.monotonic() + TIMEOUT
while threads() > before:  # ZeroMQ's threads end with its contexts
    assert time.monotonic() < deadline, threads()
"""

DROPPED = (
    # dropped
    "connect()",
    # its user's __init__ raised
    """
class User:
    def __init__(self):
        self.client = connect()
        self.client.user = self
        raise ValueError

try:
    User()
except ValueError:
    pass
""",
    # in another thread
    """
clients = [connect()]
thread = threading.Thread(target=lambda: (clients.clear(), gc.collect()))
thread.start()
thread.join()
""",
    # created in a thread that ended
    """
thread = threading.Thread(target=connect)
thread.start()
thread.join()
""",
    # its loop was closed
    """
async def main():
    await (await AsyncOffloadClient.connect(sys.argv[1])).status()

asyncio.run(main())
""",
    # closed when its loop was
    """
client = asyncio.run(AsyncOffloadClient.connect(sys.argv[1]))
asyncio.run(client.close())
""",
)
AT_EXIT = (
    # kept
    "client = connect()",
    # in a cycle
    "client = connect(); client.itself = client; del client; gc.disable()",
    # a thread waits
    """
client = connect()
threading.Thread(target=client._link.connection.wait_readable, args=(60,), daemon=True).start()
time.sleep(0.1)
""",
    # dropped at exit, with a log message
    """
def drop():
    clients.clear()
    gc.collect()

atexit.register(drop)
logging.disable()
clients = [connect()]
os.kill(clients[0].daemon.pid, signal.SIGKILL)
while not clients[0].connecting:
    clients[0].get_finished()
clients[0].get_finished()
""",
)


FORK = """
def fork(run_in_child):
    client = connect()
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        while client.status().sessions > 1:  # the child's Goodbye has another connection
            time.sleep(0.001)
        client.close()
    else:
        signal.alarm(int(TIMEOUT))  # ends the child if a call hangs
        run_in_child(client)
        sys.exit()

def drop(client):
    del client
    gc.collect()

def call_methods(client):
    for call in (client.status, client.get_finished, lambda: client.cancel([1])):
        time.sleep(0.001)
        try:
            raise AssertionError(call())
        except Gone as error:
            assert "create one in the forked child" in str(error), error
    assert not client.connected and not client.connecting
    client.close()

def create_another(_):
    with OffloadClient(sys.argv[1], engine="another") as own:
        assert own.status().sessions == 2

for run_in_child in (lambda client: None, drop, OffloadClient.close, call_methods, create_another):
    fork(run_in_child)
"""


def run(program: str, daemon: LocalDaemon) -> None:
    command = [sys.executable, "-c", BEGIN + program, str(daemon.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_client_that_is_dropped(kvferryd: LocalDaemon) -> None:
    run("".join(program + END for program in DROPPED), kvferryd)
    with OffloadClient(kvferryd.directory) as client:
        until(lambda: client.status().sessions == 1)


def test_a_client_that_is_open_when_the_process_exits(kvferryd: LocalDaemon) -> None:
    for program in AT_EXIT:
        run(program, kvferryd)


def test_the_children_of_forks(kvferryd: LocalDaemon) -> None:
    """A child has a copy of its parent's client. It does not affect the parent."""
    run(FORK, kvferryd)


# Closed clients


SPEC: TransferSpec = GPULoadStoreSpec([1]), CPULoadStoreSpec([1])


def test_calls_of_a_closed_client_raise_gone(kvferryd: LocalDaemon) -> None:
    client, disconnected = OffloadClient(kvferryd.directory), OffloadClient(kvferryd.directory)
    client.close()
    check_closed(client)
    kvferryd.kill()
    until(lambda: not disconnected.get_finished() and disconnected.connecting)
    disconnected.close()
    check_closed(disconnected)


def check_closed(client: OffloadClient) -> None:
    calls: list[Callable[[], object]] = [
        client.status,
        client.namespaces,
        lambda: client.transfer_async(1, SPEC),
        lambda: client.cancel([1]),
        client.get_finished,
    ]
    for call in calls:
        time.sleep(0.001)  # get_finished checks the connection at most once in some microseconds
        with pytest.raises(Gone, match="this client was closed") as gone:
            call()
        assert gone.value is client.gone


async def test_closing_an_asyncio_client_ends_its_waits(
    kvferryd: LocalDaemon,
) -> None:
    """The waits end at once, even if the daemon does not reply."""
    client = await AsyncOffloadClient.connect(kvferryd.directory)
    os.kill(kvferryd.pid, signal.SIGSTOP)
    try:
        waiting = asyncio.create_task(client.status())
        await asyncio.sleep(0)
        await client.close(timeout=0.1)
        for request in (waiting, client.status()):
            with pytest.raises(Gone, match="this client was closed"):
                await asyncio.wait_for(request, TIMEOUT)
        with pytest.raises(Gone, match="this client was closed"):
            client.transfer_async(1, SPEC)
    finally:
        os.kill(kvferryd.pid, signal.SIGCONT)
