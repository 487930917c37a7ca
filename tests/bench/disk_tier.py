"""Bandwidth of the disk tier compared with fio (or dd) on the same file system, in one run.

    python tests/bench/disk_tier.py [--path /tmp] [--blocks 512] [--reps 3] [--threads 1,2,4,8,16]

All use O_DIRECT. fio writes and reads one file with 16 blocks in flight. Without fio, dd does so
with --dd-processes processes, each for a part of the file. kvferry moves the same bytes through
TierClient and the tier's process, in batches of 16 blocks. Prints GB/s and the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.daemon.tier_config import CustomTierConfig
from kvferry.daemon.tiers.base import Result, block_checksum
from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.messages import TierBlocks
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.daemon.tiers.tier_process import PoolFiles

BATCH, AHEAD = 16, 2
# Blocks that fio keeps in flight.
DEPTH = 16
CHUNK = 256 << 20


def dd(
    path: Path, source: Path, block_bytes: int, blocks: int, processes: int, *, write: bool
) -> float:
    """Bytes per second of dd over one file. source: random bytes, because devices skip zeros."""
    share = blocks // processes
    commands = []
    for number in range(processes):
        operands = [f"bs={block_bytes}", f"count={share}"]
        if write:
            operands += [f"if={source}", f"of={path}", f"seek={number * share}"]
            operands += [f"skip={number * share}", "oflag=direct", "conv=notrunc"]
        else:
            operands += ["of=/dev/null", f"if={path}", f"skip={number * share}", "iflag=direct"]
        commands.append(["dd", *operands])
    begin = time.perf_counter()
    running = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    assert all(process.wait() == 0 for process in running)
    return share * processes * block_bytes / (time.perf_counter() - begin)


def fio(path: Path, block_bytes: int, blocks: int, verb: str) -> float:
    """Bytes per second of fio over one file, sequentially, with DEPTH blocks in flight."""
    command = ["fio", "--name=reference", f"--filename={path}", f"--rw={verb}", "--direct=1"]
    command += [f"--bs={block_bytes}", f"--size={block_bytes * blocks}", f"--iodepth={DEPTH}"]
    command += ["--ioengine=libaio", "--output-format=json"]
    done = subprocess.run(command, check=True, capture_output=True)
    return float(json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"])


class Bench:
    """key_file: empty without encryption."""

    def __init__(
        self, root: Path, block_bytes: int, blocks: int, threads: int | None, key_file: str = ""
    ) -> None:
        self.block_bytes, self.blocks = block_bytes, blocks
        in_pool = BATCH * (AHEAD + 1)
        nbytes = -(-in_pool * block_bytes // CHUNK) * CHUNK
        self.pool = MappedFiles("kvferry-bench", nbytes, CHUNK)
        memory = (ctypes.c_ubyte * nbytes).from_address(self.pool.address)
        np.ctypeslib.as_array(memory)[:] = np.random.default_rng(1).integers(
            0, 256, nbytes, np.uint8
        )
        self.in_pool = in_pool
        size = int(blocks * (block_bytes + 4096) * 1.25) + (64 << 20)
        options: dict[str, Any] = {"path": str(root), "size": size, "key_file": key_file}
        if threads is not None:
            options["io_threads"] = threads
        self.config = CustomTierConfig("kvferry.daemon.tiers.disk", options)

    def batch(self, first: int) -> TierBlocks:
        keys = [n.to_bytes(16, "big") for n in range(first, min(first + BATCH, self.blocks))]
        places = [(first + n) % self.in_pool for n in range(len(keys))]
        offsets = np.array(places, np.int64) * self.block_bytes
        return TierBlocks("bench", keys, offsets.tobytes(), self.block_bytes)

    def checksums(self, blocks: TierBlocks) -> np.ndarray[Any, np.dtype[np.uint64]]:
        offsets = np.frombuffer(blocks.offsets, np.int64).tolist()
        return np.array(
            [
                block_checksum(key, view_memory(self.pool.address + at, self.block_bytes))
                for key, at in zip(blocks.keys, offsets, strict=True)
            ],
            np.uint64,
        )

    async def move(self, client: TierClient, *, write: bool) -> float:
        """Bytes per second over all blocks, with AHEAD batches in flight."""
        batches = [self.batch(first) for first in range(0, self.blocks, BATCH)]
        sums = [self.checksums(each) for each in batches] if write else []
        numbers = iter(range(len(batches)))
        results: list[Result] = []

        async def move_next() -> None:
            for number in numbers:
                each = batches[number]
                call = client.put(each, sums[number]) if write else client.fetch(each, 60.0)
                ended, released = await call
                results.extend(ended)
                await released

        begin = time.perf_counter()
        await asyncio.gather(*(move_next() for _ in range(AHEAD)))
        seconds = time.perf_counter() - begin
        assert set(results) == {Result.OK}, set(results)
        return self.blocks * self.block_bytes / seconds

    @asynccontextmanager
    async def running_tier(self) -> AsyncIterator[TierClient]:
        files = PoolFiles(self.pool.descriptors, CHUNK, self.pool.nbytes)
        client = TierClient(self.config, files)
        running = asyncio.create_task(client.run())
        while not client.is_on:
            await asyncio.sleep(0.01)
        yield client
        running.cancel()
        await asyncio.wait({running})

    async def drop_all(self, client: TierClient) -> None:
        keys = [n.to_bytes(16, "big") for n in range(self.blocks)]
        for at in range(0, len(keys), 512):
            await client.drop("bench", keys[at : at + 512])

    async def run(self) -> tuple[float, float, float]:
        """Bytes per second of first writes, of reads, and of writes into slots written before."""
        async with self.running_tier() as client:
            first = await self.move(client, write=True)
            read = await self.move(client, write=False)
            await self.drop_all(client)
            return first, read, await self.move(client, write=True)


def reference(options: argparse.Namespace, file: Path, source: Path) -> tuple[float, float, float]:
    """Bytes per second of fio or dd: a new file, reads, writes over the file."""
    if options.tool == "fio":
        size = file, options.block_bytes, options.blocks
        return fio(*size, "write"), fio(*size, "read"), fio(*size, "write")
    parts = options.block_bytes, options.blocks, options.dd_processes
    new = dd(file, source, *parts, write=True)
    read = dd(file, source, *parts, write=False)
    return new, read, dd(file, source, *parts, write=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, default=Path("/tmp"))
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", default="8", help="of the tier: a list, as in 1,2,4,8,16")
    parser.add_argument(
        "--tool", choices=("fio", "dd"), default="fio" if shutil.which("fio") else "dd"
    )
    parser.add_argument("--dd-processes", type=int, default=2)
    options = parser.parse_args()
    threads = [int(number) for number in options.threads.split(",")]
    rows: dict[int, list[list[float]]] = {number: [] for number in threads}
    source = Path(tempfile.mkstemp(prefix="kvferry-disk-tier-", dir="/dev/shm")[1])
    nbytes = options.block_bytes * options.blocks
    if options.tool == "dd":
        np.random.default_rng(2).integers(0, 256, nbytes, np.uint8).tofile(source)
    for _ in range(options.reps):
        for number in threads:
            root = Path(tempfile.mkdtemp(prefix="kvferry-disk-tier-", dir=options.path))
            try:
                file = root / "reference"
                raw = reference(options, file, source)
                file.unlink()
                bench = Bench(root / "tier", options.block_bytes, options.blocks, number)
                tier = asyncio.run(bench.run())
                bench.pool.close()
            finally:
                shutil.rmtree(root)
            rows[number].append([rate for pair in zip(raw, tier, strict=True) for rate in pair])
    source.unlink()
    print(f"{options.blocks} blocks of {options.block_bytes} bytes, {os.cpu_count()} cores, GB/s")
    print(f"threads  what             {options.tool:>5}  kvferry  ratio (least to most)")
    for number, each in rows.items():
        middle = [statistics.median(column) for column in zip(*each, strict=True)]
        for name, at in (("write, new file", 0), ("read", 2), ("write again", 4)):
            ratios = [row[at + 1] / row[at] for row in each]
            print(
                f"{number:7}  {name:15}  {middle[at] / 1e9:5.2f}  {middle[at + 1] / 1e9:7.2f}"
                f"  {statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
