"""A daemon of one's own: started as a process in a private folder, stopped at the end.

For trials, tests and benchmarks. In service the daemon runs under systemd and engines come and go.
"""

from __future__ import annotations

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
from types import TracebackType

from kvferry.proto.errors import Code, ErrorInfo, Gone, KVFerryError, error_of

_POLL = 0.01


class LocalDaemon:
    """kvferryd on a device, ready when this returns.

    device: "cpu", a GPU's index or its UUID. pool_bytes: size of the host pool. options: more of
    kvferryd's flags, as keywords (stop_drain_seconds=1, reference_stall=0.5...).
    `directory` is what OffloadClient wants. Where it does not come up, raises what it refused to
    start with (NO_DEVICE, BAD_CONFIG...), else Gone (DAEMON_GONE, TIMEOUT) with its own words.
    """

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
        self.runtime_dir = runtime_dir or Path(tempfile.mkdtemp(prefix="kvferry-"))
        self.runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, path = tempfile.mkstemp(".log", "kvferryd-", self.runtime_dir)
        os.close(handle)
        self.log_path = Path(path)
        arguments = {"device": device, "pool_size": pool_bytes, "runtime_dir": self.runtime_dir}
        self.command = [sys.executable, "-m", "kvferry.daemon"]
        for name, value in (arguments | options).items():
            self.command += [f"--{name.replace('_', '-')}", str(value)]
        try:
            self._start(timeout)
        except BaseException:
            self._clean()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def directory(self) -> Path:
        """The folder with the daemon's sockets."""
        return self._directory

    def log(self) -> str:
        """What the daemon has said so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, and its exit status; SIGKILL where that takes longer than `timeout`."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL, as a machine in trouble would."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Stop it where it still runs, and remove its folder."""
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self._clean()

    def __enter__(self) -> LocalDaemon:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, timeout: float) -> None:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ
            )
        try:
            self._await(timeout)
        except BaseException:
            self.kill()
            raise

    def _await(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._is_up():
            if self.process.poll() is not None:
                raise _refusal(self.log(), self.process.returncode)
            if time.monotonic() > deadline:
                raise Gone(Code.TIMEOUT, f"kvferryd did not come up: {self.log()}", timeout)
            time.sleep(_POLL)

    def _is_up(self) -> bool:
        """Whether our process holds a folder, and has made its socket there."""
        for lock in self.runtime_dir.glob("*/lock"):
            if (
                lock.read_text().strip() == str(self.pid)
                and (lock.parent / "kvferry.sock").exists()
            ):
                self._directory = lock.parent
                return True
        return False

    def _clean(self) -> None:
        if self._temporary:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)


def _refusal(log: str, status: int) -> KVFerryError:
    """What a daemon that ended gave as its reason."""
    if said := re.search(r"^kvferryd: \[(\w+)\] (.*)", log, re.MULTILINE | re.DOTALL):
        return error_of(ErrorInfo(said[1], f"kvferryd did not start: {said[2].strip()}"))
    return Gone(Code.DAEMON_GONE, f"kvferryd did not start: {log}", status)
