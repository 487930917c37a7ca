"""The report queue: no report is lost, and several reports wake the event loop once."""

from __future__ import annotations

import asyncio
import threading
import time

from kvferry.daemon.core.actions import Report, TensorsUnmapped
from kvferry.daemon.device.report_queue import ReportQueue
from support.eventually import eventually
from support.time_limits import TIMEOUT


async def test_reports_of_another_thread_are_taken_in_order() -> None:
    taken, reports = list[Report](), ReportQueue()

    def put() -> None:
        for number in range(0, 3000, 3):
            reports.put_reports([TensorsUnmapped(number + each) for each in range(3)])
            if number % 50 == 0:
                time.sleep(0)

    thread = threading.Thread(target=put)
    thread.start()
    async with asyncio.timeout(TIMEOUT):
        while len(taken) < 3000:
            await reports.wait_for_reports()
            taken.extend(reports.take_reports())
    thread.join()
    assert taken == [TensorsUnmapped(number) for number in range(3000)]


async def test_the_loop_is_woken_once_for_several_reports() -> None:
    taken, reports = list[list[Report]](), ReportQueue()

    async def take() -> None:
        while True:
            await reports.wait_for_reports()
            taken.append([])
            for report in reports.take_reports():
                if report == TensorsUnmapped(1):  # another report arrives meanwhile
                    reports.put_reports([TensorsUnmapped(3)])
                taken[-1].append(report)

    taking = asyncio.create_task(take())
    for number in range(3):
        reports.put_reports([TensorsUnmapped(number)])
    await eventually(lambda: len(taken) == 2)
    assert [len(each) for each in taken] == [4, 0], "once for the first three, once for the next"
    reports.put_reports([TensorsUnmapped(4)])
    await eventually(lambda: taken[2:])
    assert taken == [[TensorsUnmapped(number) for number in range(4)], [], [TensorsUnmapped(4)]]
    taking.cancel()
