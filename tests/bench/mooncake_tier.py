"""Bandwidth of the Mooncake tier compared with a bare loop of the same library calls, in one run.

    python tests/bench/mooncake_tier.py [--block-bytes 2097152] [--blocks 128] [--rounds 5]
        [--threads 2,4,8] [--call-bytes 16777216]

A master and a store process run on this machine. The bare loop is a process with the priority of
the tier's process: its threads put and get objects of a block and a trailer, with the same calls
and the same number of objects per call. kvferry moves the same bytes through TierClient and the
tier's process. Both alternate in each round, and the order changes from round to round. Prints GB/s
and the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.daemon.tier_config import CustomTierConfig
from kvferry.daemon.tiers.base import HostMemory, Result, block_checksum
from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.messages import TierBlocks
from kvferry.daemon.tiers.mooncake.store_client import StoreClient
from kvferry.daemon.tiers.mooncake.tier import MooncakeTier
from kvferry.daemon.tiers.mooncake.trailer import TRAILER_BYTES, ThreadTrailers
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.daemon.tiers.tier_process import PoolFiles
from kvferry.daemon.tiers.tier_worker import MAINTAIN_EVERY, NICER
from kvferry.testing.mooncake_store import MooncakeStore

# Bytes of a request to the tier, and requests in flight.
REQUEST_BYTES, AHEAD = 32 << 20, 4
CHUNK = 64 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    master: str
    block_bytes: int
    blocks: int
    threads: int
    call_bytes: int

    def make_pool(self) -> MappedFiles:
        """A pool for all blocks, filled with random bytes."""
        nbytes = -(-self.blocks * self.block_bytes // CHUNK) * CHUNK
        pool = MappedFiles("kvferry-bench", nbytes, CHUNK)
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(pool.address))
        memory[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        return pool


# The bare loop


def serve_bare_loop(setup: Setup, peer: Connection) -> None:
    """Run each round that the peer requests, and send it the seconds of the puts and the gets."""
    os.nice(NICER)
    pool = setup.make_pool()
    store = StoreClient(pool, setup.master)
    trailers = ThreadTrailers(store)
    per_call = max(1, setup.call_bytes // setup.block_bytes)
    with ThreadPoolExecutor(setup.threads) as threads:

        def move(round_number: int, call: Any, expected: int) -> float:
            def move_part(first: int) -> None:
                numbers = range(first, min(first + per_call, setup.blocks))
                names = [f"bare/{round_number}/{n}" for n in numbers]
                addresses = [
                    [pool.address + n * setup.block_bytes, trailers.trailers.address(n - first)]
                    for n in numbers
                ]
                codes = call(names, addresses, [[setup.block_bytes, TRAILER_BYTES]] * len(names))
                assert set(codes) == {expected}, set(codes)

            begin = time.perf_counter()
            list(threads.map(move_part, range(0, setup.blocks, per_call)))
            return time.perf_counter() - begin

        peer.send("ready")
        while (number := peer.recv()) is not None:
            put = move(number, store.put, 0)
            get = move(number, store.get, setup.block_bytes + TRAILER_BYTES)
            store.remove_matching(f"^bare/{number}/")
            peer.send((put, get))
    os._exit(0)  # the library takes a second to close


# kvferry


def open_tier(options: Mapping[str, Any], memory: HostMemory) -> MooncakeTier:
    """The Mooncake tier with other numbers of threads and bytes. In the tier's process."""
    tier = MooncakeTier(StoreClient(memory, options["master"]))
    tier.io_threads, tier.call_bytes = options["io_threads"], options["call_bytes"]
    return tier


