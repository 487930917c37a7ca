"""Shared memory in messages: the allocations of tensors, and an engine's part of the host pool."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvferry.proto.specs import MAX_TENSORS, Count, Id, Name, Part, Positive


class CudaAllocation(Part, tag="cuda"):
    """A device allocation shared by CUDA IPC.

    handle: of its first byte. size: bytes of the whole allocation.
    """

    device_uuid: Name
    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    size: Positive


class FdAllocation(Part, tag="fd"):
    """Memory behind a file descriptor that is passed over the descriptor socket.

    It is host memory if the daemon uses the CPU, and device memory of the daemon's GPU otherwise.
    handle: of the descriptor. size: in bytes.
    """

    handle: Id
    size: Positive


Allocation: TypeAlias = CudaAllocation | FdAllocation


class Location(Part):
    """The first byte of a canonical tensor: `offset` bytes after the start of an allocation.

    allocation: index in the message's list of allocations.
    """

    allocation: Count
    offset: Count


Allocations: TypeAlias = Annotated[tuple[Allocation, ...], Meta(max_length=MAX_TENSORS)]
Locations: TypeAlias = Annotated[tuple[Location, ...], Meta(max_length=MAX_TENSORS)]


class HostRegion(Part):
    """The engine's part of the host pool: blocks 0 to num_blocks - 1, of block_bytes each.

    reattached: the region was left by an engine of the same name and layout, with its bytes.
    """

    num_blocks: Count
    block_bytes: Positive
    reattached: bool
