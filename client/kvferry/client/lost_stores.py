"""Sub-blocks of host blocks whose last store was lost with its daemon.

A daemon does not know of a store that it had not received when it ended. If the next daemon has the
same host blocks, such a sub-block may contain the bytes of an older store. So the client refuses to
load it by number until a store of it completes. Used in the client's thread.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import BlockIds, CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec


class _UsedBlocks(NamedTuple):
    """The host memory of a transfer. sizes, indices: see GPULoadStoreSpec.

    factor: sub-blocks of a host block; None if not known: host blocks are then used as a whole.
    """

    hosts: BlockIds
    sizes: tuple[int, ...]
    indices: tuple[int, ...]
    factor: int | None

    @classmethod
    def of_spec(
        cls, gpu: GPULoadStoreSpec, host: CPULoadStoreSpec, factor: int | None
    ) -> _UsedBlocks:
        sizes = (gpu.block_ids.size,) if gpu.group_sizes is None else gpu.group_sizes
        indices = (0,) * len(sizes) if gpu.block_indices is None else gpu.block_indices
        hosts = host.block_ids.copy()  # the caller may change its array
        return cls(hosts, sizes, indices, factor)

    def sub_blocks(self) -> list[tuple[int, int]]:
        """(host block, sub-block) of each."""
        hosts, factor = self.hosts.tolist(), self.factor
        if factor is None:
            return [(host, 0) for host in hosts]
        used, begin = list[tuple[int, int]](), 0
        for size, index in zip(self.sizes, self.indices, strict=False):  # the daemon checks both
            skip = index % factor
            end = begin - (-(size + skip) // factor) if size else begin
            every = ((host, sub) for host in hosts[begin:end] for sub in range(factor))
            used += [*every][skip : skip + size]
            begin = end
        return used


class LostStores:
    """The stores in flight, and the sub-blocks whose last store was lost."""

    def __init__(self) -> None:
        self._in_flight: dict[int, _UsedBlocks] = {}
        self._undefined: set[tuple[int, int]] = set()

    def check(self, spec: TransferSpec, factor: int | None) -> None:
        """Raise Refused (STALE) if a load names such a sub-block. factor: see _UsedBlocks."""
        host, gpu = spec
        if not (self._undefined and isinstance(host, CPULoadStoreSpec)):
            return
        if not isinstance(gpu, GPULoadStoreSpec):  # the daemon refuses it
            return
        for block, sub_block in _UsedBlocks.of_spec(gpu, host, factor).sub_blocks():
            if (block, sub_block) in self._undefined:
                message = (
                    "the last store of this host block was lost with its daemon; treat it as a miss"
                )
                raise Refused(Code.STALE, message, block)

    def job_submitted(self, job_id: int, spec: TransferSpec, factor: int | None) -> None:
        """A job was sent; remember the host blocks of a store."""
        gpu, host = spec
        if isinstance(host, CPULoadStoreSpec) and isinstance(gpu, GPULoadStoreSpec):
            self._in_flight[job_id] = _UsedBlocks.of_spec(gpu, host, factor)

    def job_completed(self, job_id: int, *, done: bool) -> None:
        """If the job was a successful store, its sub-blocks are defined again."""
        blocks = self._in_flight.pop(job_id, None)
        if blocks is not None and done and self._undefined:
            self._undefined.difference_update(blocks.sub_blocks())

    def connection_lost(self) -> None:
        """All stores in flight are lost."""
        lost = (blocks.sub_blocks() for blocks in self._in_flight.values())
        self._undefined.update(chain.from_iterable(lost))
        self._in_flight.clear()
