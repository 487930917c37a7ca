"""A daemon with siblings of a million keys each: memory, and how long its event loop stalls.

    python tests/bench/sibling_keys.py --siblings 7

Each daemon has the same number of other keys, in blocks of 64 bytes. The one that is measured finds
all siblings at the same time, and maps their memory. Then keys that it has not are stored, which
asks the tables of all siblings. Last, siblings are killed, stopped, and the rest reset.

Another process measures round trips of a status request, 1 ms apart, in milliseconds. On a busy
machine they include the wait for a CPU; so the time that the thread of the event loop ran, and the
time that it waited for a CPU, are shown beside. Memory is that of the process alone, and shared
memory that it has mapped and used.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.many_keys import (
    BATCH,
    FILL,
    FINGERPRINT,
    LAYOUT,
    PAGE,
    RATE,
    MeasuringProcess,
    ping,
    show,
    show_one,
    store_rate,
)
from kvferry.client import OffloadClient
from kvferry.proto.status import SiblingStatus
from support.process_usage import ProcessUsage
from support.service_manager import ServiceManager, kvferryd_command

POLICY = "lru"
# Seconds of a measurement without an end of its own, and for siblings to be found.
SECONDS, FOUND_SECONDS = 10.0, 300.0


class FullDaemon:
    """A daemon, full of keys from `start` on. watched: directory in which it finds siblings."""

    def __init__(
        self, stack: ExitStack, directory: Path, count: int, start: int, watched: Path | None = None
    ) -> None:
        directory.mkdir()
        options: dict[str, object] = {"state_dir": directory.parent / "state"}
        if watched is not None:
            options["siblings_directories"] = watched
        command = kvferryd_command(
            directory, "cpu", count * PAGE, siblings_enabled="true", **options
        )
        self.manager = ServiceManager(command, directory / "notify", log=directory / "log")
        stack.enter_context(self.manager).start()
        (socket,) = directory.glob("*/kvferry.sock")
        self.directory = socket.parent
        self.client = stack.enter_context(OffloadClient(self.directory, engine="writer"))
        blocks = self.client.open_namespace(FINGERPRINT, mirror=False).num_blocks
        self.client.allocate_kv_caches(LAYOUT)
        store_rate(self.client, start, blocks, FILL, 0)

    @property
    def pid(self) -> int:
        return self.manager.process.pid

    def usable_siblings(self) -> list[SiblingStatus]:
        return [one for one in self.client.status().siblings if one.is_on and one.mapped_bytes]

    def wait_for_siblings(self, number: int, keys: int) -> None:
        deadline = time.monotonic() + FOUND_SECONDS
        while time.monotonic() < deadline:
            usable = self.usable_siblings()
            if len(usable) == number and sum(one.keys for one in usable) >= keys:
                return
            time.sleep(0.05)
        raise TimeoutError(f"siblings after {FOUND_SECONDS:g} s: {self.client.status().siblings}")

    def show_memory(self, what: str) -> None:
        usage = ProcessUsage.of(self.pid)
        memory = f"{usage.private / 1e6:.0f} MB, and {usage.shared / 1e6:.0f} MB shared"
        print(f"{what}: {memory}", flush=True)


def loop_seconds(pid: int) -> tuple[float, float]:
    """Seconds that the event loop's thread has run, and that it has waited for a CPU."""
    ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def bench(number: int, count: int, folder: Path, stack: ExitStack) -> None:
    watched = folder / "watched"
    watched.mkdir()
    siblings = [
        FullDaemon(stack, folder / str(place), count, place * count) for place in range(number)
    ]
    own = FullDaemon(stack, folder / "own", count, number * count, watched)
    probe = MeasuringProcess(stack, ping, own.directory, POLICY)

    def measure(what: str, work: Callable[[], object]) -> None:
        before, begin = loop_seconds(own.pid), time.monotonic()
        trips = probe.measure(work)
        ran, waited = (
            after - earlier for after, earlier in zip(loop_seconds(own.pid), before, strict=True)
        )
        show(what, trips)
        seconds = time.monotonic() - begin
        print(f"    {seconds:.1f} s; the loop ran {ran:.2f} s, waited for a CPU {waited:.2f} s")

    def find_all() -> None:
        for place, sibling in enumerate(siblings):
            (watched / str(place)).symlink_to(sibling.directory)
        own.wait_for_siblings(number, int(0.99 * number * count))

    def store(start: int) -> None:
        store_rate(own.client, start, int(RATE * SECONDS), BATCH, RATE)

    def reset(done: list[float]) -> None:
        begin = time.monotonic()
        own.client.reset(timeout=60.0)
        done.append((time.monotonic() - begin) * 1e3)
        time.sleep(1.0)

    def kill() -> None:
        siblings[-1].manager.kill()
        time.sleep(SECONDS)

    own.show_memory("without siblings")
    measure("idle", lambda: time.sleep(SECONDS))
    measure(f"{RATE} keys/s stored", lambda: store((number + 1) * count))
    measure(f"{number} siblings of {count} keys are mapped", find_all)
    own.show_memory(f"{number} siblings")
    show_one("keys that siblings have", sum(s.keys for s in own.usable_siblings()), "")
    measure(f"{number} siblings, idle", lambda: time.sleep(SECONDS))
    measure(f"{number} siblings, {RATE} keys/s stored", lambda: store((number + 2) * count))
    siblings[0].manager.process.send_signal(signal.SIGSTOP)
    measure("a sibling is stopped", lambda: time.sleep(SECONDS))
    siblings[0].manager.process.send_signal(signal.SIGCONT)
    measure("a sibling is killed", kill)
    done: list[float] = []
    measure("the namespace is reset, at all at once", lambda: reset(done))
    show_one("Done of the reset", done[0], "ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--siblings", type=int, default=7)
    parser.add_argument("--keys", type=int, default=1_000_000, help="of each daemon")
    options = parser.parse_args()
    print(f"{'':<46} {'p50':>8} {'p99':>8} {'max':>8} {'> 20':>6}")
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder, ExitStack() as stack:
        bench(options.siblings, options.keys, Path(folder), stack)


if __name__ == "__main__":
    main()
