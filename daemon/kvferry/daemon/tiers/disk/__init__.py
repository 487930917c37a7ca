"""The disk tier: host blocks in slots of preallocated slab files.

    ROOT/lock                 locked by the tier's process
    ROOT/format               identifies the root of a tier
    ROOT/STORE/meta           sizes of blocks, slots and slabs
    ROOT/STORE/hints          which key is in which slot; each start reads it into memory
    ROOT/STORE/slab-*         slots: a header page, then the block, in whole pages

The headers of the slots are the truth: they have key, generation and checksum. So a torn slot or a
stale hint is a miss, and a hint that is lost is replaced by reading the header of its slot. The
blocks of a store are encrypted with one key, which `meta` identifies, or not encrypted. Damage
costs its store, and never the tier: own_files.py opens all files but the directories.
"""

from kvferry.daemon.tiers.disk.tier import open_tier

__all__ = ["open_tier"]
