"""Hosts that share a model of a store: epochs, with faults between operations, and objects."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest

from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.mooncake.epochs import OBJECT_BYTES, marker
from kvferry.daemon.tiers.mooncake.store_client import NO_SPACE, TRANSFER_FAILED
from support.mooncake_hosts import KEY, NAME, POINTER, ModelHost, check_agreement, pointer_of
from support.object_store_model import ObjectStoreModel
from support.time_limits import TIMEOUT

OTHER = "b" * 16


@pytest.fixture
def model() -> ObjectStoreModel:
    return ObjectStoreModel()


def put_old_pointer(model: ObjectStoreModel, text: str = "7") -> None:
    """As an earlier build has it."""
    model.objects[marker(NAME, 7)] = model.objects[POINTER] = text.encode().ljust(OBJECT_BYTES)


def settle_in_turns(hosts: Sequence[ModelHost], first: int, switches: Collection[int]) -> int:
    """Let two hosts settle at once. They change at the operations with these numbers, and when one
    has ended. Returns the number of operations."""
    turns, ended, operations = [threading.Semaphore(0) for _ in hosts], [False, False], 0

    def change_from(own: int) -> None:
        turns[1 - own].release()
        assert turns[own].acquire(timeout=TIMEOUT)

    def settle(own: int) -> None:
        def before() -> None:
            nonlocal operations
            operations += 1
            if operations in switches and not ended[1 - own]:
                change_from(own)

        assert turns[own].acquire(timeout=TIMEOUT)
        hosts[own].client.before = before
        hosts[own].settle()
        hosts[own].client.before = lambda: None
        ended[own] = True
        turns[1 - own].release()

    with ThreadPoolExecutor(2) as threads:
        turns[first].release()
        list(threads.map(settle, range(2)))
    return operations


@pytest.mark.parametrize(
    ("pointer", "epochs"),
    [
        ("none", (0, 0)),
        ("none", (0, 32)),
        ("valid", (0, 32)),
        ("valid", (16, 33)),
        ("no marker", (0, 0)),
    ],
)
def test_hosts_that_settle_at_once_agree(pointer: str, epochs: tuple[int, int]) -> None:
    """With up to three changes from one host to the other, between any two of their operations."""

    def check(first: int, switches: Collection[int]) -> int:
        model = ObjectStoreModel()
        if pointer != "none":
            put_old_pointer(model)
        if pointer == "no marker":
            del model.objects[marker(NAME, 7)]
        hosts = [ModelHost(model, number, epoch) for number, epoch in enumerate(epochs)]
        operations = settle_in_turns(hosts, first, switches)
        used = {host.epoch for host in hosts if host.put() is Result.OK}
        if pointer == "none":  # the first pointer is used by both
            assert pointer_of(model)[0] == max(used)
        if pointer == "none" and len(set(epochs)) == 1:
            assert hosts[0].put(b"of 0") is Result.OK
            assert hosts[1].find(b"of 0") == epochs[0]
        check_agreement(model, hosts)
        return operations

    for first in range(2):
        operations = check(first, ())
        for count in range(1, 4):
            for switches in combinations(range(1, operations + 1), count):
                check(first, switches)


def test_a_host_that_was_away_during_resets_adopts_the_last(model: ObjectStoreModel) -> None:
    here, there = ModelHost(model), ModelHost(model, 1)
    check_agreement(model, [here, there])
    there.client.is_cut_off = True
    here.put()
    for _ in range(3):
        here.reset()
        assert here.settle() == here.epoch
        here.put()
    there.client.is_cut_off = False
    assert there.find() is None  # the marker is gone
    assert there.put() is Result.FULL
    assert there.settle() == here.epoch
    assert there.find() == here.epoch


@pytest.mark.parametrize("what", ["marker", "pointer", "both", "store", "damaged pointer"])
def test_what_the_store_loses_begins_another_incarnation(
    model: ObjectStoreModel, what: str
) -> None:
    hosts = [ModelHost(model), ModelHost(model, 1)]
    hosts[0].reset()
    check_agreement(model, hosts)
    hosts[0].put()
    epoch, incarnation = pointer_of(model)
    lost = {"marker": marker(NAME, incarnation), "pointer": POINTER}
    for each, name in lost.items():
        if what in (each, "both"):
            del model.objects[name]
    if what == "store":
        model.objects.clear()
    elif what == "damaged pointer":
        model.objects[POINTER] = b"1 2 3"
    for host in hosts:
        assert host.settle() == epoch
        assert host.find() is None
    assert pointer_of(model)[1] != incarnation
    check_agreement(model, hosts)
    assert hosts[0].epoch == epoch


def test_a_smaller_epoch_is_not_published_over_a_larger_one(model: ObjectStoreModel) -> None:
    model.objects[POINTER] = b"32 9".ljust(OBJECT_BYTES)  # also without its marker
    host = ModelHost(model, epoch=16)
    assert host.settle() == 32
    assert pointer_of(model) == (32, 9)
    assert host.settle() == 32
    assert pointer_of(model)[0] == 32 != pointer_of(model)[1]


def test_an_old_pointer_is_of_epoch_0_and_keeps_its_blocks(model: ObjectStoreModel) -> None:
    put_old_pointer(model)
    host = ModelHost(model)
    assert host.put() is Result.FULL  # not settled
    assert (host.settle(), host.put()) == (0, Result.OK)
    assert f"kvferry/{NAME}-c/7/{KEY.hex()}" in model.objects
    assert model.pointers_put == 0


@pytest.mark.parametrize("text", ["", "0", "0 0", "-1 5", "5 x", "1 2 3", str(1 << 62), "²"])
def test_a_damaged_pointer_is_replaced(model: ObjectStoreModel, text: str) -> None:
    put_old_pointer(model, text)
    assert ModelHost(model).settle() == 0
    assert pointer_of(model)[0] == 0


def test_the_host_that_publishes_removes_old_blocks(model: ObjectStoreModel) -> None:
    here, there = ModelHost(model), ModelHost(model, 1)
    check_agreement(model, [here, there])
    foreign = {f"kvferry/{OTHER}-c/7/00", f"kvferry/{NAME}2-c/7/00", "other"}
    model.objects |= dict.fromkeys(foreign, b"x")
    model.objects[marker(NAME, 8)] = b"left by a host that was killed"
    here.reset()
    for host in (here, there, there):
        host.settle()
    there.put()
    there.tier.maintain()
    assert marker(NAME, 8) in model.objects
    here.tier.maintain()
    epoch, incarnation = pointer_of(model)
    own = {POINTER, marker(NAME, incarnation), f"kvferry/{NAME}-c/{incarnation}/{KEY.hex()}"}
    assert set(model.objects) == foreign | own
    assert there.find() == epoch


def test_blocks_of_another_publication_are_not_removed(model: ObjectStoreModel) -> None:
    here, there = ModelHost(model), ModelHost(model, 1)
    check_agreement(model, [here, there])
    for host in (here, there):
        host.reset(above=host.number * 1000)
        host.settle()
    there.put()
    here.tier.maintain()
    assert there.find() == there.epoch


@pytest.mark.parametrize("refusal", [NO_SPACE, TRANSFER_FAILED])
def test_while_no_epoch_can_be_put_nothing_is_in_use(model: ObjectStoreModel, refusal: int) -> None:
    host = ModelHost(model)
    host.settle()
    host.put()
    model.objects.clear()
    model.refusal = refusal
    assert (host.settle(), host.put(), host.find()) == (-1, Result.FULL, None)
    model.refusal = 0
    assert host.settle() == 0


def test_a_pointer_that_cannot_be_read_changes_nothing(
    model: ObjectStoreModel, capsys: pytest.CaptureFixture[str]
) -> None:
    host, names = ModelHost(model), {f"{number:016x}": 0 for number in range(150)}
    assert host.tier.settle({NAME: 0, **names}) == {NAME: 0, **names}
    host.put()
    put = model.pointers_put
    model.unreadable = {POINTER}
    for _ in range(2):
        assert host.tier.settle({NAME: 0, **names}) == names
    assert host.find() == 0
    model.unreadable.clear()
    assert (host.settle(), host.find(), model.pointers_put) == (0, 0, put)
    assert capsys.readouterr().out.count(f"the epoch of {NAME} cannot be read") == 1


def test_a_namespace_that_is_not_in_use_is_forgotten(model: ObjectStoreModel) -> None:
    host = ModelHost(model)
    host.settle()
    assert host.put() is Result.OK
    host.tier.settle({OTHER: 0})
    assert (host.find(), host.put()) == (None, Result.FULL)
    host.settle()
    assert host.find() == 0


@pytest.mark.parametrize("wrong", ["short", "long", "other block", "no trailer"])
def test_an_object_with_other_contents_is_a_miss_and_can_be_put_again(
    model: ObjectStoreModel, wrong: str
) -> None:
    host = ModelHost(model)
    host.settle()
    for key in (KEY, b"l"):
        assert host.put(key) is Result.OK
    name, other = (
        next(each for each in model.objects if each.endswith(f"/{key}")) for key in ("6b", "6c")
    )
    good = model.objects[name]
    model.objects[name] = {
        "short": good[:-1],
        "long": good + b"x",
        "other block": model.objects[other],
        "no trailer": good[:8] + bytes(len(good) - 8),
    }[wrong]
    assert host.find() is None
    assert name not in model.objects
    assert (host.put(), host.find(), host.find(b"l")) == (Result.OK, 0, 0)
