"""A daemon whose service manager keeps its pool, and an engine that uses it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    Lookup,
    OffloadClient,
    TensorLayout,
    TensorRef,
    Timeline,
    TransferResult,
    TransferSpec,
    offload_key,
)
from kvferry.testing.engine import until
from support.service_manager import ServiceManager, kvferryd_command

PAGE, BLOCKS, FACTOR = 4096, 32, 2
# Bytes at the front of the pool that the daemon uses itself.
OWN = 2 * PAGE
LAYOUT = KVLayout((TensorLayout(BLOCKS, PAGE, PAGE),), ((TensorRef(0, PAGE),),), FACTOR)
FINGERPRINT = Fingerprint("llama", PAGE * FACTOR, key_bytes=12)
CHUNK = 4 << 20


def key(number: int) -> bytes:
    return offload_key(number.to_bytes(8, "big"))


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(key(number) for number in numbers)


class RestartingEngine:
    """A client with tensors of its own, as scheduler and worker of an engine."""

    def __init__(
        self,
        directory: Path,
        name: str = "one",
        *,
        namespace: bool = True,
        host_bytes: int = 4 << 20,
        timeline: Timeline | None = None,
    ) -> None:
        self.client = OffloadClient(directory, engine=name)
        if namespace:
            self.opened = self.client.open_namespace(FINGERPRINT, cpu_bytes_to_use=host_bytes)
        self.region, (self.tensor,), _ = self.client.allocate_kv_caches(
            LAYOUT, host_bytes=None if namespace else host_bytes, timeline=timeline
        )
        self.jobs = 0

    def fill(self, blocks: Sequence[int], seed: int) -> torch.Tensor:
        """Write random bytes into GPU blocks. Returns the bytes."""
        content = np.random.default_rng(seed).integers(-128, 128, (len(blocks), PAGE), np.int8)
        self.tensor[list(blocks)] = torch.from_numpy(content).to(self.tensor.device)
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)
        return torch.from_numpy(content)

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        return self.tensor[list(blocks)].cpu()

    def submit(self, spec: TransferSpec) -> int:
        self.jobs += 1
        self.client.transfer_async(self.jobs, spec)
        return self.jobs

    def run(self, spec: TransferSpec) -> TransferResult:
        self.client.wait([self.submit(spec)])
        (result,) = self.client.get_finished()
        return result

    def store(self, blocks: Sequence[int], names: Sequence[bytes]) -> TransferResult:
        return self.run((GPULoadStoreSpec(blocks), KeyLoadStoreSpec(tuple(names))))

    def load(self, names: Sequence[bytes], blocks: Sequence[int]) -> TransferResult:
        return self.run((KeyLoadStoreSpec(tuple(names)), GPULoadStoreSpec(blocks)))

    def await_verified(self) -> None:
        """Wait until the daemon has verified every block of an earlier daemon."""
        until(lambda: verified(self.client))

    def lookup(self, *numbers: int) -> list[Lookup]:
        self.client.poll()
        return [self.client.lookup(key(number)) for number in numbers]

    def close(self) -> None:
        self.client.close()


def verified(client: OffloadClient) -> bool:
    """Whether the daemon has verified every block of an earlier daemon."""
    verification = client.status().verification
    return verification is not None and verification.decided_bytes == verification.total_bytes


class RestartedService:
    """A daemon whose service manager keeps its descriptors."""

    def __init__(self, folder: Path, device: str = "cpu", **options: object) -> None:
        chosen = {"device": device.removeprefix("cuda:"), "pool_chunk": CHUNK, "log_format": "json"}
        self.folder, self.options = folder, {**chosen, **options}
        self.manager = ServiceManager(self.command(), folder / "notify", log=folder / "app.log")

    @property
    def directory(self) -> Path:
        return next((self.folder / "run").glob("*/lock")).parent

    def start(self) -> None:
        self.manager.start()

    def restart(self, **options: object) -> None:
        self.manager.kill()
        self.manager.command = self.command(**options)
        self.start()

    def start_refused(self, **options: object) -> int:
        """Start the daemon with options that it refuses. Returns its exit status."""
        if hasattr(self.manager, "process"):
            self.manager.kill()
        self.manager.command = self.command(**options)
        self.manager.start(ready=False)
        status = self.manager.wait_dead()
        until(lambda: any(s.startswith("refused to") for s in self.manager.values("STATUS")))
        return status

    def start_as_before(self) -> None:
        """Start the daemon with its original options."""
        self.manager.command = self.command()
        self.start()

    def engine(self, name: str = "one", *, namespace: bool = True) -> closing[RestartingEngine]:
        return closing(RestartingEngine(self.directory, name, namespace=namespace))

    def overwrite(self, name: str, at: int, data: bytes) -> None:
        """Write into kept memory. Neither the manager nor a daemon notices."""
        with mmap.mmap(self.manager.kept(name), 0) as memory:
            memory[at : at + len(data)] = data

    def command(self, **options: object) -> list[str]:
        return kvferryd_command(self.folder / "run", **(self.options | options))  # type: ignore[arg-type]
