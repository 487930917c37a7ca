"""Puts, gets and finds host blocks in a Mooncake Store. Any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.base import Blocks, Fetched, HostMemory, Result, SharedTier, TierUsage
from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.encryption import SEAL_BYTES, CipherOf, cipher_of, no_cipher
from kvferry.daemon.tiers.mooncake.ciphertext_memory import CiphertextMemory
from kvferry.daemon.tiers.mooncake.epochs import StoreEpochs, marker
from kvferry.daemon.tiers.mooncake.store_client import (
    NO_SPACE,
    TOO_LARGE,
    TRANSFER_FAILED,
    UNREADABLE,
    StoreClient,
    explain,
)
from kvferry.daemon.tiers.mooncake.trailer import (
    MAX_TRAILERS,
    ThreadTrailers,
    Trailers,
)

# Seconds for which a key that the store did not have is not asked for again, and how many such keys
# are kept.
ABSENT_SECONDS, MAX_ABSENT = 0.5, 1 << 16
# Below this size of a block, the memory of the master for each object matters.
SMALL_BLOCK = 1 << 20

log = structlog.get_logger()


def open_tier(options: Mapping[str, Any], memory: HostMemory) -> MooncakeTier:
    """Raises Refused (BAD_CONFIG), and OSError if the store cannot be reached."""
    of_store = dict(options)
    cipher_of_store = cipher_of(of_store.pop("key_file", ""), "tiers.mooncake.key_file")
    return MooncakeTier(StoreClient(memory, **of_store), cipher_of_store)


class MooncakeTier(SharedTier):
    io_threads, call_bytes = 4, 16 << 20

    def __init__(self, store: StoreClient, ciphers: CipherOf = no_cipher) -> None:
        self._store, self._epochs = store, StoreEpochs(store)
        self._cipher_of, is_encrypted = ciphers, ciphers("") is not None
        self._of_thread = ThreadTrailers(store, SEAL_BYTES if is_encrypted else 0)
        self._ciphertexts = CiphertextMemory(store, self.call_bytes)
        self._absent = _AbsentKeys()
        self._warned = False

    def contains(self, store: str, keys: Sequence[bytes]) -> Sequence[bool]:
        found = [False] * len(keys)
        name = StoreName.parse(store)
        incarnation = self._epochs.incarnation(name)
        asked = self._absent.select(store, keys)
        if incarnation is None or (keys and not asked):
            return found
        objects = self._objects(name, incarnation, [keys[place] for place in asked])
        is_valid, *present = self._store.exist([marker(name.namespace, incarnation), *objects])
        if not is_valid:
            self._epochs.end(name.namespace, incarnation)
            return found
        for place, exists in zip(asked, present, strict=True):
            found[place] = exists
        self._absent.add(store, [keys[place] for place in asked if not found[place]])
        return found

    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        name = StoreName.parse(blocks.store)
        incarnation = self._epochs.incarnation(name)
        if incarnation is None:
            return [Fetched(Result.MISS)] * len(blocks.keys)
        results = list[Fetched]()
        for part in _parts(blocks):
            if time.monotonic() >= deadline:
                results.extend([Fetched(Result.LATE)] * len(part.keys))
            else:
                results.extend(self._fetch(part, self._objects(name, incarnation, part.keys)))
        return results

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> Sequence[Result]:
        self._warn_if_small(blocks.nbytes)
        name = StoreName.parse(blocks.store)
        incarnation = self._epochs.incarnation(name)
        if incarnation is None:
            return [Result.FULL] * len(blocks.keys)
        results = list[Result]()
        for part in _parts(blocks):
            sums = checksums[len(results) : len(results) + len(part.keys)]
            results.extend(self._put(part, self._objects(name, incarnation, part.keys), sums))
        return results

    def drop(self, store: str, keys: Sequence[bytes] | None = None) -> None:
        """The blocks of a whole store are removed by the host that publishes the next epoch."""
        name = StoreName.parse(store)
        incarnation = self._epochs.incarnation(name)
        if keys and incarnation is not None:
            self._store.remove(self._objects(name, incarnation, keys))

    def settle(self, epochs: Mapping[str, int]) -> Mapping[str, int]:
        return self._epochs.settle(epochs)

    def usage(self) -> TierUsage:
        """Nothing is known: the store is shared, and its client cannot ask for its size."""
        return TierUsage()

    def maintain(self) -> None:
        self._absent.expire()
        self._epochs.remove_old()

    def close(self) -> None:
        """Nothing is to be written back, and the library would take a second to close."""

    def _fetch(self, blocks: Blocks, names: Sequence[str]) -> list[Fetched]:
        trailers = self._of_thread.trailers
        nbytes, whole = blocks.nbytes, blocks.nbytes + trailers.nbytes
        trailers.clear(len(names))
        cipher = self._cipher_of(blocks.store)
        read = blocks if cipher is None else self._ciphertexts.moved_to(blocks)
        codes = self._store.get(names, *_buffers(read, trailers))
        results = []
        for place, (name, code) in enumerate(zip(names, codes, strict=True)):
            if code in UNREADABLE:
                results.append(Fetched(Result.MISS))
            elif code == whole and (checksum := trailers.read(place, name, nbytes)) is not None:
                if cipher is not None:
                    key, seal = blocks.keys[place], trailers.read_seal(place)
                    checksum = cipher.decrypt(key, seal, _view(read, place), _view(blocks, place))
                is_good = checksum is not None
                results.append(Fetched(Result.OK if is_good else Result.CORRUPT, checksum or 0))
            elif code >= 0 or code == TOO_LARGE or self._is_short(name, code, whole):
                results.append(self._remove_foreign(name, code))
            else:
                results.append(Fetched(Result.ERROR))
        _log_failures("get", codes, [each.result for each in results])
        return results

    def _put(self, blocks: Blocks, names: Sequence[str], checksums: Sequence[int]) -> list[Result]:
        trailers, cipher = self._of_thread.trailers, self._cipher_of(blocks.store)
        written = blocks if cipher is None else self._ciphertexts.moved_to(blocks)
        for place, (name, checksum) in enumerate(zip(names, checksums, strict=True)):
            if cipher is None:
                trailers.write(place, name, blocks.nbytes, checksum)
            else:
                plain, target = _view(blocks, place), _view(written, place)
                seal = cipher.encrypt(blocks.keys[place], checksum, plain, target)
                trailers.write(place, name, blocks.nbytes, 0, seal)
        codes = self._store.put(names, *_buffers(written, trailers))
        self._absent.remove(blocks.store, blocks.keys)
        outcomes = {0: Result.OK, NO_SPACE: Result.FULL}
        results = [outcomes.get(code, Result.ERROR) for code in codes]
        _log_failures("put", codes, results)
        return results

    def _objects(self, name: StoreName, incarnation: int, keys: Sequence[bytes]) -> list[str]:
        """The objects of keys. The incarnation stands for the epoch, too."""
        directory = f"kvferry/{name._replace(epoch=0)}/{incarnation}"
        if (cipher := self._cipher_of(str(name))) is not None:
            directory += f"/{cipher.key_id}"
        return [f"{directory}/{key.hex()}" for key in keys]

    def _is_short(self, name: str, code: int, whole: int) -> bool:
        """Whether a transfer failed because the object has fewer bytes."""
        return code == TRANSFER_FAILED and 0 <= self._store.size(name) < whole

    def _remove_foreign(self, name: str, code: int) -> Fetched:
        """An object that is not a block of its name is a miss, so that it can be put again."""
        log.warning("object with wrong contents removed", object=name, code=code)
        self._store.remove([name])
        return Fetched(Result.MISS)

    def _warn_if_small(self, nbytes: int) -> None:
        if nbytes < SMALL_BLOCK and not self._warned:
            self._warned = True
            log.warning(
                "small host blocks in the Mooncake tier; raise block_size_factor, with vLLM the "
                "connector's block_size",
                block_bytes=nbytes,
                recommended_bytes=SMALL_BLOCK,
            )


class _AbsentKeys:
    """Keys that the store did not have a moment ago."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Until when; the earliest first.
        self._until: dict[tuple[str, bytes], float] = {}

    def select(self, store: str, keys: Sequence[bytes]) -> list[int]:
        """The places of the keys that may exist."""
        now = time.monotonic()
        with self._lock:
            until = [self._until.get((store, key), 0.0) for key in keys]
        return [place for place, each in enumerate(until) if each <= now]

    def add(self, store: str, keys: Sequence[bytes]) -> None:
        until = time.monotonic() + ABSENT_SECONDS
        with self._lock:
            if len(self._until) + len(keys) > MAX_ABSENT:
                self._until.clear()
            for key in keys:
                self._until.pop((store, key), None)
                self._until[store, key] = until

    def remove(self, store: str, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._until.pop((store, key), None)

    def expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            while self._until and self._until[first := next(iter(self._until))] <= now:
                del self._until[first]


def _parts(blocks: Blocks) -> Iterator[Blocks]:
    for at in range(0, len(blocks.keys), MAX_TRAILERS):
        part = slice(at, at + MAX_TRAILERS)
        yield blocks._replace(keys=blocks.keys[part], addresses=blocks.addresses[part])


def _buffers(blocks: Blocks, trailers: Trailers) -> tuple[list[list[int]], list[list[int]]]:
    """The addresses and sizes of each object's buffers."""
    addresses = [
        [address, trailers.address(place)] for place, address in enumerate(blocks.addresses)
    ]
    return addresses, [[blocks.nbytes, trailers.nbytes]] * len(addresses)


def _view(blocks: Blocks, place: int) -> memoryview:
    return view_memory(blocks.addresses[place], blocks.nbytes)


def _log_failures(what: str, codes: Sequence[int], results: Sequence[Result]) -> None:
    failed = [code for code, result in zip(codes, results, strict=True) if result is Result.ERROR]
    if failed:
        log.warning("store failed", operation=what, keys=len(failed), reason=explain(failed[0]))
