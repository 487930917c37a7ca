"""The events of an OffloadingManager: keys that become hits, and keys that are hits no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.proto.keys import EventKind

if TYPE_CHECKING:
    from client.conftest import FakeDaemon
from support.client_keys import (
    A,
    B,
    C,
    D,
    open_manager,
    removed,
    stored,
)


def test_events_name_new_hits_and_removed_hits(fake_daemon: FakeDaemon) -> None:
    fake_daemon.store(A)
    fake_daemon.reserve(B)
    manager = open_manager(fake_daemon, events=True)
    assert manager.take_events() == [stored(A)]
    assert manager.take_events() == []
    fake_daemon.store(B, C)
    fake_daemon.evict(A)
    assert manager.take_events() == [removed(A), stored(B, C)]
    fake_daemon.evict(B)
    fake_daemon.store(B)
    fake_daemon.send_events((EventKind.ABANDONED, D))
    assert manager.take_events() == []
    fake_daemon.store(A)
    assert manager.take_events() == [stored(A)]


def test_events_of_a_reset_are_returned_once(fake_daemon: FakeDaemon) -> None:
    fake_daemon.store(A)
    manager = open_manager(fake_daemon, events=True)
    manager.take_events()
    fake_daemon.slow = True
    manager.reset_cache()
    assert manager.take_events() == [removed(A)]
    fake_daemon.finish_resets()
    fake_daemon.store(C)
    assert manager.take_events() == [stored(C)]


def test_missed_events_arrive_with_the_next_snapshot(fake_daemon: FakeDaemon) -> None:
    fake_daemon.store(A)
    manager = open_manager(fake_daemon, events=True)
    manager.take_events()
    fake_daemon.lossy = True
    fake_daemon.store(B)
    fake_daemon.evict(A)
    fake_daemon.lossy = False
    fake_daemon.store(C)
    manager.lookup(C)
    removal, addition = manager.take_events()
    assert (removal, set(addition.keys)) == (removed(A), {B, C})


def test_without_events_none_are_kept(fake_daemon: FakeDaemon) -> None:
    manager = open_manager(fake_daemon)
    fake_daemon.store(C)
    assert manager.take_events() == []
