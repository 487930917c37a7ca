"""Transfers in the core: credits, results, cancel, wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.daemon.core.actions import (
    CancelTransfers,
    CloseSession,
    SendMessage,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.transfers import MAX_WAITS
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.errors import Code
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, TransferSpec
from support.core_fixture import FAULT, MAX_GPU_BLOCKS, MAX_JOBS, CoreFixture, finished, load, store


def test_a_completed_job_reports_its_bytes_and_time() -> None:
    fixture = CoreFixture("a", timeline=3)
    plan = fixture.start("a", 7, store(1, 2, 3, hosts=(1, 0)), wait_for=12)
    assert (plan.registration, plan.direction, plan.nbytes) == (1, Direction.STORE, 3 * 1024)
    assert (plan.wait_for, plan.after, plan.host_end) == (12, 0, 4096)
    assert fixture.start("a", 8, load(4, 5, hosts=(1,))).after == plan.serial
    (action,) = fixture.report(TransferCompleted(plan.serial, Outcome.DONE, 0.25))
    result = JobResult(7, Direction.STORE, Outcome.DONE, 3072, 0.25)
    assert action == SendMessage("a", wire.Finished((result,)))
    assert fixture.core.totals() == proto_status.Totals(stores=1, stored_bytes=3072)


def test_an_unsuccessful_job_reports_no_bytes() -> None:
    fixture = CoreFixture("a")
    for job, outcome in enumerate((Outcome.FAILED, Outcome.CANCELLED)):
        plan = fixture.start("a", job, store(1, 2))
        error = FAULT if outcome is Outcome.FAILED else None
        (action,) = fixture.report(TransferCompleted(plan.serial, outcome, error=error))
        assert isinstance(action.message, wire.Finished)
        (result,) = action.message.results
        assert (result.outcome, result.nbytes) == (outcome, 0)
    assert fixture.core.totals() == proto_status.Totals(failed=1, cancelled=1)


@pytest.mark.parametrize(
    ("spec", "wait_for", "code"),
    [
        (store(8), 0, Code.BLOCK_OUT_OF_RANGE),
        ((GPULoadStoreSpec([0]), GPULoadStoreSpec([1])), 0, Code.BAD_SPEC),
        ((CPULoadStoreSpec([0]), GPULoadStoreSpec([0], section=1)), 0, Code.BAD_SPEC),
        ((GPULoadStoreSpec([0], section=0), CPULoadStoreSpec([0])), 0, Code.BAD_SPEC),
        (store(0), 1, Code.NO_TIMELINE),
    ],
)
def test_a_bad_job_is_refused_and_uses_neither_its_id_nor_a_credit(
    spec: TransferSpec, wait_for: int, code: Code
) -> None:
    fixture = CoreFixture("a")
    assert fixture.refused("a", 1, spec, wait_for) == code
    assert not fixture.core.busy
    for job in range(1, 1 + MAX_JOBS):
        assert fixture.start("a", job, store(job)).serial == job


def test_a_refused_job_reports_its_direction() -> None:
    fixture = CoreFixture("a")
    for spec, direction in ((store(9), Direction.STORE), (load(9), Direction.LOAD)):
        (action,) = fixture.submit("a", 1, spec)
        assert action.message.results[0].direction is direction


def test_job_ids_in_flight_are_unique_per_engine() -> None:
    fixture = CoreFixture("a/worker", "a/scheduler", "b")
    plan = fixture.start("a/worker", 1, store(0))
    assert fixture.refused("a/worker", 1, load(1)) == Code.DUPLICATE_JOB
    assert fixture.refused("a/scheduler", 1, store(1)) == Code.DUPLICATE_JOB
    fixture.start("b", 1, store(0))
    fixture.report(TransferCompleted(plan.serial, Outcome.DONE))
    fixture.start("a/scheduler", 1, store(1))


@pytest.mark.parametrize(("spec", "other"), [(store, load), (load, store)])
def test_jobs_of_a_session_are_bounded_per_direction(
    spec: Callable[[int], TransferSpec], other: Callable[[int], TransferSpec]
) -> None:
    fixture = CoreFixture("a/worker", "a/scheduler")
    fixture.fill("a/worker")
    plans = [fixture.start("a/worker", job, spec(job)) for job in range(MAX_JOBS)]
    assert fixture.refused("a/worker", 9, spec(5)) == Code.BUSY
    fixture.start("a/worker", 20, other(6))
    fixture.start("a/scheduler", 10, spec(5))
    fixture.report(TransferCompleted(plans[1].serial, Outcome.FAILED, error=FAULT))
    fixture.start("a/worker", 9, spec(5))
    assert fixture.refused("a/worker", 11, spec(6)) == Code.BUSY


def test_gpu_blocks_in_flight_of_a_session_are_bounded() -> None:
    """A job that waits for its timeline holds memory for each of its blocks."""
    fixture = CoreFixture("a/worker", "a/scheduler")
    fixture.fill("a/worker")
    every = load(*range(8), hosts=(0, 1, 0, 1))
    first, _ = (fixture.start("a/worker", job, every) for job in range(MAX_GPU_BLOCKS // 8))
    assert fixture.refused("a/worker", 3, store(0)) == Code.BUSY
    fixture.start("a/scheduler", 3, every)
    fixture.report(TransferCompleted(first.serial, Outcome.DONE))
    fixture.start("a/worker", 4, store(0))


def test_the_parts_of_a_job_have_its_id() -> None:
    """Each has a result, and the id is free after the last one."""
    fixture = CoreFixture("a/worker", "a/scheduler")
    parts = [fixture.start("a/worker", 1, store(n), 0, n) for n in range(2)]
    assert fixture.refused("a/worker", 1, store(9), 0, 2) == Code.BLOCK_OUT_OF_RANGE
    assert fixture.refused("a/scheduler", 1, store(3), 0, 3) == Code.DUPLICATE_JOB
    for plan, outcome in zip(parts, (Outcome.CANCELLED, Outcome.DONE), strict=True):
        assert fixture.refused("a/worker", 1, store(3)) == Code.DUPLICATE_JOB
        actions = fixture.report(TransferCompleted(plan.serial, outcome))
        assert [each[:3] for each in finished(actions)] == [("a/worker", 1, outcome)]
    fixture.start("a/worker", 1, store(3))


def test_a_cancel_and_a_wait_apply_to_all_parts_of_a_job() -> None:
    fixture = CoreFixture("a")
    first, second = (fixture.start("a", 1, store(n), 0, n) for n in range(2))
    assert fixture.send("a", wire.Wait(5, (1,))) == []
    assert fixture.send("a", wire.Cancel((1,))) == [CancelTransfers(1, (1, 2))]
    assert len(fixture.report(TransferCompleted(second.serial, Outcome.CANCELLED))) == 1
    actions = fixture.report(TransferCompleted(first.serial, Outcome.CANCELLED))
    assert actions[1:] == [SendMessage("a", wire.Waited(5))]


def test_a_cancel_applies_to_jobs_in_flight_of_its_engine() -> None:
    fixture = CoreFixture("a/worker", "a/scheduler", "b")
    plan = fixture.start("a/worker", 1, store(0))
    fixture.start("b", 2, store(0))
    assert fixture.send("a/scheduler", wire.Cancel((1, 2, 3))) == [
        CancelTransfers(1, (plan.serial,))
    ]
    actions = fixture.report(TransferCompleted(plan.serial, Outcome.CANCELLED))
    assert finished(actions) == [("a/worker", 1, "cancelled", "cancelled")]
    assert fixture.send("a/worker", wire.Cancel((1,))) == []


def test_a_cancelled_job_that_completes_is_done() -> None:
    fixture = CoreFixture("a")
    plan = fixture.start("a", 1, store(0))
    fixture.send("a", wire.Cancel((1,)))
    assert finished(fixture.report(TransferCompleted(plan.serial, Outcome.DONE))) == [
        ("a", 1, "done", None)
    ]


def test_waiting_ends_after_the_last_job() -> None:
    fixture = CoreFixture("a/worker", "a/scheduler")
    plans = [fixture.start("a/worker", job, store(job)) for job in range(3)]
    assert fixture.send("a/worker", wire.Wait(5, (0, 2, 2, 77))) == []
    assert fixture.send("a/scheduler", wire.Wait(6, (2,))) == []
    assert len(fixture.report(TransferCompleted(plans[0].serial, Outcome.DONE))) == 1
    actions = fixture.report(TransferCompleted(plans[2].serial, Outcome.FAILED, error=FAULT))
    assert finished(actions) == [("a/worker", 2, "failed", "copy_failed")]
    assert actions[1:] == [
        SendMessage("a/worker", wire.Waited(5)),
        SendMessage("a/scheduler", wire.Waited(6)),
    ]


@pytest.mark.parametrize("job_ids", [(), (77,), (1, 77)])
def test_waiting_for_ended_jobs_returns_at_once(job_ids: tuple[int, ...]) -> None:
    fixture = CoreFixture("a")
    plan = fixture.start("a", 1, store(0))
    fixture.report(TransferCompleted(plan.serial, Outcome.DONE))
    assert fixture.send("a", wire.Wait(5, job_ids)) == [SendMessage("a", wire.Waited(5))]


def test_waits_of_a_session_are_bounded() -> None:
    fixture = CoreFixture("a")
    plan = fixture.start("a", 1, store(0))
    for number in range(MAX_WAITS):
        assert fixture.send("a", wire.Wait(number, (1,))) == []
    assert fixture.error("a", wire.Wait(999, (1,))) == Code.BUSY
    assert len(fixture.report(TransferCompleted(plan.serial, Outcome.DONE))) == 1 + MAX_WAITS
    fixture.start("a", 1, store(0))
    assert fixture.send("a", wire.Wait(999, (1,))) == []


def test_jobs_of_a_closed_session_are_not_counted() -> None:
    """Each session has a new name, so entries of closed sessions accumulate."""
    fixture = CoreFixture("a/worker", "a/scheduler")
    done, late = (fixture.start("a/scheduler", n, store(n)) for n in (1, 2))
    fixture.send("a/scheduler", wire.Wait(5, (2,)))
    fixture.report(TransferCompleted(done.serial, Outcome.DONE))
    fixture.core.close_session("a/scheduler")
    assert finished(fixture.report(TransferCompleted(late.serial, Outcome.CANCELLED))) == []
    transfers = fixture.core._transfers
    assert transfers.moved_bytes == transfers._used_credits == {}
    assert transfers._pending_waits == transfers._gpu_blocks == {}


def test_jobs_end_when_the_process_that_owns_the_tensors_disconnects() -> None:
    fixture = CoreFixture("a/worker", "a/scheduler")
    first, second = (
        fixture.start("a/worker", 1, store(0)),
        fixture.start("a/scheduler", 2, store(1)),
    )
    fixture.send("a/scheduler", wire.Wait(5, (1, 2)))
    assert fixture.core.close_session("a/worker") == [
        CloseSession("a/worker"),
        CancelTransfers(1, (first.serial,)),
        UnmapTensors(1),
    ]
    assert fixture.report(TransferCompleted(first.serial, Outcome.CANCELLED)) == []
    actions = fixture.report(TransferCompleted(second.serial, Outcome.CANCELLED))
    assert finished(actions) == [("a/scheduler", 2, "failed", "engine_gone")]
    assert actions[1:] == [SendMessage("a/scheduler", wire.Waited(5))]
    assert fixture.refused("a/scheduler", 3, store(1)) == Code.NOT_REGISTERED


def test_tensors_stay_when_another_process_of_the_engine_disconnects() -> None:
    fixture = CoreFixture("a/worker", "a/scheduler")
    fixture.start("a/worker", 1, store(0))
    plan = fixture.start("a/scheduler", 2, store(1))
    expected = [CloseSession("a/scheduler"), CancelTransfers(1, (plan.serial,))]
    assert fixture.core.close_session("a/scheduler") == expected
    fixture.start("a/worker", 3, store(2))