class ThroughTier:
    """The tier of a daemon, without the daemon."""

    def __init__(self, setup: Setup, pool: MappedFiles) -> None:
        options = {
            "master": setup.master,
            "io_threads": setup.threads,
            "call_bytes": setup.call_bytes,
        }
        config = CustomTierConfig("bench.mooncake_tier", options, shared=True)
        self.client = TierClient(config, PoolFiles(pool.descriptors, CHUNK, pool.nbytes))
        self.block_bytes = setup.block_bytes
        keys = [n.to_bytes(36, "big") for n in range(setup.blocks)]
        self.sums = np.array(
            [
                block_checksum(
                    key, view_memory(pool.address + n * setup.block_bytes, setup.block_bytes)
                )
                for n, key in enumerate(keys)
            ],
            np.uint64,
        )
        self.keys = keys

    async def round(self, number: int) -> tuple[float, float]:
        """The seconds of puts and of gets. Each round has an epoch of its own."""
        name = StoreName("0123456789abcdef", "bench", 2 * number + 1)
        await self.client.settle({name.namespace: name.epoch})
        seconds = [await self._move(str(name), write=write) for write in (True, False)]
        await self.client.settle({name.namespace: name.epoch + 1})
        await asyncio.sleep(2 * MAINTAIN_EVERY)  # which removes the blocks
        return seconds[0], seconds[1]

    async def _move(self, store: str, *, write: bool) -> float:
        count = max(1, REQUEST_BYTES // self.block_bytes)
        starts = iter(range(0, len(self.keys), count))
        results: list[Result] = []

        async def move_next() -> None:
            for first in starts:
                keys = self.keys[first : first + count]
                offsets = np.arange(first, first + len(keys)) * self.block_bytes
                blocks = TierBlocks(store, keys, offsets.tobytes(), self.block_bytes)
                if write:
                    call = self.client.put(blocks, self.sums[first:][: len(keys)])
                else:
                    call = self.client.fetch(blocks, 60.0)
                ended, released = await call
                results.extend(ended)
                await released

        begin = time.perf_counter()
        await asyncio.gather(*(move_next() for _ in range(AHEAD)))
        seconds = time.perf_counter() - begin
        assert set(results) == {Result.OK}, set(results)
        return seconds


async def compare(setup: Setup, rounds: int) -> list[list[float]]:
    """For each round the seconds of: bare put, bare get, tier's put, tier's get."""
    context = multiprocessing.get_context("spawn")
    peer, other = context.Pipe()
    bare = context.Process(target=serve_bare_loop, args=(setup, other), daemon=True)
    bare.start()
    pool = setup.make_pool()
    tier = ThroughTier(setup, pool)
    running = asyncio.create_task(tier.client.run())
    try:
        await asyncio.to_thread(peer.recv)
        while not tier.client.is_on:
            await asyncio.sleep(0.01)

        async def run_bare(number: int) -> tuple[float, float]:
            peer.send(number)
            seconds: tuple[float, float] = await asyncio.to_thread(peer.recv)
            return seconds

        rows = []
        for number in range(rounds + 1):
            if number % 2:
                bare_seconds, ours = await run_bare(number), await tier.round(number)
            else:
                ours, bare_seconds = await tier.round(number), await run_bare(number)
            rows.append([*bare_seconds, *ours])
        return rows[1:]  # the first warms connections and memory
    finally:
        peer.send(None)
        bare.join(10)
        running.cancel()
        await asyncio.wait({running})
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="4", help="a list, as in 2,4,8")
    parser.add_argument("--call-bytes", default=str(16 << 20), help="a list")
    options = parser.parse_args()
    nbytes = options.blocks * options.block_bytes
    print(f"{options.blocks} blocks of {options.block_bytes} bytes, {os.cpu_count()} cores, GB/s")
    print("threads  per call  what  bare loop  kvferry  ratio (least to most)")
    for threads in map(int, options.threads.split(",")):
        for call_bytes in map(int, options.call_bytes.split(",")):
            with MooncakeStore(segment_bytes=4 * nbytes) as store:
                setup = Setup(
                    store.address, options.block_bytes, options.blocks, threads, call_bytes
                )
                rows = asyncio.run(compare(setup, options.rounds))
            for what, at in (("put", 0), ("get", 1)):
                bare, ours = ([nbytes / row[at + by] / 1e9 for row in rows] for by in (0, 2))
                ratios = [b / a for a, b in zip(bare, ours, strict=True)]
                print(
                    f"{threads:7}  {call_bytes >> 20:5} MB  {what:4}  "
                    f"{statistics.median(bare):9.2f}  {statistics.median(ours):7.2f}  "
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
