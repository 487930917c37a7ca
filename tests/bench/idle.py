"""The use of the processor by an idle daemon: its own process and its child processes.

    python tests/bench/idle.py [--seconds 120] [--blocks 4] [--block-bytes 4096]
        [--tiers disk] [--settle 15]

--tiers: "none", "disk" or "disk,mooncake"; Mooncake's master and store process run beside the
daemon and do not count. One engine stores the blocks with keys and disconnects. Metrics are on, and
a subscriber of KV events is connected. Prints per process the percentage of one core and the
voluntary context switches per second of all its threads.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    LocalDaemon,
    OffloadClient,
    OffloadingManager,
    offload_key,
    shared_empty,
)
from kvferry.testing.mooncake_store import MooncakeStore
from support.child_processes import children_of

# Blocks per transfer.
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--settle", type=float, default=15.0, help="seconds in which the tiers write the blocks"
    )
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--tiers", default="disk")
    chosen = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        options: dict[str, Any] = {}
        if "disk" in chosen.tiers:
            options |= {
                "tiers_disk_path": directory / "tier",
                "tiers_disk_size": "8GiB",
                "tiers_disk_write": "write_through",
            }
        if "mooncake" in chosen.tiers:
            store = stack.enter_context(MooncakeStore())
            options |= {
                "tiers_mooncake_master": store.address,
                "tiers_mooncake_write": "write_through",
                "tiers_mooncake_admit_after": 1,
            }
        pool_bytes = max(64 << 20, chosen.blocks * chosen.block_bytes * 5 // 4)
        daemon = stack.enter_context(
            LocalDaemon(pool_bytes=pool_bytes, metrics_listen="127.0.0.1:0", **options)
        )
        subscriber = stack.enter_context(zmq.Context()).socket(zmq.SUB)
        stack.callback(subscriber.close, 0)
        subscriber.subscribe(b"")
        subscriber.connect(f"ipc://{daemon.directory / 'events.sock'}")
        store_blocks(daemon.directory, chosen.blocks, chosen.block_bytes)
        time.sleep(chosen.settle)
        report(daemon.pid, chosen.seconds)


def store_blocks(directory: Path, blocks: int, block_bytes: int) -> None:
    tensor = shared_empty((BATCH, block_bytes), device="cpu")
    with OffloadClient(directory, engine="bench") as client:
        client.open_namespace(Fingerprint("bench", block_bytes))
        client.register_kv_caches({"layer": tensor}, num_blocks=BATCH)
        with OffloadingManager(client) as manager:
            for job, first in enumerate(range(0, blocks, BATCH), 1):
                numbers = range(first, min(first + BATCH, blocks))
                output = manager.prepare_store([offload_key(n.to_bytes(32)) for n in numbers])
                assert output is not None
                source = GPULoadStoreSpec(range(len(output.keys_to_store)))
                client.transfer_async(job, (source, output.store_spec))
                client.wait([job])
                manager.complete_store(output.keys_to_store)


def report(daemon: int, seconds: float) -> None:
    processes = {daemon: "daemon"} | {pid: name_of(pid) for pid in children_of(daemon, b"")}
    began, before = time.monotonic(), {pid: usage(pid) for pid in processes}
    time.sleep(seconds)
    after, seconds = {pid: usage(pid) for pid in processes}, time.monotonic() - began
    total = 0.0
    for pid, name in processes.items():
        busy = (after[pid][0] - before[pid][0]) / seconds
        total += busy
        switches = (after[pid][1] - before[pid][1]) / seconds
        print(f"{name:32} {busy:8.3%} {switches:8.1f} switches/s")
    print(f"{'all':32} {total:8.3%} of one core in {seconds:.0f} s")


def name_of(pid: int) -> str:
    title = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
    return f"{title} {pid}"


def usage(pid: int) -> tuple[float, int]:
    """Seconds of all threads on a core, and their voluntary context switches."""
    nanoseconds = switches = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((thread / "schedstat").read_text().split()[0])
        status = (thread / "status").read_text()
        switches += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    if not nanoseconds:  # the kernel counts ticks only
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), switches
    return nanoseconds / 1e9, switches


if __name__ == "__main__":
    main()
