"""Namespaces compared with dictionaries: keys load their stored bytes, and mirrors are correct.

The machine draws requests of engines and reports of the device worker, in any order. The model is
in support/namespaces_model.py. Requests and their checks are in support/checked_namespaces.py.
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
from kvferry.daemon.core.retention import LOOK_EVERY
from kvferry.proto import messages as wire
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction
from support.cached_keys import entries_of, pending_keys, ready_keys
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
from support.namespaces_model import CELL, REGION, NamespaceModel

OUTCOMES = [Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED]
POLICIES = ["lru", "arc"]
MAX_SESSIONS = 6
T = TypeVar("T")


class NamespacesMachine(CheckedNamespaces, RuleBasedStateMachine):
    def draw_from(self, values: Iterable[T]) -> T:
        value: T = self.draw(st.sampled_from(list(values)))
        return value

    # Steps

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.draw: Any = data.draw
        plain, hybrid = LAYOUTS
        layouts = {plain: self.draw_from(FITTING[PLAIN]), hybrid: self.draw_from(FITTING[HYBRID])}
        for engine, fingerprint in (("a", plain), ("b", plain), ("c", hybrid)):
            session = self.connect(engine)
            self.open_namespace(session, fingerprint, self.draw_from(POLICIES))
            self.register(session, layouts[fingerprint])
            self.map_tensors(self.registrations()[engine])
            self.store_drawn_keys(session, Outcome.DONE)
            self.read_all(self.subscribe(session))

    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        self.draw = data.draw
        getattr(self, self.draw_from(self.possible_steps()))()

    def possible_steps(self) -> list[str]:
        """Names of methods. Frequent ones occur more than once."""
        steps = ["toggle_newcomer"] * 3
        if len(self.sessions) < MAX_SESSIONS:
            steps += ["connect_session"] * 4
        if self.sessions:
            steps += ["disconnect_session"] * 2
        if self.idle_sessions():
            steps += ["open_other_namespace"]
        if self.submitters():
            steps += ["store_keys"] * 12 + ["load_keys"] * 9
        if self.transfers():
            steps += ["end_drawn_transfer"] * 8
        if self.unmapped():
            steps += ["map_drawn_registration"] * 2
        if self.closing():
            steps += ["unmap_drawn_registration"] * 3
        if self.namespaces:
            steps += ["disconnect_all_sessions"] * 2
        if self.in_namespaces():
            steps += ["pin_keys"] * 3 + ["unpin_keys"] * 3 + ["touch_keys"]
            steps += ["retain_keys"] * 3 + ["release_keys"] * 2 + ["wait"]
            steps += ["reset_drawn_namespace"] * 3 + ["subscribe_session"] * 2
        if self.ready_to_register():
            steps += ["register_session"] * 3
        if self.unread():
            steps += ["read_part"] * 3
        return steps

    # Sessions and registrations

    def idle_sessions(self) -> list[str]:
        return [session for session in self.sessions if session not in self.waiting]

    def ready_to_register(self) -> list[str]:
        return [session for session in self.idle_sessions() if self.namespace_of(session)]

    def connect_session(self) -> None:
        session = self.connect(self.draw_from("abc"))
        self.open_drawn_namespace(session)

    def open_other_namespace(self) -> None:
        self.open_drawn_namespace(self.draw_from(self.idle_sessions()))

    def open_drawn_namespace(self, session: str) -> None:
        policy, quota = self.draw_from(POLICIES), self.draw_from([REGION, REGION, None])
        self.open_namespace(session, self.draw_from(LAYOUTS), policy, quota)

    def disconnect_session(self) -> None:
        self.disconnect(self.draw_from(self.sessions))

    def disconnect_all_sessions(self) -> None:
        """Disconnect all sessions of a namespace and unmap their tensors. A successor registers."""
        namespace = self.namespaces[self.draw_from(self.namespaces)]
        for session in self.draw(st.permutations(list(namespace.sessions))):
            self.disconnect(session)
            for registration in self.closing():
                self.unmap_tensors(registration, self.draw_from(OUTCOMES))
        if len(self.sessions) < MAX_SESSIONS:
            successor = self.connect("successor")
            policy, quota = self.draw_from(POLICIES), self.draw_from([REGION, None])
            self.open_namespace(successor, namespace.fingerprint, policy, quota)
            if self.namespace_of(successor):
                self.register(successor, self.draw_from([PLAIN, HYBRID, SHORT]))

    def toggle_newcomer(self) -> None:
        if self.newcomer is None:
            self.connect_newcomer()
        else:
            self.disconnect_newcomer()

    def register_session(self) -> None:
        """Prefers engines without a registration, and layouts that are accepted."""
        sessions, registrations = self.ready_to_register(), self.registrations()
        new = [s for s in sessions if self.sessions[s] not in registrations]
        session = self.draw_from(new or sessions)
        namespace = self.namespace_of(session)
        assert namespace is not None
        layouts = FITTING[LAYOUTS[namespace.fingerprint]]
        if namespace.layout_is_fixed and namespace.layout:
            layouts = [namespace.layout, namespace.layout, PLAIN, HYBRID, SHORT]
        self.register(session, self.draw_from(layouts))
        if self.draw_from([True, False]) and self.unmapped():
            self.map_tensors(self.unmapped()[-1])

    def unmapped(self) -> list[Any]:
        return [r for r in self.registrations().values() if not r.mapped]

    def map_drawn_registration(self) -> None:
        self.map_tensors(self.draw_from(self.unmapped()), self.draw_from([True, True, False]))

    def unmap_drawn_registration(self) -> None:
        self.unmap_tensors(self.draw_from(self.closing()), self.draw_from(OUTCOMES))

    # Transfers

    def submitters(self) -> list[str]:
        usable = {engine for engine, r in self.registrations().items() if r.usable}
        return [session for session, engine in self.sessions.items() if engine in usable]

    def store_keys(self) -> None:
        self.store_drawn_keys(
            self.draw_from(self.submitters()), self.draw_from([None, None, Outcome.DONE])
        )

    def store_drawn_keys(self, session: str, outcome: Outcome | None) -> None:
        registration = self.registrations()[self.sessions[session]]
        namespace = registration.namespace
        in_part = namespace.ready.keys() - namespace.hits()
        partial = [[key for key in letters if key in in_part] for letters in LETTERS]
        keys = self.draw_from([LETTERS, LETTERS, partial])
        request = self.draw(key_requests(registration.layout, keys))
        keep = tuple(self.draw(st.lists(st.sampled_from([b"a", b"b", b"u"]), max_size=2)))
        epoch = self.draw_from([None, namespace.epoch, namespace.epoch, namespace.epoch - 1])
        transfer = self.store(session, request, keep, epoch)
        if transfer and outcome:
            self.end_transfer(transfer, outcome)

    def load_keys(self) -> None:
        session = self.draw_from(self.submitters())
        registration = self.registrations()[self.sessions[session]]
        ready = registration.namespace.ready
        present = [[key for key in letters if key in ready] for letters in LETTERS]
        keys = self.draw_from([present, present, LETTERS])
        self.load(session, self.draw(key_requests(registration.layout, keys)))

    def end_drawn_transfer(self) -> None:
        self.end_transfer(self.draw_from(self.transfers()), self.draw_from(OUTCOMES))

    # Keys

    def session_and_namespace(self) -> tuple[str, NamespaceModel]:
        session = self.draw_from(self.in_namespaces())
        namespace = self.namespace_of(session)
        assert namespace is not None
        return session, namespace

    def draw_keys(self, namespace: NamespaceModel) -> tuple[bytes, ...]:
        """Draw keys, mostly ready ones."""
        ready = [st.sampled_from(sorted(namespace.ready))] if namespace.ready else []
        letters = st.sampled_from([bytes([letter]) for letter in b"abcuvw"])
        return tuple(self.draw(st.lists(st.one_of(*ready, *ready, letters), max_size=4)))

    def pin_keys(self) -> None:
        session, namespace = self.session_and_namespace()
        self.pin(session, self.draw_keys(namespace))

    def unpin_keys(self) -> None:
        session, namespace = self.session_and_namespace()
        pinned = [key for key, pins in namespace.pins[session].items() for _ in pins]
        count = self.draw(st.integers(0, 4))
        self.unpin(session, self.draw(st.permutations(pinned))[:count])

    def touch_keys(self) -> None:
        session, namespace = self.session_and_namespace()
        assert self.send(session, wire.Touch(self.draw_keys(namespace))) == []

    def retain_keys(self) -> None:
        session, namespace = self.session_and_namespace()
        seconds, label = self.draw_from([0.5, 3.0, 20.0]), self.draw_from(["", "x", "y"])
        self.retain(session, self.draw_keys(namespace), seconds, label)

    def release_keys(self) -> None:
        """Also those that are retained: they become spare."""
        session, namespace = self.session_and_namespace()
        self.release(session, self.draw_keys(namespace), self.draw_from(["", "x", "y"]))

    def wait(self) -> None:
        self.pass_time(self.draw_from([LOOK_EVERY, 3.0, 30.0]))

    def reset_drawn_namespace(self) -> None:
        """Prefers namespaces with transfers in flight."""
        namespaces = self.namespaces.values()
        likely = [session for n in namespaces if n.transfers for session in n.sessions]
        self.reset(self.draw_from(likely or self.in_namespaces()))

    def subscribe_session(self) -> None:
        mirror = self.subscribe(self.draw_from(self.in_namespaces()))
        if self.draw_from([True, False]):
            self.read_all(mirror)

    def unread(self) -> list[MirrorModel]:
        """Mirrors with an incomplete snapshot."""
        return [mirror for mirror in self.mirrors() if mirror.snapshot is not None]

    def read_part(self) -> None:
        self.unread()[self.draw(st.integers(0, len(self.unread()) - 1))].read_part()

    def read_all(self, mirror: MirrorModel) -> None:
        while mirror.snapshot is not None:
            mirror.read_part()

    # Invariants

    @invariant()
    def caches_agree_with_the_model(self) -> None:
        for namespace in self.namespaces.values():
            cache = self.cache(namespace)
            cache.check_integrity()
            usage = cache.usage
            assert usage.free + usage.pending + usage.ready + usage.orphaned == namespace.capacity
            assert (usage.free, usage.orphaned) == (namespace.free, len(namespace.orphaned))
            assert usage.pinned == len(namespace.pinned)
            retained = self.core._namespaces._by_name[namespace.name].retained
            assert len(retained.blocks()) == len(
                namespace.retained_by(*namespace.sessions.values())
            )
            size, start = namespace.fingerprint.host_block_bytes, namespace.start
            ready = {key: (b.offset - start) // size for key, b in namespace.ready.items()}
            assert dict(entries_of(cache)) == ready
            assert set(pending_keys(cache)) == set(namespace.pending)
            assert set(ready_keys(cache)) == namespace.hits()

    @invariant()
    def a_restarted_daemon_has_exactly_the_ready_keys(self) -> None:
        restarted = new_core("next")
        for found in self.records.found():
            restarted.restore_region(found)
        restored = {namespace.name: namespace for namespace in restarted._namespaces}
        assert restored.keys() == self.namespaces.keys()
        for name, namespace in self.namespaces.items():
            old, new = self.core._namespaces._by_name[name], restored[name]
            new.cache.check_integrity()
            entries = dict(entries_of(new.cache))
            assert entries == dict(entries_of(old.cache))
            assert new.record == old.record
            for key in entries:
                assert new.cache.stored_part(key) == old.cache.stored_part(key)
            assert new.take_key_events() is None
            assert ready_keys(new.cache) == []
            assert set(pending_keys(new.cache)) == namespace.hits()
            blocks = np.array(list(entries.values()), dtype=np.int64)
            restarted.report(BlocksVerified(new.region.owner, blocks))
            assert set(ready_keys(new.cache)) == namespace.hits()
        old_regions, new_regions = (
            {region.owner: (region.start, region.nbytes) for region in core._regions}
            for core in (self.core, restarted)
        )
        assert new_regions == old_regions

    @invariant()
    def mirrors_have_the_hits_and_the_pending_keys(self) -> None:
        for namespace in self.namespaces.values():
            for mirror in (namespace.published, *namespace.subscribers.values()):
                if mirror.snapshot is None:
                    assert mirror.ready == namespace.hits()
                    assert mirror.pending == set(namespace.pending)

    @invariant()
    def ready_keys_have_their_stored_bytes(self) -> None:
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
    def no_two_stores_write_one_byte(self) -> None:
        written = [
            cell
            for transfer in self.transfers()
            if transfer.direction is Direction.STORE
            for offset, nbytes, _ in transfer.cells
            for cell in range(offset, offset + nbytes, CELL)
        ]
        assert len(set(written)) == len(written)

    def teardown(self) -> None:
        """After the last session disconnects, no block is held, and all ready keys load."""
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
            session = self.connect("successor")
            layout = namespace.layout or LAYOUTS[namespace.fingerprint]
            self.open_namespace(session, namespace.fingerprint, "lru", None)
            self.register(session, layout)
            (registration,) = namespace.registrations
            self.map_tensors(registration)
            for key, block in namespace.ready.items():
                self.load(session, request_of_key(layout, key, block.subs))
            assert len(namespace.transfers) == len(namespace.ready)
            self.disconnect(session)
            self.unmap_tensors(registration, Outcome.DONE)


def test_keys_load_their_stored_bytes() -> None:
    run_state_machine_as_test(
        NamespacesMachine,
        settings=settings(max_examples=75, stateful_step_count=50),
    )
