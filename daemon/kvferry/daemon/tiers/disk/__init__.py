"""The disk tier: host blocks in slots of preallocated slab files.

    ROOT/lock                 locked by the tier's process
    ROOT/state                boot id, and whether the tier was closed cleanly
    ROOT/drop-NUMBER-NAMESPACE  the daemon must drop this namespace: see drop_markers.py
    ROOT/NAMESPACE/meta       sizes of blocks, slots and slabs
    ROOT/NAMESPACE/index      LMDB: key -> slot and generation
    ROOT/NAMESPACE/rebuilding  the index is being rebuilt
    ROOT/NAMESPACE/slab-*     slots: a header page, then the block, in whole pages

A block is written before its index entry. Slot headers repeat key, generation and checksum, so that
a torn slot or a stale entry is a miss, and the index can be rebuilt.
"""

from kvferry.daemon.tiers.disk.tier import open_tier

__all__ = ["open_tier"]
