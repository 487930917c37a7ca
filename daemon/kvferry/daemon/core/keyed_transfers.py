"""The keys of a transfer, as host blocks of its namespace.

A store reserves blocks for the keys that are absent, and leaves out the others together with their
GPU blocks. A load pins all of its keys or is refused. The transfer holds a Lease on them until it
ends. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.daemon.core.block_lines import Part
from kvferry.daemon.core.borrowed import BorrowedBlocks
from kvferry.daemon.core.cache.jobs import Pins, Reservation
from kvferry.daemon.core.layout import NO_BLOCKS, BlockLayout, GroupExtent, Int64s, ResolvedBlocks
from kvferry.daemon.core.namespace import Namespace
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KeyLoadStoreSpec


class Lease(msgspec.Struct, frozen=True):
    """The blocks that a keyed transfer holds in its namespace. borrowed: those it reads from
    siblings, which hold nothing."""

    namespace: Namespace
    held: Reservation | Pins
    borrowed: BorrowedBlocks | None = None

    def forget_changed(self) -> bool:
        """Forget borrowed keys whose blocks have changed since they were found. Returns whether
        there are any: the bytes of such a load must not be used."""
        changed = [] if self.borrowed is None else self.borrowed.changed_keys()
        self.namespace.borrowed.forget(changed)
        return bool(changed)

    def release_blocks(self, *, done: bool, lost: Int64s = NO_BLOCKS) -> None:
        """End the lease. The keys of a completed store become loadable, without those of `lost`
        blocks."""
        if self.borrowed is not None:
            self.borrowed.release(done=done)
        if isinstance(self.held, Pins):
            self.namespace.cache.complete_load(self.held)
        else:
            self.namespace.cache.complete_store(self.held, done, lost)


def resolve_keyed(
    namespace: Namespace,
    layout: BlockLayout,
    direction: Direction,
    gpu: GPULoadStoreSpec,
    host: KeyLoadStoreSpec,
) -> tuple[ResolvedBlocks, Lease]:
    """Resolve a keyed transfer to held blocks. If it raises Refused, nothing has changed."""
    keys = host.keys
    _check_epoch(namespace, direction, host)
    namespace.check_keys(keys)
    group_extents = layout.group_extents(direction, gpu, len(keys))
    parts = _parts(layout, group_extents)
    if direction is Direction.STORE:
        namespace.check_keys(host.keep)
        blocks, lease = _reserve_keys(namespace, keys, parts, host.keep)
    else:
        blocks, lease = _pin_keys(namespace, keys, parts, (0, layout.factor))
    if (borrowed := lease.borrowed) is not None:
        borrowed.hold()
        return layout.resolve_borrowed(group_extents, blocks, borrowed.rows[1]), lease
    return layout.resolve_extents(group_extents, blocks), lease


def _pin_keys(
    namespace: Namespace, keys: Sequence[OffloadKey], parts: dict[int, Part], whole: Part
) -> tuple[Int64s, Lease]:
    """The host block of each key; -1 for those that are borrowed."""
    away = namespace.borrowed.places(keys)
    borrowed = None
    if away and namespace.contents is not None:
        borrowed = namespace.borrowed.blocks_of(namespace.contents, [keys[place] for place in away])
    if borrowed is not None and (changed := borrowed.changed_keys()):
        namespace.borrowed.forget(changed)
        text = f"the sibling no longer has key {changed[0].hex()}; treat it as a miss"
        raise Refused(Code.KEY_ABSENT, text, changed[0].hex())
    here = sorted({*range(len(keys))} - {*away}) if away else range(len(keys))
    pins = namespace.cache.prepare_load([keys[place] for place in here])
    try:
        for position in here if namespace.cache.has_parts else ():
            _check_part(namespace, keys[position], parts.get(position, whole))
    except Refused:
        namespace.cache.complete_load(pins)
        raise
    if borrowed is None:
        return pins.blocks, Lease(namespace, pins)
    blocks = np.full(len(keys), -1, np.int64)
    blocks[here] = pins.blocks
    return blocks, Lease(namespace, pins, borrowed)


def _check_epoch(namespace: Namespace, direction: Direction, host: KeyLoadStoreSpec) -> None:
    """Raise Refused if a transfer is of another epoch, or if nothing can be transferred now."""
    if direction is Direction.STORE:
        if namespace.is_behind or host.epoch not in (None, namespace.epoch):
            raise Refused(
                Code.STALE,
                f"the blocks are of epoch {host.epoch}, but the namespace was reset since; "
                "compute them again before you store them",
                host.epoch,
            )
    elif namespace.is_behind and host.keys:
        first = host.keys[0].hex()
        text = f"the namespace was reset, so it has no key {first}; treat it as a miss"
        raise Refused(Code.KEY_ABSENT, text, first)


def _check_part(namespace: Namespace, key: OffloadKey, wanted: Part) -> None:
    stored = namespace.cache.stored_part(key)
    if stored is not None and not stored[0] <= wanted[0] < wanted[1] <= stored[1]:
        raise Refused(
            Code.KEY_ABSENT,
            f"key {key.hex()} has sub-blocks {stored[0]} to {stored[1] - 1} stored, but "
            f"{wanted[0]} to {wanted[1] - 1} were requested; treat it as a miss",
            key.hex(),
        )


def _reserve_keys(
    namespace: Namespace,
    keys: Sequence[OffloadKey],
    parts: dict[int, Part],
    keep: Sequence[OffloadKey],
) -> tuple[Int64s, Lease]:
    """The host block of each key; -1 for keys that are not stored."""
    # Of a key that occurs twice, the first place counts. One pass: each group has two parts.
    first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True)) if parts else {}
    named = {keys[at]: part for at, part in parts.items() if first[keys[at]] == at}
    held = namespace.borrowed.held_elsewhere(namespace.contents, keys)
    offered = [key for key in keys if key not in held] if held else keys
    reservation = namespace.cache.prepare_store(offered, named, keep)
    if reservation is None:
        raise Refused(
            Code.CACHE_FULL,
            f"no room for {len(keys)} keys: too many of the {namespace.region.num_blocks} host "
            "blocks of the namespace are pinned or being stored; try again later",
            len(keys),
        )
    taken = dict(zip(reservation.keys, reservation.blocks, strict=True))
    blocks = np.fromiter((taken.pop(key, -1) for key in keys), np.int64, len(keys))
    return blocks, Lease(namespace, reservation)


def _parts(layout: BlockLayout, group_extents: Sequence[GroupExtent]) -> dict[int, Part]:
    """Positions of host blocks that a transfer uses in part, and the part."""
    whole = (0, layout.factor)
    return {
        position: part
        for extent in group_extents
        for position, part in zip(
            (extent.begin, extent.end - 1), layout.end_parts(extent), strict=True
        )
        if part != whole
    }
