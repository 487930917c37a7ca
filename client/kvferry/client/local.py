"""A local daemon: a kvferryd process in a private runtime directory, stopped at the end.

It also stops when this process ends in another way, by SIGKILL for example.

For trials, tests and benchmarks. In production the daemon runs under systemd.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvferry.client.process_bound import ProcessBound
from kvferry.proto.errors import Code, ErrorInfo, Gone, KVFerryError, error_of

# Seconds between two checks whether the daemon is ready.
_POLL_INTERVAL = 0.01


class LocalDaemon(ProcessBound):
    """Start kvferryd on a device; the constructor returns when it is ready.

    device: "cpu", a GPU's index or its UUID. pool_bytes: size of the host pool. options: further
    flags of kvferryd as keywords (stop_drain_seconds=1, reference_stall=0.5...). Without the option
    siblings_enabled it exchanges no blocks with other daemons. `directory` is for OffloadClient.
    Raises the error that kvferryd reports if it does not start (NO_DEVICE, BAD_CONFIG...), else
    Gone (DAEMON_GONE, TIMEOUT) with its log.
    """

    INSTEAD = "pass its `directory`"

    def __init__(
        self,
        device: str = "cpu",
        *,
        pool_bytes: int = 256 << 20,
        runtime_dir: Path | None = None,
        timeout: float = 60.0,
        **options: object,
    ) -> None:
        self._temporary = runtime_dir is None
        self._creator = os.getpid()
        self.runtime_dir = runtime_dir or Path(tempfile.mkdtemp(prefix="kvferry-"))
        self.runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, path = tempfile.mkstemp(".log", "kvferryd-", self.runtime_dir)
        os.close(handle)
        self.log_path = Path(path)
        arguments = {
            "device": device,
            "pool_size": pool_bytes,
            "runtime_dir": self.runtime_dir,
            "stop_with_process": self._creator,
            "siblings_enabled": "false",
        }
        self.command = [sys.executable, "-m", "kvferry.daemon"]
        for name, value in (arguments | options).items():
            self.command += [f"--{name.replace('_', '-')}", str(value)]
        try:
            self._start(timeout)
        except BaseException:
            self._remove_directory()
            raise

    @property
    def pid(self) -> int:
        """The process id of the daemon."""
        return self.process.pid

    @property
    def directory(self) -> Path:
        """The daemon's runtime directory, with its sockets."""
        return self._directory

    def log(self) -> str:
        """The daemon's log so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self, timeout: float = 30.0) -> int:
        """Send SIGTERM and return the exit status. After `timeout` seconds, SIGKILL and raise."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end of the process."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Stop the daemon if it runs, and remove its private directory."""
        atexit.unregister(self._close_at_exit)
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self._remove_directory()

    def __enter__(self) -> LocalDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, timeout: float) -> None:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ
            )
        # A signal's exception may come before the caller has this object.
        atexit.register(self._close_at_exit)
        try:
            self._wait_ready(timeout)
        except BaseException:
            atexit.unregister(self._close_at_exit)
            self.kill()
            raise

    def _wait_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._is_ready():
            if self.process.poll() is not None:
                raise _start_error(self.log(), self.process.returncode)
            if time.monotonic() > deadline:
                raise Gone(
                    Code.TIMEOUT, f"kvferryd not ready within {timeout:g} s: {self.log()}", timeout
                )
            time.sleep(_POLL_INTERVAL)

    def _is_ready(self) -> bool:
        """Whether the process has locked a runtime directory and created its socket there."""
        for lock in self.runtime_dir.glob("*/lock"):
            if (
                lock.read_text().strip() == str(self.pid)
                and (lock.parent / "kvferry.sock").exists()
            ):
                self._directory = lock.parent
                return True
        return False

    def _close_at_exit(self) -> None:
        if os.getpid() == self._creator:  # not at the exit of a forked child
            self.close()

    def _remove_directory(self) -> None:
        if self._temporary:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)


def _start_error(log: str, status: int) -> KVFerryError:
    """The error that an ended daemon reported on standard error."""
    if reason := re.search(r"^kvferryd: \[(\w+)\] (.*)", log, re.MULTILINE | re.DOTALL):
        return error_of(ErrorInfo(reason[1], f"kvferryd did not start: {reason[2].strip()}"))
    return Gone(Code.DAEMON_GONE, f"kvferryd did not start: {log}", status)
