"""Reports on their way to the event loop: none is lost, and the loop is woken once for many."""

from __future__ import annotations

import asyncio
import threading
import time

from kvferry.daemon.core.actions import PoolRegistered, Report
from kvferry.daemon.device.report_queue import ReportQueue


def test_all_arrive_in_order_from_another_thread() -> None:
    taken: list[Report] = []

    async def serve() -> None:
        done = asyncio.Event()

        def take_in() -> None:
            taken.extend(reports.take_reports())
            if len(taken) == 3000:
                done.set()

        def put() -> None:
            for number in range(0, 3000, 3):
                reports.put_reports(
                    [PoolRegistered(number), PoolRegistered(number + 1), PoolRegistered(number + 2)]
                )
                if number % 50 == 0:
                    time.sleep(0)

        reports = ReportQueue(asyncio.get_running_loop(), take_in)
        thread = threading.Thread(target=put)
        thread.start()
        await asyncio.wait_for(done.wait(), 30)
        thread.join()

    asyncio.run(serve())
    assert taken == [PoolRegistered(number) for number in range(3000)]


def test_the_loop_is_woken_once_for_several_reports() -> None:
    rings = 0
    taken: list[Report] = []

    async def serve() -> None:
        def take_in() -> None:
            nonlocal rings
            rings += 1
            for report in reports.take_reports():
                if report == PoolRegistered(1):  # while they are taken in, more come
                    reports.put_reports([PoolRegistered(3)])
                taken.append(report)

        reports = ReportQueue(asyncio.get_running_loop(), take_in)
        for number in range(3):
            reports.put_reports([PoolRegistered(number)])
        await asyncio.sleep(0.01)
        assert rings == 2, "once for three, and once for the one that came meanwhile"
        reports.put_reports([PoolRegistered(4)])
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert rings == 3
    assert taken == [PoolRegistered(number) for number in range(5)]
