"""One daemon finds the blocks that another one of the same host stored, without a copy elsewhere.

Starts two daemons on host memory that are siblings. Each has an engine. Engine A stores blocks by
key; engine B, whose daemon has an empty pool, loads the same keys and compares every byte. Then
engine A resets the namespace, and no daemon finds a key any longer.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.progress import Progress

from kvferry.client import Fingerprint, LocalDaemon, OffloadClient, OffloadingManager, offload_key
from kvferry.testing.demo_cluster import BLOCK_BYTES, ClusterEngine

BLOCKS = 64


def main() -> int:
    keys = [offload_key(block.to_bytes(32, "big")) for block in range(BLOCKS)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        folders = [folder / name for name in "AB"]
        (client, one), (_, two) = (_start_engine(each, folders, stack) for each in folders)
        one.fill()
        one.store(keys)
        begun = time.monotonic()
        with Progress(transient=True) as progress:
            two.promote(keys, progress)
        seconds = time.monotonic() - begun
        two.load(keys)
        wrong = two.count_wrong()
        client.reset()
        left = two.count_found(keys) + one.count_found(keys)
    same, empty = ("no" if number else "yes" for number in (wrong, left))
    print(f"engine B found {BLOCKS} blocks of engine A's daemon after {seconds:.1f} s")
    print(f"every byte is the one that engine A stored: {same}")
    print(f"after a reset no daemon finds a key: {empty}")
    return 1 if wrong or left else 0


def _start_engine(
    folder: Path, folders: list[Path], stack: ExitStack
) -> tuple[OffloadClient, ClusterEngine]:
    daemon = stack.enter_context(
        LocalDaemon(
            pool_bytes=3 * BLOCKS * BLOCK_BYTES,
            runtime_dir=folder,
            siblings_enabled="true",
            siblings_directories=":".join(map(str, folders)),
            state_dir=folder.parent,
        )
    )
    client = stack.enter_context(OffloadClient(daemon.directory, engine=folder.name))
    client.open_namespace(Fingerprint("demo-siblings", BLOCK_BYTES))
    return client, ClusterEngine(client, OffloadingManager(client), BLOCKS)


if __name__ == "__main__":
    raise SystemExit(main())
