"""Daemons one after another at the same place, each killed in its turn; their pool kept or not.

Kept: a stand-in for systemd (manager.py) has the descriptors of the pool meanwhile, and the next
daemon finds what the one before had stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.client import LocalDaemon
from kvferry.testing.engine import until
from support.service_manager import ServiceManager, kvferryd_command


class RestartingDaemons:
    """The daemon there is now. device: torch's name of where the tensors are."""

    def __init__(
        self, device: str, place: Path, *, kept: bool = False, pool_bytes: int, **options: Any
    ) -> None:
        name = "0" if device.startswith("cuda") else device
        self._place, self._options = place, {"pool_bytes": pool_bytes, **options}
        self._name = name
        self._manager: ServiceManager | None = None
        if kept:
            command = kvferryd_command(place, name, **self._options)
            self._manager = ServiceManager(command, place / "notify", log=place / "log")
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
        (socket,) = self._place.glob("*/kvferry.sock")
        return socket.parent

    def log(self) -> str:
        """What the newest has said; where they are kept, all of them."""
        one = self._manager or self._local
        return one.log() if one is not None else ""

    def replace(self) -> None:
        """SIGKILL, and another one."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """SIGKILL. `start` starts another one."""
        if self._manager is not None:
            self._manager.kill()
        elif self._local is not None:
            self._local.kill()

    def lose_pool(self) -> None:
        """The next one starts empty, although the pool is kept. None runs now."""
        assert self._manager is not None
        self._manager.lose_fds()

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        one = self._manager or self._local
        assert one is not None
        return one.stop()

    def close(self) -> None:
        for one in (self._manager, self._local):
            if one is not None:
                one.close()

    def __enter__(self) -> RestartingDaemons:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start one, after `kill`."""
        if self._manager is not None:
            self._manager.start(ready=False)
            self._process = self._manager.process
            until(self._is_up, 60)
        else:
            self._local = LocalDaemon(self._name, runtime_dir=self._place, **self._options)
            self._process = self._local.process

    def _is_up(self) -> bool:
        """Whether the process holds its folder, and has made its socket there."""
        if not self.alive:
            raise AssertionError(f"the daemon ended: {self.log()[-2000:]}")
        return any(
            lock.read_text().strip() == str(self.pid) and (lock.parent / "kvferry.sock").exists()
            for lock in self._place.glob("*/lock")
        )
