"""The report queue: no report is lost, and several reports wake the event loop once."""

from __future__ import annotations

import asyncio
import threading
import time

from kvferry.daemon.core.actions import Report, TensorsUnmapped
from kvferry.daemon.device.report_queue import ReportQueue
from support.time_limits import TIMEOUT


def test_reports_of_another_thread_are_taken_in_order() -> None:
    taken: list[Report] = []

    async def serve() -> None:
        done = asyncio.Event()

        def on_reports() -> None:
            taken.extend(reports.take_reports())
            if len(taken) == 3000:
                done.set()

        def put() -> None:
            for number in range(0, 3000, 3):
                reports.put_reports(
                    [
                        TensorsUnmapped(number),
                        TensorsUnmapped(number + 1),
                        TensorsUnmapped(number + 2),
                    ]
                )
                if number % 50 == 0:
                    time.sleep(0)

        reports = ReportQueue(asyncio.get_running_loop(), on_reports)
        thread = threading.Thread(target=put)
        thread.start()
        await asyncio.wait_for(done.wait(), TIMEOUT)
        thread.join()

    asyncio.run(serve())
    assert taken == [TensorsUnmapped(number) for number in range(3000)]


def test_the_loop_is_woken_once_for_several_reports() -> None:
    wake_ups = 0
    taken: list[Report] = []

    async def serve() -> None:
        def on_reports() -> None:
            nonlocal wake_ups
            wake_ups += 1
            for report in reports.take_reports():
                if report == TensorsUnmapped(1):  # another report arrives meanwhile
                    reports.put_reports([TensorsUnmapped(3)])
                taken.append(report)

        reports = ReportQueue(asyncio.get_running_loop(), on_reports)
        for number in range(3):
            reports.put_reports([TensorsUnmapped(number)])
        await asyncio.sleep(0.01)
        assert wake_ups == 2, "once for the first three, and once for the next"
        reports.put_reports([TensorsUnmapped(4)])
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert wake_ups == 3
    assert taken == [TensorsUnmapped(number) for number in range(5)]
