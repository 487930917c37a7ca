"""The worker of a small engine: it owns the KV tensors and runs kernels on them.

It runs in a process of its own, which engine.py starts. It receives commands over a pipe, one at a
time: the methods of SmallEngineWorker. A command that launches kernels returns before they have
run, with the value that the timeline reaches after them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvferry.client import HostRegion, OffloadClient, Timeline
from kvferry.testing.content import Bytes, Parts, noise
from kvferry.testing.kv import KVTensors, adopt, build, canonical_layout
from kvferry.testing.options import EngineOptions
from kvferry.testing.streams import make_stream


@dataclass(frozen=True)
class WorkerOpened:
    """The part of an engine's registration that the scheduler needs."""

    region: HostRegion
    parts: tuple[Parts, ...]
    kept: bool = False


class SmallEngineWorker:
    def __init__(self, directory: Path, options: EngineOptions) -> None:
        self.options = options
        self._stream = make_stream(options.device)
        self._timeline = Timeline.create(options.device) if options.timeline else None
        self._slow_reads: list[Tensor] = []
        self._client = OffloadClient(directory, engine=options.name, client="worker")
        try:
            self._kv, region, kept = self._register()
        except BaseException:
            self.close()
            raise
        self.opened = WorkerOpened(region, self._kv.parts, kept)

    def write(
        self,
        block_ids: Sequence[int],
        seed: int,
        *,
        slow: float = 0.0,
        group: int = 0,
        like: Sequence[int] | None = None,
    ) -> int:
        """Launch kernels that fill blocks of a group with their noise.

        Returns the timeline value to wait for, or 0 if the engine has no timeline. slow: seconds
        that a kernel before them takes. like: ids of blocks whose noise is written instead.
        """
        target = self._stream.upload(block_ids)
        blocks = self._stream.upload(block_ids if like is None else like)
        if slow:
            self._stream.sleep(slow)
        for number in self._kv.members[group]:
            self._stream.launch(partial(self._fill, number, target, blocks, seed))
        return self.signal()

    def scribble(self, seed: int) -> int:
        """Launch kernels that fill all memory of the KV tensors with noise, also between blocks."""
        for number, storage in enumerate(self._kv.storages()):
            self._stream.launch(partial(_fill_storage, storage, number, seed))
        return self.signal()

    def read(self, block_ids: Sequence[int], group: int = 0) -> Bytes:
        """The bytes of blocks after all kernels have run: (blocks, bytes of a block)."""
        self._stream.synchronize()
        index = self._stream.upload(block_ids)
        return _join_pages([self._kv.views[n][index] for n in self._kv.members[group]])

    def read_slowly(self, block_ids: Sequence[int], slow: float, group: int = 0) -> int:
        """Launch kernels that read blocks after `slow` seconds. `seen` returns the bytes."""
        index, self._slow_reads = self._stream.upload(block_ids), []
        self._stream.sleep(slow)
        for number in self._kv.members[group]:
            self._stream.launch(partial(self._record_read, number, index))
        return self.signal()

    def seen(self) -> Bytes:
        self._stream.synchronize()
        return _join_pages(self._slow_reads)

    def snapshot(self) -> list[Bytes]:
        """The bytes of all memory of the KV tensors."""
        self._stream.synchronize()
        return [storage.cpu().numpy().copy() for storage in self._kv.storages()]

    def signal(self) -> int:
        """Advance the timeline after all earlier launches. Returns its value."""
        return self._stream.signal(self._timeline) if self._timeline else 0

    def wait(self, job_ids: Sequence[int], timeout: float) -> None:
        """Wait for jobs, which another session has submitted."""
        self._client.wait(job_ids, timeout)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self._client.close()
        self._stream.close()
        if self._timeline is not None:
            self._timeline.close()

    def _register(self) -> tuple[KVTensors, HostRegion, bool]:
        """Register tensors. Returns them, the region, and whether they are kept ones."""
        o = self.options
        options: dict[str, Any] = {"host_bytes": o.host_bytes, "timeline": self._timeline}
        if o.daemon_owned:
            layout = canonical_layout(o)
            allocated = self._client.allocate_kv_caches(layout, keep=o.keep, **options)
            return adopt(o, layout, allocated.tensors), allocated.region, allocated.kept
        kv = build(o)
        region = self._client.register_kv_caches(
            kv.kv_caches,
            num_blocks=o.num_blocks,
            groups=kv.groups,
            block_size_factor=o.block_size_factor,
            page_size_bytes=kv.page_size_bytes,
            **options,
        )
        return kv, region, False

    def _record_read(self, number: int, index: Tensor) -> None:
        self._slow_reads.append(self._kv.views[number][index])

    def _fill(self, number: int, target: Tensor, blocks: Tensor, seed: int) -> None:
        view = self._kv.views[number]
        size = view[0].numel() * view.element_size()
        offsets = torch.arange(size, device=view.device)
        pages = noise(offsets, blocks[:, None], number, seed).to(torch.uint8)
        view[target] = pages.view(view.dtype).view(len(target), *view.shape[1:])


def _fill_storage(storage: Tensor, number: int, seed: int) -> None:
    offsets = torch.arange(storage.numel(), device=storage.device)
    storage.copy_(noise(offsets, -1 - number, number, seed))


def _join_pages(pages: Sequence[Tensor]) -> Bytes:
    rows = [page.contiguous().view(len(page), -1).view(torch.uint8).cpu() for page in pages]
    return np.concatenate([row.numpy() for row in rows], axis=1)


def serve(pipe: Connection) -> None:
    """Run commands until the pipe is closed. `open` creates the worker, `close` removes it."""
    worker: SmallEngineWorker | None = None
    while True:
        try:
            name, arguments, keywords = pipe.recv()
        except EOFError:
            return
        try:
            if name == "open":
                worker = SmallEngineWorker(*arguments)
                reply: Any = worker.opened
            else:
                reply = getattr(worker, name)(*arguments, **keywords)
            pipe.send((reply, None))
        except Exception as error:
            pipe.send((None, error))
        if name == "close":
            worker = None
