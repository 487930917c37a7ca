"""Flows run beside the server. An error of one of them ends the daemon."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.flows import Shutdown, running_flows
from kvferry.proto.errors import Code, Failed, KVFerryError
from support.eventually import eventually


async def forever() -> None:
    await asyncio.Event().wait()


async def test_flows_are_cancelled_at_the_end_of_the_block() -> None:
    failures, ended = list[KVFerryError](), list[bool]()

    async def flow() -> None:
        try:
            await forever()
        finally:
            ended.append(True)

    async with running_flows(failures.append, flow, flow):
        await asyncio.sleep(0)
    async with running_flows(failures.append, flow):
        pass  # it has not begun
    assert ended == [True, True]
    assert failures == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Failed(Code.DRIVER, "the device is lost"), "the device is lost"),
        (KeyError("x"), r"a flow of the daemon failed: KeyError\('x'\); see the log"),
    ],
)
async def test_an_error_in_a_flow_is_reported_and_ends_the_others(
    error: Exception, message: str
) -> None:
    failures, tasks = list[KVFerryError](), list[asyncio.Task[None]]()

    async def flow() -> None:
        async with asyncio.TaskGroup() as group:  # a flow may consist of several
            tasks.append(group.create_task(forever()))
            raise error

    with capture_logs() as logs:
        async with running_flows(failures.append, forever, flow):
            await eventually(lambda: failures)
    (failure,) = failures
    assert isinstance(failure, Failed)
    with pytest.raises(Failed, match=message):
        raise failure
    assert all(task.cancelled() for task in tasks)
    assert len(logs) == (failure is not error)


async def test_each_of_several_errors_is_reported_or_logged() -> None:
    failures, errors = list[KVFerryError](), [Failed(Code.DRIVER, str(n)) for n in range(3)]

    async def fail(*some: Exception) -> None:
        raise ExceptionGroup("some", some)

    with capture_logs() as logs:
        async with running_flows(
            failures.append, lambda: fail(errors[0]), lambda: fail(*errors[1:])
        ):
            await eventually(lambda: failures)
    assert [*failures, *(each["exc_info"] for each in logs)] == errors


async def test_an_error_of_the_block_is_raised_unchanged() -> None:
    with pytest.raises(KeyError):
        async with running_flows(lambda _: None, forever):
            raise KeyError("x")


async def test_the_first_error_ends_the_daemon() -> None:
    shutdown, first = Shutdown(), Failed(Code.DRIVER, "the first")
    for error in (first, Failed(Code.DRIVER, "the second")):
        await asyncio.to_thread(shutdown.fail, error)
    await shutdown.until_requested()
    assert shutdown.error is first
