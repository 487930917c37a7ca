"""Epochs of three hosts on a model of the store, with faults between any two of its operations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.mooncake.epochs import NO_EPOCH, OBJECT_BYTES, Epochs, marker
from kvferry.daemon.tiers.mooncake.store_client import (
    NO_SPACE,
    NOT_FOUND,
    TRANSFER_FAILED,
    StoreClient,
    StoreError,
)

NAME, OTHER = "a" * 16, "b" * 16
HOSTS = range(3)


class ObjectStoreModel:
    """The objects of a store. refusal: the code of each put. unreadable: these objects cannot be
    read."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refusal = 0
        self.unreadable: set[str] = set()


class ModelClient:
    """A host's client. before: called before each operation on an object."""

    def __init__(self, model: ObjectStoreModel) -> None:
        self.model = model
        self.before: Callable[[], None] = lambda: None

    def register(self, address: int, nbytes: int) -> None:
        pass

    def exist(self, names: Sequence[str]) -> list[bool]:
        found = list[bool]()
        for name in names:
            self.before()
            found.append(name in self.model.objects)
        return found

    def put_pinned(self, name: str, address: int, nbytes: int) -> int:
        self.before()
        if not self.model.refusal:
            self.model.objects.setdefault(name, bytes(view_memory(address, nbytes)))
        return self.model.refusal

    def get(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        codes = list[int]()
        for name, (address,) in zip(names, addresses, strict=True):
            self.before()
            if name in self.model.unreadable:
                codes.append(TRANSFER_FAILED)
            elif name in self.model.objects:
                view_memory(address, OBJECT_BYTES)[:] = self.model.objects[name]
                codes.append(OBJECT_BYTES)
            else:
                codes.append(NOT_FOUND)
        return codes

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.before()
            self.model.objects.pop(name, None)


class EpochHosts:
    """Hosts that look up, refresh and drop one namespace, each in the middle of what others do."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.model = ObjectStoreModel()
        self.clients = [ModelClient(self.model) for _ in HOSTS]
        self.hosts = [Epochs(cast(StoreClient, client)) for client in self.clients]
        self.busy = set[int]()
        # Epochs that any host has had.
        self.seen = set[int]()

    def look_up(self, host: int) -> int:
        """The epoch in which a lookup finds keys."""
        epochs = self.hosts[host]
        for _ in range(8):
            epoch = epochs.known(NAME)
            self.seen.add(epoch)
            if epoch == NO_EPOCH:
                return NO_EPOCH
            (present,) = self.clients[host].exist([marker(NAME, epoch)])
            if epochs.update(NAME, epoch, present):
                return epoch
        return NO_EPOCH

    def refresh(self, host: int) -> int:
        self.hosts[host].last_known(NAME)
        self.hosts[host].refresh()
        return self.hosts[host].last_known(NAME)

    def step(self, host: int) -> None:
        """Let one host do something, and the other ones in the middle of it."""
        self.busy.add(host)
        self.clients[host].before = self.interrupt
        choice = self.rng.random()
        try:
            if choice < 0.35:
                self.seen.add(self.refresh(host))
            elif choice < 0.7:
                self.look_up(host)
            elif choice < 0.85:
                self.drop(host)
            else:
                self.fail()
        except StoreError:
            pass
        finally:
            self.clients[host].before = lambda: None
            self.busy.remove(host)

    def interrupt(self) -> None:
        host = self.rng.choice(HOSTS)
        if self.rng.random() < 0.2 and host not in self.busy:
            self.step(host)

    def drop(self, host: int) -> None:
        ended = self.seen - {NO_EPOCH}
        self.hosts[host].begin_epoch(NAME)
        for other in HOSTS:
            if other not in self.busy:
                self.model.refusal = 0
                assert self.refresh(other) not in ended

    def fail(self) -> None:
        """Lose objects, or refuse puts."""
        objects = self.model.objects
        kind = self.rng.choice(("master", "store", "puts"))
        if kind == "master":
            objects.clear()
        elif kind == "store" and objects:
            del objects[self.rng.choice(sorted(objects))]
        elif kind == "puts":
            self.model.refusal = self.rng.choice((0, NO_SPACE, TRANSFER_FAILED))


@pytest.mark.parametrize("seed", range(300))
def test_hosts_agree_and_no_epoch_outlives_a_drop(seed: int) -> None:
    case = EpochHosts(seed)
    for _ in range(60):
        case.step(case.rng.choice(HOSTS))
    case.model.refusal = 0
    for host in (*HOSTS, *HOSTS):
        case.refresh(host)
    (epoch,) = {case.look_up(host) for host in HOSTS}
    assert epoch > NO_EPOCH
    new = case.hosts[0].begin_epoch(NAME)
    assert new not in case.seen
    assert {case.look_up(host) for host in HOSTS} == {new}


@pytest.mark.parametrize("what", ["marker", "pointer", "both"])
def test_a_lost_object_ends_the_epoch_on_all_hosts(what: str) -> None:
    case = EpochHosts()
    (epoch,) = {case.look_up(host) for host in HOSTS}
    lost = {"marker": marker(NAME, epoch), "pointer": f"kvferry/{NAME}/epoch"}
    for each, name in lost.items():
        if what in (each, "both"):
            del case.model.objects[name]
    (new,) = {case.refresh(host) for host in HOSTS}
    assert new not in (NO_EPOCH, epoch)


@pytest.mark.parametrize("refusal", [NO_SPACE, TRANSFER_FAILED])
def test_while_no_epoch_can_be_put_none_is_valid(refusal: int) -> None:
    case = EpochHosts()
    epoch = case.look_up(0)
    case.model.objects.clear()
    case.model.refusal = refusal
    assert case.refresh(0) == NO_EPOCH
    assert case.look_up(0) == NO_EPOCH
    case.model.refusal = 0
    assert case.refresh(0) not in (NO_EPOCH, epoch)


def test_a_pointer_that_cannot_be_read_changes_nothing_for_other_namespaces() -> None:
    case = EpochHosts()
    epochs, epoch = case.hosts[0], case.look_up(0)
    other = epochs.known(OTHER)
    case.model.unreadable = {f"kvferry/{NAME}/epoch"}
    case.hosts[1].begin_epoch(OTHER)
    epochs.refresh()
    assert epochs.last_known(NAME) == epoch
    assert epochs.last_known(OTHER) not in (NO_EPOCH, other)
    with pytest.raises(StoreError, match="epoch cannot be read"):
        case.hosts[1].known(NAME)
