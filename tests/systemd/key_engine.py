"""An engine whose blocks have keys. Tests run it in a container, and on a GPU beside it.

    python key_engine.py DIRECTORY store|load|find|busy

"find" first promotes the blocks from a tier. "busy" stores, and then loads until the daemon
disconnects. Prints a line of JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    Lookup,
    OffloadClient,
    OffloadingManager,
    offload_key,
)
from kvferry.proto.errors import KVFerryError
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.messages import Opened, OpenNamespace, Registered, RegisterKVCaches
from support.raw_client import RawClient, one_tensor
from support.time_limits import TIMEOUT

BLOCKS, PAGE = 8, 4096
FINGERPRINT = Fingerprint("model", PAGE, key_bytes=12)
KEYS = tuple(offload_key(number.to_bytes(8, "big")) for number in range(BLOCKS))
# Each block has 4 KiB of its own value, which tests search for on disks.
WRITTEN = b"".join(bytes([number + 1]) * PAGE for number in range(BLOCKS))
UNKNOWN = Lookup.RETRY, Lookup.HIT_PENDING


class HostTensor:
    """A tensor without torch, registered by a worker of its own."""

    def __init__(self, directory: Path) -> None:
        memory = os.memfd_create("kv")
        os.ftruncate(memory, BLOCKS * PAGE)
        self._bytes = mmap.mmap(memory, BLOCKS * PAGE)
        self._worker = worker = RawClient(directory, "engine")
        worker.ask(OpenNamespace(1, FINGERPRINT), Opened)
        (handle,) = worker.deposit(memory)
        places = (FdAllocation(handle, BLOCKS * PAGE),), (Location(0, 0),)
        worker.ask(RegisterKVCaches(2, one_tensor(BLOCKS, PAGE), *places), Registered)

    def write(self, data: bytes) -> None:
        self._bytes[:] = data

    def read(self) -> bytes:
        return self._bytes[:]


class GPUTensor:
    def __init__(self, directory: Path) -> None:
        import torch

        self._torch = torch
        self._bytes = torch.zeros(BLOCKS, PAGE, dtype=torch.uint8, device="cuda")
        self._worker = worker = OffloadClient(directory, engine="engine", client="worker")
        worker.open_namespace(FINGERPRINT)
        worker.register_kv_caches({"layer": self._bytes}, num_blocks=BLOCKS)

    def write(self, data: bytes) -> None:
        rows = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        self._bytes.copy_(rows.view(BLOCKS, PAGE))
        self._torch.cuda.synchronize()

    def read(self) -> bytes:
        return self._bytes.cpu().numpy().tobytes()


def are_loadable(client: OffloadClient, *, in_tier: bool) -> bool:
    """Whether all blocks are in the pool, once the daemon knows it: after a restart it verifies
    them first, and a search in a tier can time out."""
    manager, deadline = OffloadingManager(client), time.monotonic() + TIMEOUT
    if in_tier:
        assert manager.lookup(KEYS[0]) is Lookup.MISS, "the key is in the pool"
    while time.monotonic() < deadline:
        if in_tier:
            manager.prefetch(KEYS)
        while any(manager.lookup(key) in UNKNOWN for key in KEYS):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        if all(manager.lookup(key) is Lookup.HIT for key in KEYS):
            return True
        if not in_tier:
            break
    return False


def run(directory: Path, action: str) -> dict[str, Any]:
    with OffloadClient(directory, engine="engine") as client:
        tensor = HostTensor(directory) if directory.name == "cpu" else GPUTensor(directory)
        client.open_namespace(FINGERPRINT)
        gpu, host = GPULoadStoreSpec(range(BLOCKS)), KeyLoadStoreSpec(KEYS)
        if action in ("load", "find"):
            if not are_loadable(client, in_tier=action == "find"):
                return {"outcome": "miss"}
            client.transfer_async(1, (host, gpu))
        else:
            tensor.write(WRITTEN)
            client.transfer_async(1, (gpu, host))
        client.wait([1])
        (result,) = client.get_finished()
        right, number = tensor.read() == WRITTEN, 1
        while action == "busy":  # until the daemon disconnects
            number += 1
            print(number, flush=True)
            client.transfer_async(number, (host, gpu))
            client.get_finished()
            client.wait([number])
        return {"outcome": result.outcome, "right": right, "pid": client.daemon.pid}


if __name__ == "__main__":
    try:
        print(json.dumps(run(Path(sys.argv[1]), sys.argv[2])))
    except KVFerryError as error:
        print(json.dumps({"outcome": error.code}))
