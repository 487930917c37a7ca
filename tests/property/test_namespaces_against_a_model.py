"""Namespaces against dictionaries: keys load what was stored under them, and mirrors are right.

The machine draws what engines ask and what the device worker reports, in any order. The model is in
support/namespaces_model.py, requests and their checks are in support/checked_namespaces.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvferry.daemon.core.actions import BlocksVerified
from kvferry.proto import messages as wire
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction
from support.checked_namespaces import CheckedNamespaces
from support.checked_sessions import new_core
from support.key_requests import (
    FITTING,
    HYBRID,
    LAYOUTS,
    LETTERS,
    PLAIN,
    SHORT,
    group_of,
    key_requests,
    request_of_key,
)
from support.mirror_model import MirrorModel
from support.namespaces_model import CELL, NamespaceModel

OUTCOMES = [Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED]
POLICIES = ["lru", "arc"]
MAX_SESSIONS = 6
T = TypeVar("T")


class NamespacesMachine(CheckedNamespaces, RuleBasedStateMachine):
    def one_of(self, things: Iterable[T]) -> T:
        thing: T = self.draw(st.sampled_from(list(things)))
        return thing

    # What happens

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.draw: Any = data.draw
        plain, hybrid = LAYOUTS
        layouts = {plain: self.one_of(FITTING[PLAIN]), hybrid: self.one_of(FITTING[HYBRID])}
        for engine, fingerprint in (("a", plain), ("b", plain), ("c", hybrid)):
            session = self.connect(engine)
            self.open_namespace(session, fingerprint, self.one_of(POLICIES))
            self.register(session, layouts[fingerprint])
            self.map_tensors(self.registrations()[engine])
            self.store_some(session, Outcome.DONE)
            self.read_all(self.subscribe(session))

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        self.draw = data.draw
        getattr(self, self.one_of(self.possible_steps()))()

    def possible_steps(self) -> list[str]:
        """Names of methods, likely ones more than once."""
        steps = ["toggle_newcomer"] * 3
        if len(self.sessions) < MAX_SESSIONS:
            steps += ["connect_one"] * 4
        if self.sessions:
            steps += ["disconnect_one"] * 2
        if self.ready_to_ask():
            steps += ["open_one"]
        if self.submitters():
            steps += ["store_one"] * 12 + ["load_one"] * 9
        if self.transfers():
            steps += ["end_one"] * 8
        if self.unmapped():
            steps += ["map_one"] * 2
        if self.closing():
            steps += ["unmap_one"] * 3
        if self.namespaces:
            steps += ["disconnect_all"] * 2
        if self.in_namespaces():
            steps += ["pin_some"] * 3 + ["unpin_some"] * 3 + ["touch_some"]
            steps += ["reset_one"] * 3 + ["subscribe_one"] * 2
        if self.ready_to_register():
            steps += ["register_one"] * 3
        if self.unread():
            steps += ["read_part"] * 3
        return steps

    # Sessions and registrations

    def ready_to_ask(self) -> list[str]:
        return [session for session in self.sessions if session not in self.waiting]

    def ready_to_register(self) -> list[str]:
        return [session for session in self.ready_to_ask() if self.namespace_of(session)]

    def connect_one(self) -> None:
        session = self.connect(self.one_of("abc"))
        self.open_namespace(session, self.one_of(LAYOUTS), self.one_of(POLICIES))

    def open_one(self) -> None:
        session = self.one_of(self.ready_to_ask())
        self.open_namespace(session, self.one_of(LAYOUTS), self.one_of(POLICIES))

    def disconnect_one(self) -> None:
        self.disconnect(self.one_of(self.sessions))

    def disconnect_all(self) -> None:
        """All sessions of one namespace, whose tensors are unmapped. A successor may register."""
        namespace = self.namespaces[self.one_of(self.namespaces)]
        for session in self.draw(st.permutations(list(namespace.sessions))):
            self.disconnect(session)
            for registration in self.closing():
                self.unmap_tensors(registration, self.one_of(OUTCOMES))
        if len(self.sessions) < MAX_SESSIONS:
            successor = self.connect("successor")
            self.open_namespace(successor, namespace.fingerprint, self.one_of(POLICIES))
            if self.namespace_of(successor):
                self.register(successor, self.one_of([PLAIN, HYBRID, SHORT]))

    def toggle_newcomer(self) -> None:
        if self.newcomer is None:
            self.connect_newcomer()
        else:
            self.disconnect_newcomer()

    def register_one(self) -> None:
        """More likely an engine without a registration, and a layout that is accepted."""
        sessions, held = self.ready_to_register(), self.registrations()
        session = self.one_of([s for s in sessions if self.sessions[s] not in held] or sessions)
        namespace = self.namespace_of(session)
        assert namespace is not None
        layouts = FITTING[LAYOUTS[namespace.fingerprint]]
        if namespace.layout_is_fixed and namespace.layout:
            layouts = [namespace.layout, namespace.layout, PLAIN, HYBRID, SHORT]
        self.register(session, self.one_of(layouts))
        if self.one_of([True, False]) and self.unmapped():
            self.map_tensors(self.unmapped()[-1])

    def unmapped(self) -> list[Any]:
        return [r for r in self.registrations().values() if not r.mapped]

    def map_one(self) -> None:
        self.map_tensors(self.one_of(self.unmapped()), self.one_of([True, True, False]))

    def unmap_one(self) -> None:
        self.unmap_tensors(self.one_of(self.closing()), self.one_of(OUTCOMES))

    # Transfers

    def submitters(self) -> list[str]:
        usable = {engine for engine, one in self.registrations().items() if one.usable}
        return [session for session, engine in self.sessions.items() if engine in usable]

    def store_one(self) -> None:
        self.store_some(self.one_of(self.submitters()), self.one_of([None, None, Outcome.DONE]))

    def store_some(self, session: str, outcome: Outcome | None) -> None:
        registration = self.registrations()[self.sessions[session]]
        namespace = registration.namespace
        in_part = namespace.ready.keys() - namespace.hits()
        partial = [[key for key in letters if key in in_part] for letters in LETTERS]
        keys = self.one_of([LETTERS, LETTERS, partial])
        request = self.draw(key_requests(registration.layout, keys))
        keep = tuple(self.draw(st.lists(st.sampled_from([b"a", b"b", b"u"]), max_size=2)))
        generation = self.one_of([0, namespace.generation])
        transfer = self.store(session, request, keep, generation)
        if transfer and outcome:
            self.end_transfer(transfer, outcome)

    def load_one(self) -> None:
        session = self.one_of(self.submitters())
        registration = self.registrations()[self.sessions[session]]
        ready = registration.namespace.ready
        present = [[key for key in letters if key in ready] for letters in LETTERS]
        keys = self.one_of([present, present, LETTERS])
        self.load(session, self.draw(key_requests(registration.layout, keys)))

    def end_one(self) -> None:
        self.end_transfer(self.one_of(self.transfers()), self.one_of(OUTCOMES))

    # Keys

    def session_and_namespace(self) -> tuple[str, NamespaceModel]:
        session = self.one_of(self.in_namespaces())
        namespace = self.namespace_of(session)
        assert namespace is not None
        return session, namespace

    def some_keys(self, namespace: NamespaceModel) -> tuple[bytes, ...]:
        """Mostly ready ones."""
        ready = [st.sampled_from(sorted(namespace.ready))] if namespace.ready else []
        letters = st.sampled_from([bytes([letter]) for letter in b"abcuvw"])
        return tuple(self.draw(st.lists(st.one_of(*ready, *ready, letters), max_size=4)))

    def pin_some(self) -> None:
        session, namespace = self.session_and_namespace()
        self.pin(session, self.some_keys(namespace))

    def unpin_some(self) -> None:
        session, namespace = self.session_and_namespace()
        pinned = [key for key, pins in namespace.pins[session].items() for _ in pins]
        count = self.draw(st.integers(0, 4))
        self.unpin(session, self.draw(st.permutations(pinned))[:count])

    def touch_some(self) -> None:
        session, namespace = self.session_and_namespace()
        assert self.send(session, wire.Touch(self.some_keys(namespace))) == []

    def reset_one(self) -> None:
        """More likely a namespace with transfers in flight."""
        namespaces = self.namespaces.values()
        likely = [session for n in namespaces if n.transfers for session in n.sessions]
        self.reset(self.one_of(likely or self.in_namespaces()))

    def subscribe_one(self) -> None:
        mirror = self.subscribe(self.one_of(self.in_namespaces()))
        if self.one_of([True, False]):
            self.read_all(mirror)

    def unread(self) -> list[MirrorModel]:
        """Mirrors that have not read all of their snapshot."""
        return [mirror for mirror in self.mirrors() if mirror.snapshot is not None]

    def read_part(self) -> None:
        self.unread()[self.draw(st.integers(0, len(self.unread()) - 1))].read_part()

    def read_all(self, mirror: MirrorModel) -> None:
        while mirror.snapshot is not None:
            mirror.read_part()

    # What always holds

    @invariant()
    def caches_agree_with_the_model(self) -> None:
        for namespace in self.namespaces.values():
            cache = self.cache(namespace)
            cache.check_integrity()
            usage = cache.usage
            assert usage.free + usage.pending + usage.ready + usage.orphaned == namespace.capacity
            assert (usage.free, usage.orphaned) == (namespace.free, len(namespace.orphaned))
            assert usage.pinned == len(namespace.pinned)
            size, start = namespace.fingerprint.host_block_bytes, namespace.start
            ready = {key: (b.offset - start) // size for key, b in namespace.ready.items()}
            assert dict(cache.entries()) == ready
            assert set(cache.pending_keys()) == set(namespace.pending)
            assert set(cache.ready_keys()) == namespace.hits()

    @invariant()
    def a_restarted_daemon_has_the_ready_keys_and_no_others(self) -> None:
        restarted = new_core("next")
        for found in self.records.found():
            restarted.restore_region(found)
        restored = {one.name: one for one in restarted._namespaces}
        assert restored.keys() == self.namespaces.keys()
        for name, namespace in self.namespaces.items():
            ours, theirs = self.core._namespaces._by_name[name], restored[name]
            theirs.cache.check_integrity()
            entries = dict(theirs.cache.entries())
            assert entries == dict(ours.cache.entries())
            assert theirs.record == ours.record
            for key in entries:
                assert theirs.cache.stored_part(key) == ours.cache.stored_part(key)
            assert theirs.take_key_events() is None
            assert theirs.cache.ready_keys() == []
            assert set(theirs.cache.pending_keys()) == namespace.hits()
            blocks = np.array(list(entries.values()), dtype=np.int64)
            restarted.report(BlocksVerified(theirs.region.owner, blocks, tuple(entries)))
            assert set(theirs.cache.ready_keys()) == namespace.hits()
        regions = {region.owner: (region.start, region.nbytes) for region in restarted._regions}
        assert regions == {one.owner: (one.start, one.nbytes) for one in self.core._regions}

    @invariant()
    def mirrors_have_the_hits_and_the_pending_keys(self) -> None:
        for namespace in self.namespaces.values():
            for mirror in (namespace.published, *namespace.subscribers.values()):
                if mirror.snapshot is None:
                    assert mirror.ready == namespace.hits()
                    assert mirror.pending == set(namespace.pending)

    @invariant()
    def ready_keys_have_the_bytes_that_were_stored(self) -> None:
        for namespace in self.namespaces.values():
            for key, block in namespace.ready.items():
                assert namespace.layout is not None
                nbytes = namespace.layout.group_bytes(group_of(key))
                for sub in block.subs:
                    content = block.serial, key, sub
                    self.pool.check(block.offset + sub * nbytes, nbytes, content)
        for transfer in self.transfers():
            if transfer.direction is Direction.LOAD:
                self.check_cells(transfer)

    @invariant()
    def no_byte_is_written_by_two_stores(self) -> None:
        written = [
            cell
            for transfer in self.transfers()
            if transfer.direction is Direction.STORE
            for offset, nbytes, _ in transfer.cells
            for cell in range(offset, offset + nbytes, CELL)
        ]
        assert len(set(written)) == len(written)

    def teardown(self) -> None:
        """After the last session, no block is held, and all ready keys load."""
        for mirror in self.unread():
            self.read_all(mirror)
        for transfer in self.transfers():
            self.end_transfer(transfer, Outcome.DONE)
        self.mirrors_have_the_hits_and_the_pending_keys()
        for session in list(self.sessions):
            self.disconnect(session)
        for registration in self.closing():
            self.unmap_tensors(registration, Outcome.DONE)
        self.caches_agree_with_the_model()
        for namespace in list(self.namespaces.values()):
            usage = self.cache(namespace).usage
            assert (usage.pending, usage.orphaned, usage.pinned) == (0, 0, 0)
            session = self.connect("heir")
            layout = namespace.layout or LAYOUTS[namespace.fingerprint]
            self.open_namespace(session, namespace.fingerprint, "lru")
            self.register(session, layout)
            (registration,) = namespace.registrations
            self.map_tensors(registration)
            for key, block in namespace.ready.items():
                self.load(session, request_of_key(layout, key, block.subs))
            assert len(namespace.transfers) == len(namespace.ready)
            self.disconnect(session)
            self.unmap_tensors(registration, Outcome.DONE)


def test_keys_load_what_was_stored_under_them() -> None:
    run_state_machine_as_test(
        NamespacesMachine,
        settings=settings(max_examples=150, stateful_step_count=50),
    )
