"""Bandwidth of the disk tier with encryption, compared with that without, in one run.

    python tests/bench/encrypted_tier.py [--path /tmp] [--block-bytes 2097152] [--blocks 512]

Two tiers with a root each, through TierClient and the tier's process. Each round reads all blocks
from one, then from the other, and writes them into their slots again, likewise. They use O_DIRECT
if the file system of the path has it. Prints GB/s, medians with least and most, and the ratio of
each round. The last line is the cipher alone, on one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from bench.disk_tier import Bench
from kvferry.daemon.tiers.block_cipher import BlockCipher
from kvferry.daemon.tiers.encryption import KEY_BYTES


async def measure(
    options: argparse.Namespace, benches: list[Bench]
) -> dict[str, list[list[float]]]:
    """Bytes per second of reads and writes, in each round, of both tiers."""
    reads, writes = [], []
    async with AsyncExitStack() as stack:
        tiers = [(each, await stack.enter_async_context(each.running_tier())) for each in benches]
        for bench, client in tiers:
            await bench.move(client, write=True)
        for number in range(options.reps):
            order = tiers[:: 1 - 2 * (number % 2)]
            read = {each: await each.move(client, write=False) for each, client in order}
            for each, client in order:
                await each.drop_all(client)
            write = {each: await each.move(client, write=True) for each, client in order}
            reads.append([read[each] for each in benches])
            writes.append([write[each] for each in benches])
    return {"read": reads, "write again": writes}


def cipher_rate(nbytes: int, calls: int = 64) -> float:
    """Bytes per second that one thread decrypts."""
    cipher, data = BlockCipher(os.urandom(KEY_BYTES), "bench"), memoryview(bytearray(nbytes))
    sealed, target = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    seal = cipher.encrypt(b"key", 0, data, sealed)
    begin = time.perf_counter()
    for _ in range(calls):
        assert cipher.decrypt(b"key", seal, sealed, target) == 0
    return calls * nbytes / (time.perf_counter() - begin)


def in_words(values: list[float], scale: float) -> str:
    middle = statistics.median(values) / scale
    return f"{middle:5.2f} ({min(values) / scale:.2f}..{max(values) / scale:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, default=Path("/tmp"))
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as key_file:
        key_file.write(os.urandom(KEY_BYTES))
        key_file.flush()
        root = Path(tempfile.mkdtemp(prefix="kvferry-encrypted-", dir=options.path))
        shape = options.block_bytes, options.blocks, options.threads
        try:
            roots = (root / "plain", ""), (root / "encrypted", key_file.name)
            benches = [Bench(path, *shape, name) for path, name in roots]
            rates = asyncio.run(measure(options, benches))
        finally:
            shutil.rmtree(root)
    size = f"{options.blocks} blocks of {options.block_bytes} bytes"
    print(f"{size}, {options.threads} threads, {os.cpu_count()} cores, GB/s")
    print("what            without             encrypted           ratio")
    for what, rounds in rates.items():
        plain, encrypted = ([each[kind] for each in rounds] for kind in (0, 1))
        ratios = [two / one for one, two in zip(plain, encrypted, strict=True)]
        columns = in_words(plain, 1e9), in_words(encrypted, 1e9), in_words(ratios, 1)
        print(f"{what:15}", *(f"{column:19}" for column in columns))
    print(f"decrypt, one thread: {cipher_rate(options.block_bytes) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
