"""Stalls and start with a million keys: how long one step blocks the event loop.

    python tests/bench/many_keys.py core                 # no daemon; --keys N, --policy NAME
    python tests/bench/many_keys.py mirror               # a client's mirror
    python tests/bench/many_keys.py daemon               # a real daemon, real clients; restarts
    python tests/bench/many_keys.py restart              # only the restarts
    python tests/bench/many_keys.py daemon --tier 4GiB   # the same with a disk tier

core    A full namespace evicts: each round touches 250 resident keys, stores 250 new ones and takes
        the key events, as the core does for two messages. The longest of these steps is the stall.
        The rounds replace every key three times, so that all tables are rebuilt.
mirror  The events of such rounds are applied to a mirror; then a snapshot in parts.
daemon  A client stores 10,000 keys per second for a minute into a full pool (64-byte blocks). Two
        other processes measure meanwhile: round trips of a status request, 1 ms apart, and polls of
        a client with a mirror. A third client then opens the namespace and receives a snapshot.
        Last, the daemon is killed and started again with the kept pool, five times: seconds to
        READY, and CPU time of the daemon until then. With a tier, evicted keys are written to disk
        meanwhile (8 KiB each), and another process searches the tier for 250 of them at a time,
        which promotes the found ones.
restart A full daemon is killed and started again, as above, with siblings.enabled as by default.

Figures are milliseconds unless the unit is seconds. On a busy machine the round trips include the
wait for a CPU: compare them with the round trips without stores, which are measured first.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    OffloadClient,
    OffloadingManager,
    TensorLayout,
    TensorRef,
)
from kvferry.client.mirror import Mirror
from kvferry.daemon.app import GC_THRESHOLDS
from kvferry.daemon.core.block_table import UNCOMMITTED, BlockTable
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.policies import POLICIES
from kvferry.daemon.core.namespace import SNAPSHOT_BLOCKS
from kvferry.proto.keys import EventKind
from kvferry.proto.messages import KeyEvent, KeyEvents, Snapshot
from support.service_manager import ServiceManager, kvferryd_command

PAGE, BATCH, KEY_BYTES = 64, 250, 36
# Keys stored per second by the daemon part, and for how long.
RATE, SECONDS = 10_000, 60.0
# Restarts of a daemon.
RESTARTS = 5
FINGERPRINT = Fingerprint("bench", PAGE, key_bytes=KEY_BYTES)
# Blocks of the engine, and keys per store while the pool is filled.
FILL = 1 << 14
LAYOUT = KVLayout((TensorLayout(FILL, PAGE, PAGE),), ((TensorRef(0, PAGE),),))


def keys_from(start: int, count: int) -> tuple[bytes, ...]:
    """Keys with random bytes, like block hashes, and always the same for a number."""
    words = (np.arange(start, start + count, dtype=np.uint64)[:, None] + 1) * np.array(
        [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64
    )
    words ^= words >> np.uint64(29)
    data = words.astype("<u8").tobytes()
    return tuple(data[at : at + 32] + b"\0\0\0\0" for at in range(0, len(data), 32))


def show(what: str, seconds: Sequence[float]) -> None:
    p50, p99, most = np.quantile(seconds, (0.5, 0.99, 1)) * 1e3
    above = int((np.asarray(seconds) > 0.02).sum())
    print(f"{what:<46} {p50:8.2f} {p99:8.2f} {most:8.1f} {above:6}", flush=True)


def show_one(what: str, amount: float, unit: str) -> None:
    print(f"{what:<46} {amount:8.2f} {unit}", flush=True)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def tune_gc() -> None:
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


# The core, without a daemon


def bench_core(count: int, policy: str) -> None:
    before = memory_bytes()
    table, steps = BlockTable(count, KEY_BYTES), list[float]()
    cache = Cache(count, policy, table=table)
    tune_gc()
    random = np.random.default_rng(0)
    for at in range(0, 4 * count, BATCH):
        keys = keys_from(at, BATCH)
        lowest = max(0, at - count)
        starts = random.integers(lowest, max(at, 1), 5)
        touched = [key for start in starts.tolist() for key in keys_from(start, BATCH // 5)]
        begin = time.perf_counter()
        cache.touch(touched)
        middle = time.perf_counter()
        reservation = cache.prepare_store(keys)
        assert reservation is not None
        cache.complete_store(reservation, True)
        cache.events.take()
        end = time.perf_counter()
        if at >= count:
            steps += (middle - begin, end - middle)
        del reservation
    show(f"{policy}: touch of {BATCH} keys", steps[::2])
    show(f"{policy}: store of {BATCH} keys", steps[1::2])
    show_one(f"{policy}: memory per key", (memory_bytes() - before) / count, "bytes")
    blocks = table.find(*UNCOMMITTED)
    table.commit(blocks, table.lines.versions(blocks), np.zeros(count, np.uint64))
    slices = range(0, count, SNAPSHOT_BLOCKS)
    parts = [timed(partial(cache.keys_between, at, at + SNAPSHOT_BLOCKS)) for at in slices]
    show(f"{policy}: parts of a snapshot", parts)
    show(f"{policy}: change of the policy", [timed(lambda: cache.configure(_other(policy), 1))])
    cache.configure(policy, 1)
    deferred, lines = list[object](), table.lines.memory.copy()
    show(f"{policy}: reset", [timed(lambda: deferred.append(cache.reset(1)))])
    restored = Cache(count, policy, table=BlockTable(count, KEY_BYTES, lines))
    show(f"{policy}: restore", [timed(lambda: restored.restore_keys(1))])


def _other(policy: str) -> str:
    return next(name for name in POLICIES if name != policy)


# A client's mirror


def bench_mirror(count: int) -> None:
    mirror, steps = Mirror(), list[float]()
    gc.freeze()
    mirror.apply_message(Snapshot(0, 0, False, (), True, 1))
    for number, at in enumerate(range(0, 4 * count, BATCH), 1):
        keys = keys_from(at, BATCH)
        evicted = keys_from(at - count, BATCH) if at >= count else ()
        removed = (KeyEvent(EventKind.REMOVED, evicted),) if evicted else ()
        events = (*removed, KeyEvent(EventKind.PENDING, keys), KeyEvent(EventKind.STORED, keys))
        message = KeyEvents(number, events, 1)
        steps.append(timed(partial(mirror.apply_message, message)))
    show(f"mirror: events of a store of {BATCH} keys", steps)
    probes = keys_from(4 * count - BATCH, BATCH)
    show(f"mirror: {BATCH} lookups", [timed(lambda: [*map(mirror.lookup, probes)])])
    sequence = mirror.sequence + 2
    mirror.apply_message(KeyEvents(sequence, (), 1))  # a number is missing
    parts = [
        Snapshot(sequence, part, False, keys_from(at, 1 << 13), at + (1 << 13) >= count, 1)
        for part, at in enumerate(range(0, count, 1 << 13))
    ]
    steps = [timed(partial(mirror.apply_message, message)) for message in parts]
    show("mirror: parts of a snapshot", steps)
    show_one("mirror: the whole snapshot", sum(steps), "seconds")


# A real daemon


def bench_daemon(count: int, policy: str, tier: str) -> None:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        disk = {"tiers_disk_path": directory / "tier", "tiers_disk_size": tier} if tier else {}
        command = kvferryd_command(directory, "cpu", count * PAGE, **disk)
        log = directory / "log"
        manager = stack.enter_context(ServiceManager(command, directory / "notify", log=log))
        manager.start()
        (socket,) = directory.glob("*/kvferry.sock")
        writer = stack.enter_context(OffloadClient(socket.parent, engine="writer"))
        blocks = writer.open_namespace(FINGERPRINT, eviction_policy=policy, mirror=False).num_blocks
        writer.allocate_kv_caches(LAYOUT)
        store_rate(writer, 0, blocks, FILL, 0)
        probes = [
            MeasuringProcess(stack, probe, socket.parent, policy) for probe in (ping, poll_mirror)
        ]
        idle = [probe.measure(lambda: time.sleep(10)) for probe in probes]
        if tier:
            probes.append(MeasuringProcess(stack, search_tier, socket.parent, policy))
        for probe in probes:
            probe.begin()
        store_rate(writer, blocks, int(RATE * SECONDS), BATCH, RATE)
        trips, polls, *searches = [probe.end() for probe in probes]
        show(f"{policy}: status round trips, idle", idle[0])
        show(f"{policy}: status round trips, {RATE} keys/s", trips)
        show(f"{policy}: polls of a client's mirror, idle", idle[1])
        show(f"{policy}: polls of a client's mirror, {RATE} keys/s", polls)
        if tier:
            show(f"{policy}: searches for {BATCH} evicted keys", searches[0])
            show_tier(writer)
        joined = probes[0].measure(lambda: join(socket.parent, policy))
        show(f"{policy}: status round trips, snapshot", joined)
        restart(manager, policy)


def bench_restart(count: int, policy: str) -> None:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        command = kvferryd_command(directory, "cpu", count * PAGE, siblings_enabled="true")
        log = directory / "log"
        manager = stack.enter_context(ServiceManager(command, directory / "notify", log=log))
        manager.start()
        (socket,) = directory.glob("*/kvferry.sock")
        with OffloadClient(socket.parent, engine="writer") as writer:
            opened = writer.open_namespace(FINGERPRINT, eviction_policy=policy, mirror=False)
            writer.allocate_kv_caches(LAYOUT)
            store_rate(writer, 0, opened.num_blocks, FILL, 0)
        restart(manager, policy)


def restart(manager: ServiceManager, policy: str) -> None:
    time.sleep(2)  # checksums of the last stores
    walls, cpus = list[float](), list[float]()
    for _ in range(RESTARTS):
        manager.kill()
        walls.append(timed(manager.start))
        tasks = Path(f"/proc/{manager.process.pid}/task").glob("*/schedstat")
        cpus.append(sum(int(task.read_text().split()[0]) for task in tasks) / 1e9)
    for what, seconds in (("kill to READY", walls), ("its CPU time", cpus)):
        spread = f"seconds ({min(seconds):.2f} to {max(seconds):.2f})"
        show_one(f"{policy}: {what}", statistics.median(seconds), spread)
    print(*[line for line in manager.log().splitlines() if "restored" in line][-1:])
    manager.stop()


def show_tier(client: OffloadClient) -> None:
    (tier,) = client.status().tiers
    print(
        f"tier: {tier.written:,} keys written, {tier.dropped_writes:,} not, {tier.promoted:,} "
        f"promoted; {tier.hits:,} hits, {tier.misses:,} misses; off {tier.openings} times, its "
        f"process died {tier.deaths} times"
    )


def store_rate(writer: OffloadClient, start: int, count: int, batch: int, rate: int) -> None:
    """Store keys `start` to `start + count`, `rate` per second; 0: as fast as possible."""
    begin, errors = time.perf_counter(), 0
    for number, at in enumerate(range(start, start + count, batch)):
        keys = keys_from(at, min(batch, start + count - at))
        spec = GPULoadStoreSpec(np.arange(len(keys))), KeyLoadStoreSpec(keys)
        writer.transfer_async(number, spec)
        results = list(writer.get_finished())
        if rate:
            while (left := begin + (number + 1) * batch / rate - time.perf_counter()) > 0:
                time.sleep(left)
        else:
            writer.wait([number])
        results += writer.get_finished()
        errors += sum(not result.success for result in results)
    writer.wait(range(number + 1))
    seconds = time.perf_counter() - begin
    if rate:
        show_one("stored per second", count / seconds, f"keys, {errors} errors")


def join(directory: Path, policy: str) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=join_once, args=(directory, policy)
    )
    process.start()
    process.join()


def join_once(directory: Path, policy: str) -> None:
    with OffloadClient(directory, engine="joiner") as client:
        seconds = timed(lambda: client.open_namespace(FINGERPRINT, eviction_policy=policy))
        show_one("a client opens the namespace, with its mirror", seconds, "seconds")


class MeasuringProcess:
    """A process that measures between `begin` and `end`."""

    def __init__(
        self, stack: ExitStack, measure: Callable[..., None], directory: Path, policy: str
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        process = context.Process(target=measure, args=(child_end, directory, policy), daemon=True)
        process.start()
        stack.callback(process.kill)
        self._pipe.recv()

    def begin(self) -> None:
        self._pipe.send("begin")

    def end(self) -> list[float]:
        self._pipe.send("end")
        seconds: list[float] = self._pipe.recv()
        return seconds

    def measure(self, work: Callable[[], object]) -> list[float]:
        self.begin()
        work()
        return self.end()


def ping(pipe: Connection, directory: Path, _policy: str) -> None:
    with OffloadClient(directory, engine="ping") as client:
        _measure(pipe, client.status)


def poll_mirror(pipe: Connection, directory: Path, policy: str) -> None:
    with OffloadClient(directory, engine="reader") as client:
        client.open_namespace(FINGERPRINT, eviction_policy=policy)
        _measure(pipe, client.poll)


def search_tier(pipe: Connection, directory: Path, policy: str) -> None:
    with OffloadClient(directory, engine="searcher") as client:
        num_blocks = client.open_namespace(FINGERPRINT, eviction_policy=policy).num_blocks
        manager, random = OffloadingManager(client), np.random.default_rng(0)
        begin = time.monotonic()

        def search() -> None:
            evicted = num_blocks // 4 + int(RATE * (time.monotonic() - begin))
            prefetch = manager.prefetch(keys_from(int(random.integers(evicted)), BATCH))
            while not prefetch.done:
                manager.poll()

        _measure(pipe, search)


def _measure(pipe: Connection, call: Callable[[], object]) -> None:
    pipe.send("ready")
    for _ in _rounds(pipe):
        seconds = list[float]()
        while not pipe.poll():
            seconds.append(timed(call))
            time.sleep(0.001)
        pipe.recv()
        pipe.send(seconds)


def _rounds(pipe: Connection) -> Iterator[None]:
    while pipe.recv() == "begin":
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("core", "mirror", "daemon", "restart"))
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--tier", default="", help="size of a disk tier, for the daemon part")
    parser.add_argument("--policy", choices=POLICIES, help="only this one")
    options = parser.parse_args()
    print(f"{options.keys:,} keys of {KEY_BYTES} bytes; milliseconds, and how many are above 20")
    print(f"{'':<46} {'p50':>8} {'p99':>8} {'max':>8} {'> 20':>6}")
    if options.part == "mirror":
        bench_mirror(options.keys)
        return
    for policy in [options.policy] if options.policy else POLICIES:
        if options.part == "core":
            bench_core(options.keys, policy)
        elif options.part == "restart":
            bench_restart(options.keys, policy)
        else:
            bench_daemon(options.keys, policy, options.tier)


if __name__ == "__main__":
    main()
