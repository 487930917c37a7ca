"""The Mooncake tier: host blocks in a Mooncake Store, which daemons on several hosts share.

    kvferry/NAMESPACE-COMPOSITION/INCARNATION/KEY   a host block and its trailer; KEY in hex
    kvferry/NAMESPACE/epoch, ...                    epoch and incarnation; see epochs.py

With a key file, INCARNATION/KEYID stands for INCARNATION: hosts with different keys do not see each
other's blocks, and none removes another's.

NAMESPACE is a hash of the engine's fingerprint, which holds the rank. COMPOSITION is a hash of how
host blocks are composed. Both are equal on all hosts, so what one daemon puts, all find. A reset of
a namespace begins another epoch in the store, too, with another incarnation: no daemon finds the
old blocks again, and none puts blocks from before into it. The host that was reset removes them.

The tier contributes no memory to the store: it is a pure client of processes that do.
"""

from kvferry.daemon.tiers.mooncake.tier import open_tier

__all__ = ["open_tier"]
