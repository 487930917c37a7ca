"""The tier of a soak (soak.py), disk or Mooncake Store: its faults, size limit and counters."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry.client import OffloadClient
from kvferry.testing.engine import until
from kvferry.testing.mooncake_store import MooncakeStore
from support.disk_tier_files import allocated_bytes, lose_hints
from support.process_usage import ProcessUsage
from support.restarting_daemons import RestartingDaemons
from support.tier_processes import tier_process_of
from support.time_limits import TIMEOUT
from support.traffic_statistics import TrafficOptions

# Seconds between two measurements of what the file system has allocated.
MEASURE_EVERY = 0.05
# Limit of the private memory of the tier's process.
MAX_PRIVATE = 256 << 20
# Host blocks of the two engines below: FACTOR GPU blocks of two pages each.
PAGE, FACTOR = 32 << 10, 2
BLOCK_BYTES = 2 * PAGE * FACTOR
# Seconds for which a process is stopped: longer than the daemon waits before it kills it.
STOPPED_SECONDS = 10.0
COUNTED = ("hits", "misses", "promoted", "written", "evictions")
FAILURES = ("checksum_failures", "errors", "deaths", "openings")


class SoakTier:
    """The tier of a soak test. nbytes: its size. daemon_options: of the daemons that use it."""

    def __init__(self, nbytes: int, rng: random.Random, **daemon_options: object) -> None:
        self.nbytes, self.daemon_options = nbytes, daemon_options
        self.errors = list[str]()
        self._rng = rng
        self._private = 0
        self._counts = Counter[str]()
        # Until when a process is stopped, and its pid.
        self._stopped = list[tuple[float, int]]()

    def engines(self, pool_bytes: int, **common: Any) -> list[TrafficOptions]:
        """Two engines with most of the pool, which share more keys than fit into the tier.

        They pause, so that blocks are written before they are evicted.
        """
        return [
            TrafficOptions(
                f"tier-engine-{number}",
                number,
                seed=self._rng.getrandbits(32),
                page=PAGE,
                factor=FACTOR,
                host_blocks=pool_bytes * 3 // 4 // BLOCK_BYTES,
                model="large",
                keys=self.nbytes * 5 // 4 // BLOCK_BYTES,
                depth=4,
                step_pause=0.03,
                resets=0.0,
                prefetches=0.3,
                reconnect=number == 1,
                **common,
            )
            for number in (1, 2)
        ]

    # Faults

    def kill_process(self, daemons: RestartingDaemons) -> None:
        with suppress(ProcessLookupError):
            if (pid := tier_process_of(daemons.pid)) is not None:
                os.kill(pid, signal.SIGKILL)

    def stop_process(self, daemons: RestartingDaemons) -> None:
        """Stop it until `resume_due`. The daemon kills it before, if it waits for an answer."""
        with suppress(ProcessLookupError):
            if (pid := tier_process_of(daemons.pid)) is not None:
                os.kill(pid, signal.SIGSTOP)
                self._stopped.append((time.monotonic() + STOPPED_SECONDS, pid))

    def resume_due(self, now: float) -> None:
        for _, pid in [stopped for stopped in self._stopped if stopped[0] <= now]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = [stopped for stopped in self._stopped if stopped[0] > now]

    def lose_pool(self, daemons: RestartingDaemons) -> None:
        """The daemon was killed. The next one finds what it would after a reboot."""
        daemons.lose_pool()

    # Checks

    def measure(self, daemons: RestartingDaemons) -> None:
        """Add the counters of its tier. Call it before the daemon ends."""
        with OffloadClient(daemons.directory, engine="observer") as observer:
            (tier,) = observer.status().tiers
        self._counts.update({name: getattr(tier, name) for name in COUNTED + FAILURES})
        if tier.used_bytes > self.nbytes:
            self.errors.append(f"the tier uses {tier.used_bytes} of {self.nbytes} bytes")
        with suppress(OSError):
            if (pid := tier_process_of(daemons.pid)) is not None:
                self._private = max(self._private, ProcessUsage.of(pid).private)
        if self._private > MAX_PRIVATE:
            self.errors.append(f"the tier's process has {self._private} bytes of private memory")

    def wait_on(self, daemons: RestartingDaemons) -> None:
        """Wait until the tier works again. Raises TimeoutError."""
        with OffloadClient(daemons.directory, engine="observer") as observer:
            until(lambda: observer.status().tiers[0].state in ("on", "probing"), 2 * TIMEOUT)

    def close(self) -> None:
        pass

    def record(self) -> dict[str, int]:
        counts = {name: self._counts[name] for name in COUNTED + FAILURES}
        return {"bytes": self.nbytes, **counts, "most_private": self._private}


class SoakDisk(SoakTier):
    """A disk tier. root: its directory, which a thread measures until `close`."""

    def __init__(self, root: Path, nbytes: int, rng: random.Random) -> None:
        options = {"tiers_disk_size": nbytes, "tiers_disk_write": "write_through"}
        super().__init__(nbytes, rng, tiers_disk_path=root, **options)
        self.root = root
        self._largest = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._measure_files, name="size of the tier")
        self._thread.start()

    def lose_pool(self, daemons: RestartingDaemons) -> None:
        """The hints are lost, too."""
        super().lose_pool(daemons)
        lose_hints(self.root)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        if self._largest > self.nbytes:
            self.errors.append(f"{self._largest} of {self.nbytes} bytes were allocated on disk")

    def record(self) -> dict[str, int]:
        return super().record() | {"most_allocated": self._largest}

    def _measure_files(self) -> None:
        while not self._closing.wait(MEASURE_EVERY):
            self._largest = max(self._largest, allocated_bytes(self.root))


class SoakMooncake(SoakTier):
    """A Mooncake Store on this machine. A killed master has forgotten all keys when it is back."""

    def __init__(self, nbytes: int, rng: random.Random) -> None:
        self._store = MooncakeStore(segment_bytes=nbytes)
        super().__init__(
            nbytes,
            rng,
            tiers_mooncake_master=self._store.address,
            tiers_mooncake_write="write_through",
            tiers_mooncake_admit_after=1,
        )

    def kill_process(self, daemons: RestartingDaemons) -> None:
        if self._rng.random() < 0.7:
            super().kill_process(daemons)
        else:
            self._counts["masters killed"] += 1
            self._store.kill_master()
            self._store.start_master()

    def close(self) -> None:
        self._store.close()

    def record(self) -> dict[str, int]:
        return super().record() | {"masters_killed": self._counts["masters killed"]}
