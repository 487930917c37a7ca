"""Loads of batches. No SGLang needed."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.client.sglang.loads import MIN_SECTIONED, LoadedLayers, Loads
from kvferry.client.sglang.transfers import RankTransfers
from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KeyLoadStoreSpec
from support.client_keys import A, B, C
from support.sglang_stand_ins import NamedSource, RecordingSession, pages, result

SOURCE = NamedSource("kv", 4, range(1))
WHOLE = LoadedLayers(1, MIN_SECTIONED)
# Two keys have sections, and one key has none.
LAYERED = LoadedLayers(1, MIN_SECTIONED // 2, layers=5, sections=3)


class Batches:
    """The loads of a rank, over a session whose results the test sets."""

    def __init__(self, timeout: float = 60.0, loaded: LoadedLayers = WHOLE) -> None:
        self.session = RecordingSession()
        session: Any = self.session
        transfers = RankTransfers(session, "forward stream")
        self.loads = Loads(session, transfers, loaded, timeout)

    def queue(self, rid: str, *keys: OffloadKey, first: int = 1) -> None:
        blocks = range(first, first + len(keys))
        self.loads.queue(rid, [pages(SOURCE, [(key,) for key in keys], blocks)])

    def jobs(self) -> list[tuple[int, tuple[OffloadKey, ...], list[int]]]:
        found = []
        for job_id, (spec, direction, stream) in self.session.submitted.items():
            source, destination = spec
            assert isinstance(source, KeyLoadStoreSpec)
            assert isinstance(destination, GPULoadStoreSpec)
            assert (direction, stream) == (Direction.LOAD, "forward stream")
            found.append((job_id, source.keys, destination.block_ids.tolist()))
        return found


@pytest.fixture
def batches() -> Batches:
    return Batches()


def test_a_batch_starts_together_and_ends_when_all_have(batches: Batches) -> None:
    batches.queue("one", A, B)
    batches.queue("two", C, first=5)
    assert batches.session.submitted == {}
    number = batches.loads.start()
    assert batches.jobs() == [(1, (A, B), [1, 2]), (2, (C,), [5])]
    batches.session.on_poll = [[], [result(2)], [], [result(1)]]
    assert batches.loads.finish(number) == (True, ("one", "two"))
    assert batches.session.on_poll == []
    assert batches.loads.finish(number) == (True, ())


def test_nothing_queued_is_no_batch(batches: Batches) -> None:
    assert batches.loads.start() == -1
    assert batches.loads.finish(-1) == (True, ())
    batches.queue("one", A)
    assert batches.loads.start() == 0
    assert batches.loads.start() == -1


def test_if_one_load_fails_the_batch_waits_for_all_and_fails(batches: Batches) -> None:
    batches.queue("one", A)
    batches.queue("two", B)
    number = batches.loads.start()
    batches.session.on_poll = [[result(1, success=False)], [], [result(2)]]
    assert batches.loads.finish(number) == (False, ("one", "two"))
    assert batches.session.on_poll == []


def test_a_load_of_slots_that_are_no_pages_fails(
    batches: Batches, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = pages(SOURCE, [(A,)], [1])
    wrong.indices.add_(1)
    batches.loads.queue("one", [wrong])
    batches.queue("two", B)
    number = batches.loads.start()
    assert "a load fails" in caplog.text
    batches.session.on_poll = [[result(1)]]
    assert batches.loads.finish(number) == (False, ("one", "two"))
    batches.session.refused = True  # a load cannot be submitted
    batches.queue("three", A)
    assert batches.loads.finish(batches.loads.start()) == (False, ("three",))


def test_a_queued_load_is_cancelled_and_a_started_one_is_not(batches: Batches) -> None:
    batches.queue("one", A)
    batches.queue("two", B)
    assert batches.loads.cancel("one")
    assert not batches.loads.cancel("one")
    number = batches.loads.start()
    assert not batches.loads.cancel("two")
    assert batches.jobs() == [(1, (B,), [1])]
    batches.session.end(result(1))
    assert batches.loads.finish(number) == (True, ("two",))


def test_a_load_that_is_queued_again_is_started_once(batches: Batches) -> None:
    batches.queue("one", A)
    batches.queue("one", A, B, first=7)
    batches.loads.start()
    assert batches.jobs() == [(1, (A, B), [7, 8])]


def test_layers_wait_for_the_batch_that_is_computed(batches: Batches) -> None:
    batches.queue("one", A)
    first = batches.loads.start()
    batches.queue("two", B)
    second = batches.loads.start()
    assert batches.loads.consumer_index == -1
    batches.loads.wait_until(0)  # nothing is computed that loads
    batches.loads.set_consumer(second)
    batches.session.on_poll = [[], [result(2, success=False)]]
    batches.loads.wait_until(0)
    batches.loads.wait_until(1)
    assert batches.session.on_poll == []
    assert batches.loads.finish(second) == (False, ("two",))  # reported once it is finished
    batches.loads.wait_until(2)  # it is no longer known
    batches.session.on_poll = [[result(1)]]
    assert batches.loads.finish(first) == (True, ("one",))


def test_each_layer_of_a_large_load_waits_for_its_section() -> None:
    batches = Batches(loaded=LAYERED)
    batches.queue("large", A, B)
    batches.queue("small", C)
    number = batches.loads.start()
    submitted: list[Any] = [spec for spec, *_ in batches.session.submitted.values()]
    sections = [(len(keys.keys), gpu.section) for keys, gpu in submitted]
    assert sections == [(1, None), (2, 0), (2, 1), (2, 2)]
    assert [LAYERED.section_of(layer) for layer in range(5)] == [0, 1, 1, 2, 2]
    assert batches.loads.num_layers == 5
    batches.loads.set_consumer(number)
    batches.session.on_poll = [[result(1)], [result(2)]]
    batches.loads.wait_until(0)  # for the load without sections, too
    assert batches.session.on_poll == []
    batches.session.on_poll = [[result(4)], [result(3, success=False)]]
    batches.loads.wait_until(2)
    assert batches.session.on_poll == []
    batches.loads.wait_until(4)
    assert batches.loads.finish(number) == (False, ("large", "small"))


def test_the_first_layers_of_all_requests_are_loaded_first() -> None:
    batches = Batches(loaded=LAYERED)
    batches.queue("one", A, B)
    batches.queue("two", C, A)
    batches.loads.start()
    submitted: list[Any] = [spec for spec, *_ in batches.session.submitted.values()]
    loaded = [(keys.keys, gpu.section) for keys, gpu in submitted]
    assert loaded == [(keys, section) for section in range(3) for keys in ((A, B), (C, A))]


def test_a_result_that_arrives_while_another_batch_waits_is_kept(batches: Batches) -> None:
    batches.queue("one", A)
    first = batches.loads.start()
    batches.queue("two", B)
    second = batches.loads.start()
    batches.session.on_poll = [[result(1), result(2, success=False)]]
    assert batches.loads.finish(first) == (True, ("one",))
    assert batches.loads.finish(second) == (False, ("two",))


def test_a_load_that_does_not_end_abandons_the_session_and_fails() -> None:
    batches = Batches(timeout=0.0)
    batches.queue("one", A)
    batches.queue("two", B)
    number = batches.loads.start()
    batches.session.on_poll = [[result(1)]]
    assert batches.loads.finish(number) == (False, ("one", "two"))
    (error,) = batches.session.abandoned
    assert "a load has not ended within 0 s" in str(error)


def test_all_loads_end(batches: Batches) -> None:
    batches.queue("one", A)
    batches.loads.start()
    batches.queue("two", B)
    batches.loads.start()
    batches.queue("three", C)
    batches.session.on_poll = [[result(2)], [result(1)]]
    batches.loads.end_all()
    assert batches.session.on_poll == []
    assert batches.loads.start() == -1
    assert not batches.loads.cancel("three")
