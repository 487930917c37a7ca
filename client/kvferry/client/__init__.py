"""The SDK: submit transfers to the daemon of a GPU and poll for their results.

    from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, OffloadClient

    client = OffloadClient(engine="llama")
    region = client.register_kv_caches(kv_caches, num_blocks=4096)
    client.transfer_async(1, (GPULoadStoreSpec([7, 8, 9]), CPULoadStoreSpec([0, 1, 2])))
    for result in client.get_finished(): ...

Nothing here imports torch until torch's tensors are used.
"""

from __future__ import annotations

from kvferry.client.aio import AsyncOffloadClient
from kvferry.client.blocking import OffloadClient
from kvferry.client.endpoint import find_daemon
from kvferry.client.jobs import TransferResult
from kvferry.client.local import LocalDaemon
from kvferry.client.manager import OffloadingManager
from kvferry.client.manager_outputs import PrepareStoreOutput
from kvferry.client.registering import AllocatedKVCaches
from kvferry.client.residency_events import OffloadingEvent
from kvferry.client.retentions import Retention
from kvferry.client.session_state import RegistrationState, SessionState
from kvferry.client.tensors import CanonicalKVCaches, canonicalize, shared_empty
from kvferry.client.timeline import Timeline
from kvferry.proto.errors import Code, Failed, Gone, KVFerryError, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import Lookup, OffloadKey, block_hash_of, group_of, offload_key
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import Opened
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)
from kvferry.proto.status import DaemonStatus

__all__ = [
    "AllocatedKVCaches",
    "AsyncOffloadClient",
    "CPULoadStoreSpec",
    "CanonicalKVCaches",
    "Code",
    "DaemonStatus",
    "Failed",
    "Fingerprint",
    "GPULoadStoreSpec",
    "Gone",
    "HostRegion",
    "KVFerryError",
    "KVLayout",
    "KeyLoadStoreSpec",
    "LocalDaemon",
    "Lookup",
    "OffloadClient",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingManager",
    "Opened",
    "Outcome",
    "PrepareStoreOutput",
    "Refused",
    "RegistrationState",
    "Retention",
    "SessionState",
    "TensorLayout",
    "TensorRef",
    "Timeline",
    "TransferResult",
    "TransferSpec",
    "block_hash_of",
    "canonicalize",
    "find_daemon",
    "group_of",
    "offload_key",
    "shared_empty",
]
