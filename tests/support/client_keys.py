"""Keys of a namespace, and clients and managers that look them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvferry.client import (
    Fingerprint,
    KeyLoadStoreSpec,
    Lookup,
    OffloadClient,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
)
from support.fake_daemon import FakeDaemon

FINGERPRINT = Fingerprint("llama", 4096, key_bytes=4)
A, B, C, D = b"aaaa", b"bbbb", b"cccc", b"dddd"
HIT, MISS, PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY

Start: TypeAlias = Callable[..., FakeDaemon]


def open_manager(
    *daemons: FakeDaemon, events: bool = False, replicated: bool = False
) -> OffloadingManager:
    manager = OffloadingManager.connect(
        [daemon.directory for daemon in daemons],
        engine="engine",
        fingerprint=FINGERPRINT,
        events=events,
        replicated=replicated,
    )
    for daemon in daemons:
        daemon.received.clear()
    return manager


def answers(client: OffloadingManager | OffloadClient, *keys: bytes) -> list[Lookup]:
    return [client.lookup(key) for key in keys]


def offer(manager: OffloadingManager, *keys: bytes) -> tuple[bytes, ...]:
    """Offer keys. Returns the keys to store. Resident and pending keys must be in `keep`."""
    absent = {key for key in keys if manager._find(key) in (Lookup.MISS, Lookup.RETRY)}
    output = manager.prepare_store(keys)
    assert output is not None
    wanted = output.keys_to_store
    keep = tuple(key for key in dict.fromkeys(keys) if key not in absent) if wanted else ()
    specs = tuple(KeyLoadStoreSpec(wanted, epoch, keep) for epoch in manager.epochs)
    assert output == PrepareStoreOutput(output.keys_to_store, specs)
    assert output.store_spec == specs[0]
    return output.keys_to_store


def stored(*keys: bytes) -> OffloadingEvent:
    return OffloadingEvent(keys, removed=False)


def removed(*keys: bytes) -> OffloadingEvent:
    return OffloadingEvent(keys, removed=True)
