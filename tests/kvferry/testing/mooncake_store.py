"""A Mooncake Store on this machine, for tests and the demo: a master and a store process.

    with MooncakeStore(segment_bytes=256 << 20) as store:
        LocalDaemon(tiers_mooncake_master=store.address, ...)
        store.kill_master()
        store.start_master()

Both are the programs of the wheel (extra `mooncake`), without authentication. The master listens at
`host`, the data ports of the store process at all interfaces, as Mooncake has it; the ports are
free ones. Any thread, one at a time.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import urlopen

# Seconds to wait for a process to be ready.
READY_SECONDS = 60.0
# kvferry is on no index: its extras come from a checkout.
INSTALL = "pip install '.[mooncake]' in a checkout of kvferry"
# As the daemon says it, of which this package only uses the command.
INSTALL_LIBRARIES = "on Debian or Ubuntu: apt-get install libcurl4 libibverbs1 libnuma1"
# The dynamic loader writes this if a library is missing.
_LOADER_ERROR = "error while loading shared libraries: "
# Fetches a URL with the same command prefix as a program, for example in its network namespace.
_FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=2).read().decode())"


class MooncakeStore:
    """A mooncake_master and a store process.

    host: the address under which clients reach both. master_port: 0 for a free one.

    segment_bytes: memory that the store process contributes. master_command, store_command: put in
    front of the programs, as in ("ip", "netns", "exec", "a"). store_host: the address of the store
    process, if it is another. master_options: more options of mooncake_master. log: a directory for
    the output of both.

    Both run once the constructor has returned. Raises TimeoutError if they are not ready in
    READY_SECONDS, and RuntimeError if the wheel, or a library that it needs, is not installed.
    """

    def __init__(
        self,
        master_port: int = 0,
        segment_bytes: int = 256 << 20,
        host: str = "127.0.0.1",
        *,
        store_host: str = "",
        commands: tuple[Sequence[str], Sequence[str]] = ((), ()),
        master_options: Sequence[str] = (),
    ) -> None:
        self.host, self.store_host = host, store_host or host
        self._ports = [reserve_port() for _ in range(3)]
        free, self._metrics_port, self._store_port = (each.getsockname()[1] for each in self._ports)
        self.master_port = master_port or free
        self.segment_bytes = segment_bytes
        self._master_command, self._store_command = commands
        self._master_options = master_options
        self._directory = tempfile.TemporaryDirectory(prefix="kvferry-mooncake-")
        self.master: subprocess.Popen[bytes] | None = None
        self.store: subprocess.Popen[bytes] | None = None
        try:
            self.start_master()
            self.start_store()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """HOST:PORT of the master."""
        return f"{self.host}:{self.master_port}"

    @property
    def log(self) -> str:
        """The output of both processes so far."""
        return "".join(
            path.read_text(errors="replace") for path in Path(self._directory.name).iterdir()
        )

    def start_master(self) -> None:
        """Start the master, and wait until it replies. It has no keys."""
        self.master = self._start(
            "mooncake_master",
            self._master_command,
            f"--rpc_address={self.host}",
            f"--rpc_port={self.master_port}",
            f"--metrics_host={self.host}",
            f"--metrics_port={self._metrics_port}",
            # Seconds after its last heartbeat, the master drops a store process that died.
            "--client_ttl=5",
            *self._master_options,
        )
        self._wait(lambda: "service_ready" in self._ask_master("health"), "mooncake_master")

    def start_store(self) -> None:
        """Start the store process, and wait until the master has its memory."""
        self.store = self._start(
            "mooncake_client",
            self._store_command,
            f"--host={self.store_host}",
            f"--port={self._store_port}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={self.segment_bytes}",
        )
        self.wait_until_mounted()

    def wait_until_mounted(self) -> None:
        """Wait until the master has memory. After its restart this takes a second or two."""
        self._wait(lambda: bool(self._ask_master("get_all_segments").strip()), "mooncake_client")

    def kill_master(self) -> None:
        _end(self.master)

    def kill_store(self) -> None:
        """Kill the store process. The master drops its memory after `client_ttl`."""
        _end(self.store)

    def pause_master(self) -> None:
        """SIGSTOP: the master keeps its connections and does not reply."""
        self._stop(self.master)

    def resume_master(self) -> None:
        _signal(self.master, signal.SIGCONT)

    def pause_store(self) -> None:
        """SIGSTOP: the store process keeps its connections and transfers no bytes."""
        self._stop(self.store)

    def resume_store(self) -> None:
        _signal(self.store, signal.SIGCONT)

    def key_count(self) -> int:
        """The number of objects that the master has."""
        for line in self._ask_master("metrics").splitlines():
            if line.startswith("master_key_count "):
                return int(float(line.split()[1]))
        raise RuntimeError("the master's metrics have no master_key_count")

    def close(self) -> None:
        """Kill both processes."""
        _end(self.store)
        _end(self.master)
        for port in self._ports:
            port.close()
        self._directory.cleanup()

    def __enter__(self) -> MooncakeStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self, program: str, command: Sequence[str], *options: str
    ) -> subprocess.Popen[bytes]:
        environment = {"GLOG_logtostderr": "1", **os.environ}
        with (Path(self._directory.name) / program).open("ab") as log:
            return subprocess.Popen(
                [*command, find_program(program), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def _ask_master(self, path: str) -> str:
        """The reply of the master's HTTP port; empty if there is none."""
        url = f"http://{self.host}:{self._metrics_port}/{path}"
        if self._master_command:
            command = [*self._master_command, sys.executable, "-c", _FETCH, url]
            return subprocess.run(command, capture_output=True, text=True).stdout
        try:
            with urlopen(url, timeout=2) as answer:
                return str(answer.read().decode())
        except (URLError, OSError):
            return ""

    def _stop(self, process: subprocess.Popen[bytes] | None) -> None:
        """Send SIGSTOP, and wait until all threads have stopped: on busy cores some still run."""
        _signal(process, signal.SIGSTOP)
        if process is not None:
            self._wait(lambda: _is_stopped(process.pid), "SIGSTOP")

    def _wait(self, ready: Callable[[], bool], program: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{program} not ready in {READY_SECONDS} s: {self.log[-2000:]}")
            for process in (self.master, self.store):
                if process is not None and process.poll() is not None:
                    _, _, loader_error = self.log.partition(_LOADER_ERROR)
                    if loader_error:
                        missing = f"{program} cannot be started: {loader_error.splitlines()[0]}"
                        raise RuntimeError(f"{missing}; {INSTALL_LIBRARIES}")
                    raise RuntimeError(f"{process.args!r} has ended: {self.log[-2000:]}")
            time.sleep(0.02)


def is_installed() -> bool:
    """Whether the wheel of Mooncake is installed."""
    return importlib.util.find_spec("mooncake") is not None


def find_program(name: str) -> str:
    """The path of a program of the wheel. Raises RuntimeError if it is not installed."""
    spec = importlib.util.find_spec("mooncake")
    for directory in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(directory) / name
        if path.exists():
            return str(path)
    raise RuntimeError(f"{name} is not installed: {INSTALL}")


def reserve_port() -> socket.socket:
    """A socket whose TCP port the kernel gives to nobody else.

    It does not listen, so that a program which sets SO_REUSEADDR can, again and again.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _signal(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(number)


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped: proc(5), state T in stat."""
    try:
        stats = [(each / "stat").read_text() for each in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    _signal(process, signal.SIGKILL)
    if process is not None:
        process.wait()
