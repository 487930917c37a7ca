"""Checks of a request to open a namespace, the same wherever its values come from.

Called by the SDK and vLLM's connector when they receive the options, and by the daemon for each
OpenNamespace. So an engine does not start with options that every daemon would refuse.
"""

from __future__ import annotations

from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import OpenNamespace

# Names of the eviction policies.
POLICIES = "lru", "arc", "s3fifo"
MAX_HOST_BLOCKS = 1 << 28
# Maximum of host blocks with fewer than SMALL_BLOCK_BYTES bytes. The block table takes 32 bytes and
# a key per block, which must be a small part of a large region.
MAX_SMALL_BLOCKS, SMALL_BLOCK_BYTES = 1 << 20, 384
# Encoded. The status of all namespaces must fit into one message.
MAX_FINGERPRINT_BYTES = 4096


def check_opening(message: OpenNamespace) -> None:
    """Raise Refused for values that no daemon accepts.

    BAD_SPEC: the policy, or too large a fingerprint. POOL_FULL, BAD_LAYOUT: see check_host_bytes.
    """
    fingerprint = message.fingerprint
    policy_name(message.policy)
    if (nbytes := fingerprint.nbytes) > MAX_FINGERPRINT_BYTES:
        raise Refused(
            Code.BAD_SPEC,
            f"the fingerprint has {nbytes} bytes, more than {MAX_FINGERPRINT_BYTES}; put a "
            "hash of long values into `extra`",
            nbytes,
        )
    if message.quota_bytes is not None:
        check_host_bytes(message.quota_bytes, fingerprint.host_block_bytes)


def policy_name(name: object) -> str:
    """The eviction policy of this name, in any case. Raises Refused (BAD_SPEC)."""
    policy = name.lower() if isinstance(name, str) else name
    if policy not in POLICIES:
        known = " or ".join(POLICIES)
        raise Refused(Code.BAD_SPEC, f"unknown eviction policy {name!r}; use {known}", name)
    return str(policy)


def check_host_bytes(nbytes: int, block: int) -> None:
    """Raise Refused if a region of `nbytes` cannot have blocks of `block` bytes.

    POOL_FULL: it has no room for one. BAD_LAYOUT: it has room for more than a region can have.
    """
    if nbytes < block:
        message = (
            f"{nbytes} bytes of host memory hold no host block of {block} bytes; "
            f"request at least {block} bytes"
        )
        raise Refused(Code.POOL_FULL, message, nbytes)
    most = MAX_HOST_BLOCKS if block >= SMALL_BLOCK_BYTES else MAX_SMALL_BLOCKS
    if nbytes // block > most:
        raise Refused(
            Code.BAD_LAYOUT,
            f"{nbytes} bytes are {nbytes // block} host blocks of {block} bytes, more than the "
            f"{most} of one region; request less host memory or a larger block_size_factor",
            nbytes // block,
        )
