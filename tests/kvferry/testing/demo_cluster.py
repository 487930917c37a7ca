"""One daemon finds the blocks that another one stored: two daemons and one Mooncake Store.

Starts a mooncake_master, a store process that contributes memory, and two daemons on host memory.
Each daemon has an engine. Engine A stores blocks by key, and its daemon writes them to the store.
Engine B, whose daemon has an empty pool, searches for the same keys: its daemon finds them in the
store and copies them to its pool, and the engine loads them and compares every byte. Then engine A
resets the namespace, and engine B's daemon must no longer find a key.

All processes run on this machine and use TCP, as over a network.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVFerryError,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    TransferSpec,
    offload_key,
)
from kvferry.client.tensors import shared_empty
from kvferry.testing.content import Bytes, expected
from kvferry.testing.mooncake_store import INSTALL, MooncakeStore, is_installed

BLOCK_BYTES = 1 << 20
TIMEOUT = 60.0
# Keys of one prefetch: it must end within the deadline of a promotion, also on a slow machine.
PREFIX = 16
UNDECIDED = {Lookup.RETRY, Lookup.HIT_PENDING}


@dataclass
class ClusterReport:
    """Blocks that the demo moved and found.

    moved: what, bytes and seconds. wrong: blocks whose bytes differ. found_after_reset: keys.
    """

    moved: list[tuple[str, int, float]] = field(default_factory=list)
    wrong: int = 0
    found_after_reset: int = 0


class ClusterEngine:
    """An engine of one daemon, with as many blocks in KV tensors as there are keys."""

    def __init__(self, client: OffloadClient, manager: OffloadingManager, blocks: int) -> None:
        self._client, self._manager, self._blocks = client, manager, blocks
        self._pages = shared_empty((blocks, BLOCK_BYTES), np.uint8)
        self._pages[...] = 0
        client.register_kv_caches({"kv": self._pages}, num_blocks=blocks)

    def fill(self) -> None:
        """Write other bytes into every block, instead of computing them."""
        for block in range(self._blocks):
            self._pages[block] = _content(block)

    def store(self, keys: Sequence[bytes]) -> None:
        output = self._manager.prepare_store(keys)
        assert output is not None
        self._transfer((GPULoadStoreSpec(range(self._blocks)), output.store_spec))
        self._manager.complete_store(keys)

    def wait_written(self, count: int, progress: Progress) -> None:
        """Wait until the daemon has written `count` blocks to the store."""
        task = progress.add_task("written to the store", total=count)

        def written() -> bool:
            done = self._client.status().tiers[0].written
            progress.update(task, completed=done)
            return done >= count

        _until(written)

    def promote(self, keys: Sequence[bytes], progress: Progress) -> None:
        """Wait until the daemon has copied the keys from the store to its pool."""
        for first in progress.track(range(0, len(keys), PREFIX), description="found in the store"):
            prefix = keys[first : first + PREFIX]
            _until(lambda prefix=prefix: self._is_resident(prefix))  # type: ignore[misc]

    def load(self, keys: Sequence[bytes]) -> None:
        spec = self._manager.prepare_load(keys)
        self._transfer((spec, GPULoadStoreSpec(range(self._blocks))))
        self._manager.complete_load(keys)

    def count_wrong(self) -> int:
        """The number of blocks whose bytes are not those that `fill` writes."""
        return sum((self._pages[block] != _content(block)).any() for block in range(self._blocks))

    def reset(self) -> None:
        self._manager.reset_cache()

    def wait_reset(self, keys: Sequence[bytes]) -> None:
        """Wait until the daemon has noticed the reset by another daemon."""
        _until(lambda: {self._manager.lookup(key) for key in keys} == {Lookup.MISS})

    def count_found(self, keys: Sequence[bytes]) -> int:
        """The number of keys that are in the pool, or found in the store."""
        self._client.status()  # so the daemon has looked for resets at others
        search = self._manager.prefetch(keys)
        _until(lambda: self._manager.lookup(keys[0]) is not Lookup.RETRY and search.done)
        return sum(self._manager.lookup(key) is not Lookup.MISS for key in keys)

    def _is_resident(self, keys: Sequence[bytes]) -> bool:
        """Request the promotion of keys. Returns whether all are resident."""
        self._manager.prefetch(keys)
        _until(lambda: not UNDECIDED & {self._manager.lookup(key) for key in keys})
        return all(self._manager.lookup(key) is Lookup.HIT for key in keys)

    def _transfer(self, spec: TransferSpec) -> None:
        assert any(isinstance(each, KeyLoadStoreSpec) for each in spec)
        self._client.transfer_async(1, spec)
        self._client.wait([1], timeout=TIMEOUT)
        for result in self._client.get_finished():
            if result.error is not None:
                raise result.error


@contextmanager
def start_engine(name: str, master: str, blocks: int) -> Iterator[ClusterEngine]:
    """A daemon with a Mooncake tier, and an engine of it."""
    pool = 3 * blocks * BLOCK_BYTES
    with (
        LocalDaemon(
            pool_bytes=pool,
            tiers_mooncake_master=master,
            tiers_mooncake_write="write_through",
            tiers_mooncake_admit_after=1,
        ) as daemon,
        OffloadClient(daemon.directory, engine=name, timeout=TIMEOUT) as client,
    ):
        client.open_namespace(Fingerprint("demo-cluster", BLOCK_BYTES))
        with OffloadingManager(client) as manager:
            engine = ClusterEngine(client, manager, blocks)
            _until(lambda: _is_tier_on(client))
            yield engine


def play(blocks: int, progress: Progress) -> ClusterReport:
    report = ClusterReport()
    keys = tuple(offload_key(number.to_bytes(32, "big")) for number in range(blocks))
    nbytes = blocks * BLOCK_BYTES

    def timed(what: str, step: Callable[[], None]) -> None:
        begin = time.perf_counter()
        step()
        report.moved.append((what, nbytes, time.perf_counter() - begin))

    with (
        MooncakeStore(segment_bytes=2 * nbytes + (64 << 20)) as store,
        start_engine("a", store.address, blocks) as a,
        start_engine("b", store.address, blocks) as b,
    ):
        a.fill()
        timed("engine A to the pool of daemon A", lambda: a.store(keys))
        timed("daemon A to the store", lambda: a.wait_written(blocks, progress))
        timed("the store to the pool of daemon B", lambda: b.promote(keys, progress))
        timed("the pool of daemon B to engine B", lambda: b.load(keys))
        report.wrong = b.count_wrong()
        a.reset()
        b.wait_reset(keys)
        report.found_after_reset = b.count_found(keys)
    return report


def show(report: ClusterReport, blocks: int, console: Console) -> bool:
    """Print the transfers and the checks. Returns whether all checks passed."""
    table = Table("from and to", "moved", "seconds", "GB/s")
    for what, nbytes, seconds in report.moved:
        rate = f"{nbytes / seconds / 1e9:.2f}"
        table.add_row(what, f"{nbytes / 2**20:.0f} MiB", f"{seconds:.3f}", rate)
    console.print(table)
    differ = f"[red]NO: {report.wrong} of {blocks} blocks differ[/]"
    equal = differ if report.wrong else "[green]yes[/]"
    console.print("every byte that engine B loaded is the one that engine A stored:", equal)
    left = report.found_after_reset
    cleared = f"[red]NO: {left} keys are still found[/]" if left else "[green]yes[/]"
    console.print("after a reset no key is found:", cleared)
    return not report.wrong and not left


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all bytes are right, else 1; 2 without Mooncake; 130 after an interrupt."""
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("python -m kvferry.testing.demo_cluster", description=about)
    parser.add_argument("--blocks", type=int, default=256, metavar="N", help="of 1 MiB, to move")
    chosen, console = parser.parse_args(argv), Console(highlight=False)
    if chosen.blocks < 1:
        parser.error(f"--blocks {chosen.blocks}: give 1 or more")
    if not is_installed():
        console.print(f"Mooncake is not installed: {escape(INSTALL)}", soft_wrap=True)
        return 2
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            report = play(chosen.blocks, progress)
    except (KVFerryError, RuntimeError, TimeoutError) as error:
        console.print(f"[red]the blocks did not arrive:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if show(report, chosen.blocks, console) else 1


def _content(block: int) -> Bytes:
    """The bytes of one block: (BLOCK_BYTES,), uint8."""
    return expected(((0, BLOCK_BYTES),), [block], seed=1).reshape(-1)


def _is_tier_on(client: OffloadClient) -> bool:
    """Raises RuntimeError if the daemon cannot open it."""
    (tier,) = client.status().tiers
    if tier.failure:
        raise RuntimeError(tier.failure)
    return tier.state == "on"


def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition. Raises TimeoutError after TIMEOUT seconds."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the store did not complete a step within {TIMEOUT:.0f} s")
        time.sleep(0.005)


if __name__ == "__main__":
    # A signal that ends this process must also end the processes that it has started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    raise SystemExit(main())
