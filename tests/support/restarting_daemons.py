"""Daemons that run one after another in one runtime directory, with or without a kept pool.

If the pool is kept, a replacement for systemd (service_manager.py) holds its descriptors between
two daemons, and the next daemon finds the blocks that the last one stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.client import LocalDaemon
from kvferry.testing.engine import until
from support.service_manager import ServiceManager, kvferryd_command


class RestartingDaemons:
    """The running daemon.

    device: as torch names it. root: contains the runtime directory. kept: whether the next daemon
    receives the pool of the last one.
    """

    def __init__(
        self, device: str, root: Path, *, kept: bool = False, pool_bytes: int, **options: Any
    ) -> None:
        name = "0" if device.startswith("cuda") else device
        self._root, self._options = root, {"pool_bytes": pool_bytes, **options}
        self._name = name
        # Keeps the pool.
        self.manager: ServiceManager | None = None
        if kept:
            command = kvferryd_command(root, name, **self._options)
            self.manager = ServiceManager(command, root / "notify", log=root / "log")
        self._local: LocalDaemon | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def directory(self) -> Path:
        (socket,) = self._root.glob("*/kvferry.sock")
        return socket.parent

    def log(self) -> str:
        """The log of the newest daemon; if the pool is kept, of all."""
        running = self.manager or self._local
        return running.log() if running is not None else ""

    def replace(self) -> None:
        """Kill the daemon, and start another one."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """SIGKILL. `start` starts another one."""
        if self.manager is not None:
            self.manager.kill()
        elif self._local is not None:
            self._local.kill()

    def lose_pool(self) -> None:
        """Forget the kept pool: the next daemon starts empty. Call it while none runs."""
        assert self.manager is not None
        self.manager.lose_fds()

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit status."""
        running = self.manager or self._local
        assert running is not None
        return running.stop()

    def close(self) -> None:
        for running in (self.manager, self._local):
            if running is not None:
                running.close()

    def __enter__(self) -> RestartingDaemons:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start a daemon, after `kill`."""
        if self.manager is not None:
            self.manager.start(ready=False)
            self._process = self.manager.process
            until(self._is_up)
        else:
            self._local = LocalDaemon(self._name, runtime_dir=self._root, **self._options)
            self._process = self._local.process

    def _is_up(self) -> bool:
        """Whether the process has locked its directory, and has created its socket there."""
        if not self.alive:
            raise AssertionError(f"the daemon ended: {self.log()[-2000:]}")
        return any(
            lock.read_text().strip() == str(self.pid) and (lock.parent / "kvferry.sock").exists()
            for lock in self._root.glob("*/lock")
        )
