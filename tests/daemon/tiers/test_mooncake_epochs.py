"""Epochs of hosts that share a model of a store, with faults between any two of its operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.mooncake.epochs import OBJECT_BYTES, marker
from kvferry.daemon.tiers.mooncake.store_client import NO_SPACE, TRANSFER_FAILED
from support.mooncake_hosts import KEY, NAME, POINTER, ModelHost, check_agreement, pointer_of
from support.object_store_model import ObjectStoreModel

OTHER = "b" * 16


@pytest.fixture
def model() -> ObjectStoreModel:
    return ObjectStoreModel()


def put_old_pointer(model: ObjectStoreModel, text: str = "7") -> None:
    """As an earlier build has it."""
    model.objects[marker(NAME, 7)] = model.objects[POINTER] = text.encode().ljust(OBJECT_BYTES)


def run_in_turns(hosts: Sequence[ModelHost], schedule: Sequence[int]) -> list[tuple[int, int]]:
    """Let hosts settle at once, each up to its next operation at a time. schedule: which one is
    next among those that have not ended; then the first. Returns the choices, and among how many.
    """
    stopped, resumed = threading.Semaphore(0), [threading.Semaphore(0) for _ in hosts]
    running = list(range(len(hosts)))

    def run(number: int) -> None:
        def wait() -> None:
            stopped.release()
            resumed[number].acquire()

        hosts[number].client.before = wait
        hosts[number].settle()
        hosts[number].client.before = lambda: None
        running.remove(number)
        stopped.release()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in running]
    for thread in threads:
        thread.start()
        assert stopped.acquire(timeout=60)
    choices = list[tuple[int, int]]()
    while running:
        choice = schedule[len(choices)] if len(choices) < len(schedule) else 0
        choices.append((choice, len(running)))
        resumed[running[choice]].release()
        assert stopped.acquire(timeout=60)
    for thread in threads:
        thread.join()
    return choices


def interleavings(begin: Callable[[], Sequence[ModelHost]]) -> Iterator[Sequence[ModelHost]]:
    """The hosts that `begin` returns, after each order of the operations of their settles."""
    schedule: list[int] | None = []
    while schedule is not None:
        hosts = begin()
        choices = run_in_turns(hosts, schedule)
        yield hosts
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        schedule = [choice for choice, _ in choices] if choices else None
        if schedule:
            schedule[-1] += 1


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
    models = [ObjectStoreModel()]

    def begin() -> Sequence[ModelHost]:
        models[:] = [ObjectStoreModel()]
        if pointer != "none":
            put_old_pointer(models[0])
        if pointer == "no marker":
            del models[0].objects[marker(NAME, 7)]
        return [ModelHost(models[0], place, each) for place, each in enumerate(epochs)]

    orders = 0
    for hosts in interleavings(begin):
        orders += 1
        used = {host.epoch for host in hosts if host.put() is Result.OK}
        if pointer == "none":  # the first pointer is used by both
            assert pointer_of(models[0])[0] == max(used)
        if pointer == "none" and len(set(epochs)) == 1:
            assert hosts[0].put(b"of 0") is Result.OK
            assert hosts[1].find(b"of 0") == epochs[0]
        check_agreement(models[0], hosts)
    assert orders > 5


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


def test_a_reset_while_the_store_is_not_reached_is_published_later(model: ObjectStoreModel) -> None:
    here, there = ModelHost(model), ModelHost(model, 1)
    check_agreement(model, [here, there])
    here.put()
    here.client.is_cut_off = True
    here.reset()
    assert here.settle() == -1
    assert (here.find(), here.put()) == (None, Result.FULL)
    assert there.find() == 0
    here.client.is_cut_off = False
    assert here.find() is None
    assert here.settle() == here.epoch
    assert (here.find(), there.find()) == (None, None)
    check_agreement(model, [here, there])


def test_a_reset_that_is_not_published_is_later_than_any_epoch_of_the_store(
    model: ObjectStoreModel,
) -> None:
    here, there = ModelHost(model), ModelHost(model, 1)
    here.reset()
    there.reset(above=1000)
    assert there.settle() == there.epoch > here.epoch
    assert here.settle() == there.epoch < here.epoch
    check_agreement(model, [here, there])
    assert pointer_of(model)[0] == here.epoch


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
