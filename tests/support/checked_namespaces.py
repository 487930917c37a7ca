"""A core with namespaces, and a model that checks every answer: transfers and keys.

Only the victims of evictions are read from the core. They must be keys that may be evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from kvferry.daemon.core.actions import (
    SendMessage,
    SendStream,
    StartTransfer,
    TransferCompleted,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.hints import Release, Retain, Retained
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    Direction,
    KeyLoadStoreSpec,
)
from support.cached_keys import entries_of
from support.checked_sessions import CheckedSessions
from support.key_requests import KeyRequest, MovedBlock
from support.mirror_model import MirrorModel
from support.namespaces_fixture import FAULT, copies
from support.namespaces_model import (
    Cell,
    KeyBlock,
    KeyedRegistration,
    KeyedTransfer,
    NamespaceModel,
)


class CheckedNamespaces(CheckedSessions):
    """Adds transfers, pins, hints, resets and subscriptions."""

    # Transfers

    def store(
        self,
        session: str,
        request: KeyRequest,
        keep: tuple[bytes, ...] = (),
        epoch: int | None = None,
    ) -> KeyedTransfer | None:
        """Store keys. Returns None if the cache is full, or if the namespace has another epoch."""
        registration = self.registrations()[self.sessions[session]]
        namespace = registration.namespace
        replaced = namespace.replaced(request)
        present = {*namespace.ready, *namespace.pending} - replaced
        wanted = [key for key in dict.fromkeys(request.keys) if key not in present]
        movable = namespace.ready.keys() - namespace.pinned - {*request.keys, *keep}
        missing = max(0, len(wanted) - namespace.free - len(replaced))
        orphaned = namespace.orphaned
        spec = KeyLoadStoreSpec(request.keys, epoch, keep)
        actions = self.send(session, wire.Submit(next(self.numbers), request.gpu, spec))
        if epoch not in (None, namespace.epoch):
            self.check_refused(actions, session, Code.STALE)
            return None
        if missing > len(movable):
            self.check_refused(actions, session, Code.CACHE_FULL)
            return None
        for key in replaced:
            del namespace.ready[key]
        evicted = namespace.ready.keys() - dict(entries_of(self.cache(namespace))).keys()
        assert (len(evicted), evicted <= movable) == (missing, True)
        for key in evicted:
            del namespace.ready[key]
        moved = list(chain.from_iterable(map(request.first_blocks, wanted)))
        transfer = self._check_start(actions, session, registration, Direction.STORE, moved)
        assert list(transfer.blocks) == wanted
        new = [block.offset for block in transfer.blocks.values()]
        present_blocks = chain(namespace.ready.values(), namespace.pending.values())
        used = orphaned.union(block.offset for block in present_blocks)
        assert len({*new} - used) == len(new)
        namespace.pending.update(transfer.blocks)
        for offset, nbytes, _ in transfer.cells:
            self.pool.write(offset, nbytes, None)
        return transfer

    def load(self, session: str, request: KeyRequest) -> None:
        registration = self.registrations()[self.sessions[session]]
        namespace = registration.namespace
        spec = KeyLoadStoreSpec(request.keys, 1)  # the epoch of a load is not compared
        actions = self.send(session, wire.Submit(next(self.numbers), spec, request.gpu))
        if not namespace.is_loadable(request):
            self.check_refused(actions, session, Code.KEY_ABSENT)
            return
        transfer = self._check_start(actions, session, registration, Direction.LOAD, request.blocks)
        assert transfer.blocks == {key: namespace.ready[key] for key in request.keys}

    def _check_start(
        self,
        actions: list[Any],
        session: str,
        registration: KeyedRegistration,
        direction: Direction,
        moved: Sequence[MovedBlock],
    ) -> KeyedTransfer:
        """Check that a plan copies exactly `moved`, in the region, each key in one host block."""
        (start,) = actions
        assert isinstance(start, StartTransfer)
        plan, namespace = start.plan, registration.namespace
        assert (start.session, plan.registration) == (session, registration.number)
        assert plan.direction is direction
        copied = copies(plan)
        assert [copy[:2] for copy in copied] == [(b.group, b.gpu_block) for b in moved]
        size = namespace.fingerprint.host_block_bytes
        blocks, cells = dict[bytes, KeyBlock](), list[Cell]()
        for block, (group, _, offset) in zip(moved, copied, strict=True):
            nbytes = registration.layout.group_bytes(group)
            start_of_block = offset - block.sub * nbytes
            number, rest = divmod(start_of_block - namespace.start, size)
            assert (0 <= number < namespace.capacity, rest) == (True, 0)
            if direction is Direction.LOAD:
                found = namespace.ready[block.key]
            else:
                subs = tuple(b.sub for b in moved if b.key == block.key)
                found = KeyBlock(start_of_block, plan.serial, subs)
            assert blocks.setdefault(block.key, found).offset == start_of_block
            cells.append((offset, nbytes, (found.serial, block.key, block.sub)))
        assert plan.nbytes == sum(nbytes for _, nbytes, _ in cells)
        transfer = KeyedTransfer(
            plan.serial, direction, registration, namespace.epoch, blocks, cells
        )
        namespace.transfers[plan.serial] = transfer
        return transfer

    def end_transfer(self, transfer: KeyedTransfer, outcome: Outcome) -> None:
        namespace, done = transfer.registration.namespace, outcome is Outcome.DONE
        del namespace.transfers[transfer.serial]
        if transfer.direction is Direction.LOAD:
            self.check_cells(transfer)
        else:
            if done:
                for cell in transfer.cells:
                    self.pool.write(*cell)
            if transfer.epoch == namespace.epoch:
                for key in transfer.blocks:
                    del namespace.pending[key]
                namespace.ready.update(transfer.blocks if done else {})
        error = FAULT if outcome is Outcome.FAILED else None
        self.report(TransferCompleted(transfer.serial, outcome, 0.0, error))

    def check_cells(self, transfer: KeyedTransfer) -> None:
        for cell in transfer.cells:
            self.pool.check(*cell)

    # Keys

    def _namespace_of(self, session: str) -> NamespaceModel:
        namespace = self.namespace_of(session)
        assert namespace is not None
        return namespace

    def pin(self, session: str, keys: Sequence[bytes]) -> None:
        namespace = self._namespace_of(session)
        assert self.send(session, wire.Pin(tuple(keys))) == []
        for key in keys:
            found = key in namespace.ready
            pin = (namespace.epoch, namespace.ready[key]) if found else None
            namespace.pins[session].setdefault(key, []).append(pin)

    def unpin(self, session: str, keys: Sequence[bytes]) -> None:
        """Unpin keys. The session must have pinned each of them as often as it occurs."""
        pins = self._namespace_of(session).pins[session]
        assert self.send(session, wire.Unpin(tuple(keys))) == []
        for key in keys:
            pins[key].pop(0)
            if not pins[key]:
                del pins[key]

    def retain(self, session: str, keys: Sequence[bytes], seconds: float, label: str) -> None:
        namespace, number = self._namespace_of(session), next(self.numbers)
        request = Retain(number, tuple(keys), seconds, label)
        (action,) = self.send(session, request)
        due, engine = self.now + seconds, self.sessions[session]
        entries = namespace.retained.setdefault((session, label), {})
        blocks = namespace.capacity
        kept = missing = clipped = 0
        for key in dict.fromkeys(keys):
            own, everyone = (
                namespace.retained_by(*engines)
                for engines in ((engine,), namespace.sessions.values())
            )
            if key not in namespace.ready:
                missing += 1
            elif key in entries or (
                not clipped
                and (not label or len(entries) < max(1, blocks // 16))
                and (key in own or len(own) < max(1, blocks // 4))
                and (key in everyone or len(everyone) < max(1, blocks // 2))
            ):
                entries[key] = max(due, entries.get(key, 0))
                kept += 1
            else:
                clipped += 1
        assert action == SendMessage(session, Retained(number, kept, missing, clipped))

    def release(self, session: str, keys: Sequence[bytes], label: str) -> None:
        assert self.send(session, Release(tuple(keys), label)) == []
        entries = self._namespace_of(session).retained.get((session, label), {})
        for key in keys:
            entries.pop(key, None)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        assert self._observe(self.core.advance(self.now)) == []
        for namespace in self.namespaces.values():
            for entries in namespace.retained.values():
                for key in [key for key, due in entries.items() if due <= self.now]:
                    del entries[key]

    def reset(self, session: str) -> None:
        namespace, number = self._namespace_of(session), next(self.numbers)
        self.epochs[namespace.name] += 1
        namespace.begin_epoch(self.epochs[namespace.name])
        done = wire.Done(number, namespace.epoch)
        assert self.send(session, wire.Reset(number)) == [SendMessage(session, done)]

    def subscribe(self, session: str) -> MirrorModel:
        namespace = self._namespace_of(session)
        (stream,) = self.send(session, wire.Subscribe())
        assert isinstance(stream, SendStream)
        assert stream.session == session
        mirror = MirrorModel(stream.messages, namespace.epoch)
        namespace.subscribers[session] = mirror
        return mirror
