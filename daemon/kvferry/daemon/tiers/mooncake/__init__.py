"""The Mooncake tier: host blocks in a Mooncake Store, which daemons on several hosts share.

    kvferry/NAMESPACE/EPOCH/KEY   a host block and its trailer; KEY in hex
    kvferry/NAME/epoch, ...       the epoch of NAME, and of its parts NAME-...; see epochs.py

NAMESPACE is the name that the daemon passes: a hash of the engine's fingerprint, which holds the
rank, and of the composition of host blocks. It is equal on all hosts, so what one daemon puts, all
find. A drop of a namespace begins another epoch, so no daemon finds its old keys again. Blocks from
before, which a daemon that has not noticed the drop may still have, are not put into it.

The tier contributes no memory to the store: it is a pure client of processes that do.
"""

from kvferry.daemon.tiers.mooncake.tier import open_tier

__all__ = ["open_tier"]
