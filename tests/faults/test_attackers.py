"""Attacks on the event loop and the sockets. An honest client beside them is served."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from support.attackers import KINDS
from support.process_usage import ProcessUsage
from support.raw_client import RawClient, store
from support.time_limits import TIMEOUT
from support.traffic_statistics import percentile

pytestmark = pytest.mark.timeout(300)

BLOCKS = 8
# Limits of the daemon's growth during an attack, in bytes. "ids": libzmq frees a connection when
# the event loop has read its message, so the growth depends on how busy the cores are.
MAX_GROWTH = {
    "largest": 512 << 20,
    "layouts": 64 << 20,
    "ids": 1 << 30,
    "silent": 64 << 20,
    "sibling": 64 << 20,
}


def serve_one(raw: RawClient, number: int) -> float:
    """Store one block. Returns the seconds it took."""
    began = time.perf_counter()
    raw.send(store(number, [number % BLOCKS], [number % BLOCKS]))
    assert raw.result(number).outcome == "done"
    seconds = time.perf_counter() - began
    time.sleep(0.001)
    return seconds


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_client_beside_attackers(
    start_daemon: Callable[..., LocalDaemon], kind: str, long: bool
) -> None:
    daemon = start_daemon(log_level="warning", siblings_enabled="true")
    seconds, attackers = (30, 4) if long else (4, 2)
    with ExitStack() as stack:
        raw = stack.enter_context(RawClient(daemon.directory, "honest", timeout=TIMEOUT))
        raw.register(BLOCKS)
        alone = percentile([serve_one(raw, number) for number in range(300)], 0.99)
        before, beside, number = ProcessUsage.of(daemon.pid), [serve_one(raw, 300)], 300
        command = [sys.executable, "-m", "support.attackers", str(daemon.directory)]
        running = [
            subprocess.Popen([*command, kind, str(seconds)], stdout=subprocess.PIPE, text=True)
            for _ in range(attackers)
        ]
        for attacker in running:
            stack.callback(attacker.kill)
        while any(attacker.poll() is None for attacker in running):
            number += 1
            beside.append(serve_one(raw, number))
            grown = ProcessUsage.of(daemon.pid).since(before).private
            assert grown < MAX_GROWTH[kind]
        sent = sum(int(attacker.communicate()[0] or 0) for attacker in running)
        assert sent > 0
        print(
            f"{kind}: {sent} times; honest p99 {1e3 * alone:.1f} ms alone, "
            f"{1e3 * percentile(beside, 0.99):.1f} ms beside it, longest {1e3 * max(beside):.0f} ms"
            f" ({len(beside)} jobs); daemon +{grown / 1e6:.1f} MB"
        )
    with OffloadClient(daemon.directory, timeout=TIMEOUT) as client:
        assert client.status().pid == daemon.pid
