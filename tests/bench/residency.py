"""Time of residency operations: lookups, offers, and the latency of an event, in microseconds.

    python tests/bench/residency.py [keys, default 1000000]

lookup          in a mirror of so many keys, by a client of a real daemon: a key that is resident,
                and one that is absent; through the client, and through an OffloadingManager
prepare_store   of 256 new keys in the core, in a full cache of so many keys: it evicts 256
event           a client stores a block: from the moment when it receives the result until the
                mirror of another client, which polls, has a HIT. The machine is idle otherwise.

p50, p99, max of the rounds. A call that is timed alone includes the timer's own 0.1 us.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    TensorLayout,
    TensorRef,
    offload_key,
)
from kvferry.daemon.core.cache.cache import Cache
from kvferry.proto.keys import EventKind
from kvferry.proto.messages import KeyEvent, KeyEvents

PAGE, BATCH = 64, 256
LOOKUPS, OFFERS, EVENTS, WARM_UPS = 20_000, 500, 300, 20
POLICIES = ("lru", "arc")
LAYOUT = KVLayout((TensorLayout(8, PAGE, PAGE),), ((TensorRef(0, PAGE),),))
FINGERPRINT = Fingerprint("bench", PAGE)


def main(keys: int) -> None:
    print(f"{keys:,} keys of {FINGERPRINT.key_bytes} bytes; microseconds")
    print(f"{'':<44} {'p50':>8} {'p99':>8} {'max':>9}")
    with ExitStack() as stack:
        daemon = stack.enter_context(LocalDaemon("cpu", pool_bytes=(keys + 4096) * PAGE))
        writer, reader = (_client(stack, daemon, name) for name in ("writer", "reader"))
        events = [_event(writer, reader, number) for number in range(WARM_UPS + EVENTS)]
        _show("event to another client's mirror", events[WARM_UPS:])
        _lookups(reader, keys)
    for policy in POLICIES:
        _show(f"prepare_store of {BATCH} new keys, {policy}", _offers(policy, keys))


def _client(stack: ExitStack, daemon: LocalDaemon, name: str) -> OffloadClient:
    client = stack.enter_context(OffloadClient(daemon.directory, engine=name))
    client.open_namespace(FINGERPRINT)
    client.allocate_kv_caches(LAYOUT)
    return client


def _event(writer: OffloadClient, reader: OffloadClient, number: int) -> float:
    key = _key(number)
    writer.transfer_async(number, (GPULoadStoreSpec([0]), KeyLoadStoreSpec([key])))
    while not writer.get_finished():
        pass
    begin = time.perf_counter()
    while reader.lookup(key) is not Lookup.HIT:
        reader.poll()
    seconds = time.perf_counter() - begin
    time.sleep(0.002)
    return seconds


def _lookups(client: OffloadClient, keys: int) -> None:
    """Fill the mirror with key events as the daemon sends them, and time lookups."""
    mirror = client.namespace.mirror
    every = [_key(number) for number in range(keys)]
    for at in range(0, keys, 1 << 16):
        event = KeyEvent(EventKind.STORED, tuple(every[at : at + (1 << 16)]))
        mirror.apply_message(KeyEvents(mirror.sequence + 1, (event,)))
    random = np.random.default_rng(0)
    resident = [every[i] for i in random.integers(keys, size=LOOKUPS)]
    absent = [_key(keys + int(i)) for i in random.integers(keys, size=LOOKUPS)]
    manager = OffloadingManager(client)
    for name, lookup in (("client", client.lookup), ("manager", manager.lookup)):
        for what, looked_up in (("resident", resident), ("absent", absent)):
            _show(f"{name}.lookup, {what}", _each(lookup, looked_up))


def _each(call: Callable[[bytes], object], keys: Sequence[bytes]) -> list[float]:
    clock, seconds = time.perf_counter, list[float]()
    for key in keys:
        begin = clock()
        call(key)
        seconds.append(clock() - begin)
    return seconds


def _offers(policy: str, keys: int) -> list[float]:
    cache, at, seconds = Cache(keys, policy), 0, list[float]()
    while at < keys + (OFFERS + WARM_UPS) * BATCH:
        offer = [_key(number) for number in range(at, at + BATCH)]
        at += BATCH
        begin = time.perf_counter()
        reservation = cache.prepare_store(offer)
        seconds.append(time.perf_counter() - begin)
        assert reservation is not None
        cache.complete_store(reservation, True)
    assert cache.counts["evictions"] == at - keys
    return seconds[-OFFERS:]


def _key(number: int) -> bytes:
    return offload_key(number.to_bytes(32, "big"))


def _show(what: str, seconds: Sequence[float]) -> None:
    p50, p99, high = np.quantile(seconds, (0.5, 0.99, 1)) * 1e6
    print(f"{what:<44} {p50:8.2f} {p99:8.2f} {high:9.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keys", type=int, nargs="?", default=1_000_000)
    main(parser.parse_args().keys)
