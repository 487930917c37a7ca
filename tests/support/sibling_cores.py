"""SiblingCore: one daemon of test_sibling_cores_against_a_model.py, without sockets and processes.

Its core, region store, pool, incarnation page and windows are real; the device is simulated here.
A host block has two parts, and a transfer copies one part in a step.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from kvferry.daemon.core.actions import (
    CancelTransfers,
    FreeDeferred,
    MapTensors,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
    SendMessage,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.core import Core, PoolBounds
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.ports import Ports
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.core.tier_actions import EpochsSynced, LendMemory, SyncEpochs
from kvferry.daemon.persistence.epoch_page import EpochPage
from kvferry.daemon.persistence.recovery import recover_pool
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.siblings.windows import LentMemory
from kvferry.daemon.transport.lender import LentPool, lend_memory
from kvferry.proto import messages as wire
from kvferry.proto.errors import KVFerryError
from kvferry.proto.keys import Lookup
from kvferry.proto.lending import BorrowMemory, MemoryLent
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
)
from support.sibling_contents import SiblingContents, Submission
from support.sibling_device import Computed, Copy, SimulatedChecksums, SimulatedDevice
from support.sibling_ports import (
    CHUNK,
    DEVICE,
    FINGERPRINTS,
    GPU_BLOCKS,
    KEYS,
    LIMITS,
    PAGE,
    PARTS,
    POOL,
    DirectWindows,
    KeptDescriptors,
    NoDevice,
    PassedFds,
)


class SiblingCore:
    """A daemon from its start to its death. kept: used if `keeps`. damaged: a part of a block whose
    memory is damaged meanwhile. now: seconds.

    counts: of what happened, by name.
    """

    def __init__(
        self,
        kept: KeptDescriptors,
        directory: Path,
        contents: SiblingContents,
        counts: Counter[str],
        *,
        keeps: bool,
        damaged: int | None = None,
    ) -> None:
        self.contents, self.counts = contents, counts
        self.now = 100.0
        self.engine, self._numbers = NoDevice(), count(1)
        # Memory that siblings have lent and that is not mapped yet.
        self.lent: list[LentMemory] = []
        # The GPU blocks of a registration are used in turn.
        self._gpu, self.syncing = count(), 0
        kept.start()
        try:
            self._start(kept, directory, keeps, damaged)
        except BaseException:
            kept.close_stored()
            raise

    def _start(
        self, kept: KeptDescriptors, directory: Path, keeps: bool, damaged: int | None
    ) -> None:
        """As app.py does."""
        self.pool, recovered = recover_pool(
            kept, POOL, CHUNK, keep=keeps, check_new_pool=lambda _: None
        )
        self._incarnation = recovered.incarnation
        if damaged is not None:
            at = self.pool.address + damaged % (POOL // PAGE) * PAGE
            ctypes.c_uint64.from_address(at).value = 0
        self._epochs = EpochPage(directory)
        self.windows = DirectWindows(self.engine, self.pool)
        self.core = Core(
            DaemonIdentity("1", "boot", 1, DEVICE, LIMITS, 0.0),
            PoolBounds(POOL),
            Ports(self._epochs, siblings=self.windows),
        )
        nobody: Any = None
        self.store = RegionStore(
            nobody, recovered.fd_store, lambda _: None, 0, recovered.incarnation.number, lends=True
        )
        self.device = SimulatedDevice(self.pool.address)
        self.checksums = SimulatedChecksums(self.pool.address, self.store._regions)
        self.store.restore_regions(recovered.fds, self.core.restore_region)
        recovered.store_new_pool()
        self._lent_pool = LentPool(
            self.pool.descriptors,
            CHUNK,
            self._incarnation.descriptor,
            is_kept=recovered.is_kept,
            page_identity=self._epochs.identity,
            table_of=self.store.descriptor_of,
        )

    # Engines

    @property
    def namespaces(self) -> dict[str, Namespace]:
        return {one.name: one for one in self.core._namespaces}

    def session_of(self, number: int) -> tuple[str, Namespace] | None:
        """The session in a namespace, if it is registered."""
        namespace = self.namespaces.get(FINGERPRINTS[number].name)
        session = f"engine{number}"
        if namespace is None or not namespace.registrations or session not in namespace.sessions:
            return None
        return session, namespace

    def open(self, number: int, quota: int | None, layout: KVLayout) -> None:
        session = f"engine{number}"
        if session in self.core.sessions:
            return
        self.perform(self.core.open_session(session, make_hello(session, session)))
        self.send(session, wire.OpenNamespace(1, FINGERPRINTS[number], quota))
        if self.core._namespaces.namespace_of(session) is None:
            self.close(number)
            return
        self.send(session, wire.AllocateKVCaches(2, layout))
        if self.session_of(number) is None:
            self.close(number)

    def close(self, number: int) -> None:
        session = f"engine{number}"
        if session in self.core.sessions:
            self.perform(self.core.close_session(session))

    def compute(self, number: int, keys: Sequence[bytes]) -> Computed | None:
        """An engine computes blocks, in the epoch that it knows."""
        found = self.session_of(number)
        if found is None or found[1].contents is None:
            return None
        _, namespace = found
        epoch, composition = namespace.epoch, namespace.record.composition
        make = partial(self.contents.compute, namespace.name, composition)
        return Computed(number, composition, epoch, {key: make(key, epoch) for key in keys})

    def submit_store(self, computed: Computed, part: int | None = None) -> Copy | None:
        """part: of the first key, which is then the only one."""
        found = self.session_of(computed.number)
        if found is None or found[1].record.composition != computed.composition:
            return None
        keys = [*computed.numbers][: 1 if part is not None else None]
        gpu, places = self._gpu_blocks(keys, part)
        spec = gpu, KeyLoadStoreSpec(tuple(keys), computed.epoch)
        return self._submit(found[0], spec, places, computed.numbers, None)

    def submit_load(self, number: int, first: int, size: int) -> Copy | None:
        """Load one to three keys that are a hit here, from the `first` on."""
        found = self.session_of(number)
        if found is None or found[1].contents is None:
            return None
        session, namespace = found
        states = zip(KEYS, namespace.lookups(KEYS), strict=True)
        hits = [key for key, state in states if state is Lookup.HIT] or [KEYS[first % len(KEYS)]]
        if first % 4 and (away := namespace.borrowed.places(hits)):
            hits = [hits[place] for place in away]
        keys = [hits[(first + at) % len(hits)] for at in range(min(1 + size // 2 % 3, len(hits)))]
        gpu, places = self._gpu_blocks(keys, None)
        submission = self.contents.begin_load(namespace.name, namespace.record.composition)
        try:
            spec = KeyLoadStoreSpec(tuple(keys)), gpu
            return self._submit(session, spec, places, {}, submission)
        finally:
            self.contents.end_submission(submission)

    def _gpu_blocks(
        self, keys: Sequence[bytes], part: int | None
    ) -> tuple[GPULoadStoreSpec, dict[int, tuple[bytes, int]]]:
        """GPU blocks for keys, and the key and part of each."""
        parts = range(PARTS) if part is None else (part,)
        wanted = [(key, each) for key in keys for each in parts]
        places = {next(self._gpu) % GPU_BLOCKS: each for each in wanted}
        return GPULoadStoreSpec([*places], (len(wanted),), (part or 0,)), places

    def _submit(
        self,
        session: str,
        spec: Any,
        places: dict[int, tuple[bytes, int]],
        computed: dict[bytes, int],
        submission: Submission | None,
    ) -> Copy | None:
        actions = self.core.handle(session, wire.Submit(next(self._numbers), *spec), self.now)
        started = [action.plan for action in actions if isinstance(action, StartTransfer)]
        self.perform(actions)
        if not started:
            self.counts["refused"] += 1
            return None
        (plan,) = started
        pieces = [
            (offset, *places[block])
            for extent in plan.extents
            for block, offset in zip(
                extent.gpu_blocks.tolist(), extent.host_offsets.tolist(), strict=True
            )
        ]
        copy = Copy(plan, session, pieces, computed, submission)
        copy.borrowed = sum(not 0 <= offset < POOL for offset, _, _ in pieces) // PARTS
        self.device.copies[plan.serial] = copy
        return copy

    def search(self, number: int, keys: Sequence[bytes]) -> None:
        if (found := self.session_of(number)) is not None:
            self.send(found[0], wire.FindInTiers(3, tuple(keys)))

    def reset(self, number: int, label: str) -> None:
        if (found := self.session_of(number)) is not None:
            self.send(found[0], wire.Reset(4, label))

    def cancel(self, copy: Copy) -> None:
        if copy.session in self.core.sessions:
            everything = tuple(range(next(self._numbers)))
            self.send(copy.session, wire.Cancel(everything))

    # The device

    def end_copy(self, copy: Copy, *, fails: bool = False) -> None:
        """End a transfer if it is complete, cancelled or failed."""
        outcome = Outcome.DONE
        if copy.cancelled or fails:
            outcome = Outcome.CANCELLED if copy.cancelled else Outcome.FAILED
        elif not self.device.is_complete(copy):
            return
        del self.device.copies[copy.plan.serial]
        actions = self.core.report(TransferCompleted(copy.plan.serial, outcome))
        results = [
            result
            for action in actions
            if isinstance(action, SendMessage) and isinstance(action.message, wire.Finished)
            for result in action.message.results
        ]
        done = [result.outcome for result in results] == [Outcome.DONE]
        if copy.submission is None:
            self.counts["stores"] += done
        elif done:
            self.counts["borrowed"] += copy.borrowed
            self.counts["own"] += len(copy.loaded) - copy.borrowed
            for key, numbers in copy.loaded.items():
                self.contents.check(copy.submission, key, numbers)
        elif outcome is Outcome.DONE:
            self.counts["changed"] += 1
        self.perform(actions)

    # Persistence

    def check_blocks(self, most: int) -> None:
        """Compare blocks of an earlier daemon, or some others, with their checksums."""
        for report in self.checksums.compare(most):
            self.perform(self.core.report(report))

    # Siblings

    def lend(self, contents: NamespaceContents) -> MemoryLent | None:
        """The memory of a namespace, as MemoryLent with descriptors in place of handles."""
        fd_server: Any = PassedFds()
        for first in (0, None):
            message = BorrowMemory(1, contents.namespace, contents.composition, first)
            for action in self.core.handle("sibling", message, self.now):
                if isinstance(action, LendMemory):
                    return lend_memory(self._lent_pool, fd_server, action)
                self.perform([action])
        return None

    def borrow(self, owner: SiblingCore, name: str) -> None:
        """Ask a sibling, and take what it lends. name: of it."""
        used = self.core.used_contents()
        unused = {*self.windows.namespaces_of(name)} - {each.namespace for each in used}
        self.windows.close(name, *unused)
        for contents in used:
            lent = owner.lend(contents)
            if lent is None or not lent.handles or lent.table is None or lent.page is None:
                self.windows.close(name, contents.namespace)
                continue
            place = lent.region, lent.chunk_bytes, lent.start, lent.first
            memory = LentMemory(name, contents, *place, lent.handles, lent.table, lent.page)
            if self.windows.has(name, contents, lent.region):
                memory.close()
                continue
            self.windows.close(name, contents.namespace)
            self.lent.append(memory)

    def map_lent(self) -> None:
        """Map what siblings have lent."""
        while self.lent:
            try:
                self.windows.map_now(self.lent.pop())
            except (KVFerryError, OSError):
                self.counts["not mapped"] += 1

    # Actions

    def send(self, session: str, message: wire.ClientMessage) -> None:
        self.perform(self.core.handle(session, message, self.now))

    def perform(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case RegionCreated() | RegionUpdated() | RegionFreed():
                    self.store.apply_change(action)
                case MapTensors(registration, session):
                    self.perform(self.core.report(TensorsMapped(registration, session)))
                case CancelTransfers(registration, serials):
                    for serial in serials:
                        if serial in self.device.copies:
                            self.device.copies[serial].cancelled = True
                case UnmapTensors(registration):
                    for copy in [*self.device.copies.values()]:
                        if copy.plan.registration == registration:
                            copy.cancelled = True
                            self.end_copy(copy)
                    self.perform(self.core.report(TensorsUnmapped(registration)))
                case SyncEpochs():
                    self.syncing += 1
                case FreeDeferred(deferred):
                    while deferred.free_some():
                        pass
                case SendMessage(_, wire.Done()):
                    self.counts["resets"] += 1
                case SendMessage(_, wire.Error(_, error)):
                    self.counts[f"error {error.code}"] += 1

    def end_sync(self) -> None:
        if self.syncing:
            self.syncing -= 1
            self.perform(self.core.report(EpochsSynced(now=self.now)))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        if (deadline := self.core.deadline) is not None and self.now >= deadline:
            self.perform(self.core.advance(self.now))

    def check_integrity(self) -> None:
        for namespace in self.namespaces.values():
            namespace.cache.check_integrity()

    def die(self) -> None:
        """The kernel frees what the process had. Stored descriptors stay."""
        for window in [*self.windows._windows.values()]:
            self.windows._unmap(window)
        self.windows._windows.clear()
        for lent in self.lent:
            lent.close()
        self.store.close()
        self.pool.close(self.engine)
        os.close(self._incarnation.descriptor)
        self._epochs.close()
