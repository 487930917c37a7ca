"""Time of the daemon to plan a transfer: BlockLayout.resolve, in microseconds.

    python tests/bench/planning.py [GPU blocks, default 10000]

The GPU blocks of a job, in random order, are checked and resolved to offsets in the host pool: with
one page per block, and with 64 tensors and 8 GPU blocks per host block. p50, p99, max of ROUNDS.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from kvferry.daemon.core.layout import BlockLayout
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KVLayout, TensorLayout, TensorRef

ROUNDS, WARM_UPS = 500, 20
PAGE = 4096
# (tensors, GPU blocks in a host block)
SHAPES = ((1, 1), (64, 8))


def main(blocks: int) -> None:
    print(f"BlockLayout.resolve of {blocks:,} GPU blocks, us")
    print(f"{'tensors':>8} {'factor':>7} {'':>6} {'p50':>8} {'p99':>8} {'max':>8}")
    for tensors, factor in SHAPES:
        for direction in Direction:
            seconds = measure(direction, blocks, tensors, factor)
            p50, p99, high = np.quantile(seconds, (0.5, 0.99, 1)) * 1e6
            name = direction.value
            print(f"{tensors:>8} {factor:>7} {name:>6} {p50:8.1f} {p99:8.1f} {high:8.1f}")


def measure(direction: Direction, blocks: int, tensors: int, factor: int) -> list[float]:
    random, hosts = np.random.default_rng(0), -(-blocks // factor)
    pages = tuple(TensorLayout(2 * blocks, PAGE, PAGE) for _ in range(tensors))
    refs = tuple(TensorRef(tensor, PAGE) for tensor in range(tensors))
    geometry = BlockLayout(LayoutArrays.from_layout(KVLayout(pages, (refs,), factor)), 0, 2 * hosts)
    seconds: list[float] = []
    for _ in range(WARM_UPS + ROUNDS):
        gpu = GPULoadStoreSpec(random.permutation(2 * blocks)[:blocks])
        host_ids = random.permutation(2 * hosts)[:hosts]
        begin = time.perf_counter()
        geometry.resolve(direction, gpu, host_ids)
        seconds.append(time.perf_counter() - begin)
    return seconds[WARM_UPS:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("blocks", type=int, nargs="?", default=10_000)
    main(parser.parse_args().blocks)
