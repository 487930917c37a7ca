"""The Mooncake tier: host blocks in a Mooncake Store, which daemons on several hosts share.

    kvferry/NAMESPACE/EPOCH/KEY   a host block and its trailer; KEY in hex
    kvferry/NAME/epoch/EPOCH      a marker: NAME, and its parts NAME-..., have reached this epoch

NAMESPACE is the name that the daemon passes: a hash of the engine's fingerprint, which holds the
rank, and of the composition of host blocks. It is equal on all hosts, so what one daemon puts, all
find. A drop of a namespace raises its epoch, so no daemon finds its old keys again. A daemon puts
into the epoch that it knew when its pool was last empty, so it cannot bring old blocks back.

The tier contributes no memory to the store: it is a pure client of processes that do.
"""

from kvferry.daemon.tiers.mooncake.tier import open_tier

__all__ = ["open_tier"]
