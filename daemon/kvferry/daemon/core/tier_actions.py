"""Messages between the core and the tiers below the host pool.

Actions of the core, the reports that answer them, and the blocks that the core hands out to be
written. Actions and reports pass like those of actions.py. Event loop only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.daemon.core.block_lines import Checksums
from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.core.region import Region

# Keys of one FindKeys, FetchBlocks or WriteJob: with the longest keys, a request to the
# process of a tier fits a datagram.
MAX_TIER_KEYS = 1024


@dataclass(frozen=True, slots=True)
class TierDescription:
    """A tier, as the core knows it. name: in status, metrics and KV events.

    writes_promoted: whether blocks that were promoted from a slower tier are written into it.
    min_uses: the use from which on a block is written into it; the store of a key is a use, and
        each load and touch. 0: nothing is written.
    locality: for KV events, see Place. is_shared: whether other hosts use the same storage.
    """

    name: str
    writes_promoted: bool = False
    min_uses: int = 1
    locality: str | None = None
    is_shared: bool = False


# Actions


@dataclass(frozen=True, slots=True)
class FindKeys:
    """Find out which of at most MAX_TIER_KEYS keys the tiers have; the reply is KeysFound.

    search: a number, which the reply repeats. store: the name of a namespace's store in the tiers,
    see Namespace.store_name.
    """

    search: int
    store: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Read the blocks of at most MAX_TIER_KEYS keys from a tier into the pool.

    The replies are BlocksFetched and, once nothing can write into the blocks, FetchReleased.

    tier: its index. offsets: of the blocks, in bytes in the pool. seconds: until the deadline.
    """

    fetch: int
    tier: int
    store: str
    keys: tuple[bytes, ...]
    offsets: Int64s
    block_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DropStore:
    """Nothing of a store is asked for again: the tiers free its blocks."""

    store: str


@dataclass(frozen=True, slots=True)
class SyncEpochs:
    """Make the epochs durable. The reply is EpochsSynced."""


@dataclass(frozen=True, slots=True)
class SettleEpochs:
    """Have the shared tiers settle the epochs of all namespaces now, not within a second. The
    replies are EpochsSettled."""


@dataclass(frozen=True, slots=True)
class LendMemory:
    """Reply MemoryLent to a sibling. first: see BorrowMemory. keys: loadable ones of the region."""

    session: str
    request_id: int
    region: Region
    first: int | None
    keys: int


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Blocks to write into a tier. They are held until BlocksWritten.

    offsets: of the host blocks, in bytes in the pool. One namespace per job, and at most
    MAX_TIER_KEYS keys. model: of its fingerprint.
    """

    number: int
    store: str
    keys: tuple[bytes, ...]
    checksums: Checksums
    offsets: Int64s
    block_bytes: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class WrittenBlocks:
    """Keys of one namespace that were written into a tier, and their host blocks in its region."""

    tier: int
    store: str
    keys: tuple[bytes, ...]
    blocks: Int64s


# Reports


@dataclass(frozen=True, slots=True)
class KeysFound:
    """The tiers' answer to FindKeys.

    tier_of: for each key of FindKeys the index of the fastest tier that has it; -1: none has it.

    rates: the read rate of each tier in bytes per second. queues: seconds that each tier
        needs to read the blocks in its queue. known: whether its rate was measured lately.
    """

    search: int
    tier_of: tuple[int, ...]
    rates: tuple[float, ...]
    queues: tuple[float, ...]
    known: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class BlocksFetched:
    """The end of a FetchBlocks.

    ok: for each key of FetchBlocks whether its block was read and matches its checksum.
    """

    fetch: int
    ok: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class FetchReleased:
    """Nothing can write into the blocks of a fetch any longer. Comes after its BlocksFetched."""

    fetch: int


@dataclass(frozen=True, slots=True)
class BlocksWritten:
    """The tier does not read the blocks of a WriteJob any longer. done: for each key, whether the
    tier has it now."""

    job: int
    done: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReport:
    """now: time.monotonic() in seconds."""

    now: float


@dataclass(frozen=True, slots=True)
class StoresFound(TimedReport):
    """A tier has started, and has these stores."""

    stores: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EpochsSynced(TimedReport):
    """The epochs are durable as they were when SyncEpochs was performed."""


@dataclass(frozen=True, slots=True)
class EpochsSettled(TimedReport):
    """A shared tier has answered which epochs its store has.

    tier: its index. asked: the epochs of this host. found: see SharedTier.settle.
    """

    tier: int
    asked: Mapping[str, int]
    found: Mapping[str, int]
