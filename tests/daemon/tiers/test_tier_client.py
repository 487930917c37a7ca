"""A tier that dies, hangs or fails costs a miss, and never touches a block that was given away."""

from __future__ import annotations

import fcntl
import os
import signal
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvferry.daemon.core.tier_actions import MAX_TIER_KEYS
from kvferry.daemon.processes import ProcessDied
from kvferry.daemon.tier_config import DiskTierConfig
from kvferry.daemon.tiers import tier_client
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.messages import TierBlocks
from kvferry.daemon.tiers.tier_process import TierTimes
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    PoolMemory,
    ProcessSubject,
    content_of,
    key_of,
)
from support.refused_starts import refuse_starts
from support.time_limits import TIMEOUT

from .disk_fixtures import BLOCK
from .rude_fixtures import SOON_KILLED, Rude, Start

OK, MISS, LATE, FULL, ERROR = Result.OK, Result.MISS, Result.LATE, Result.FULL, Result.ERROR


@pytest.fixture
def disk(start: Start, tmp_path: Path) -> ProcessSubject:
    return start(DiskTierConfig(str(tmp_path / "tier"), "4MiB"), SOON_KILLED)


def is_back(tier: ProcessSubject, before: int | None) -> bool:
    return tier.client.pid not in (None, before) and tier.client.is_on


def test_a_stopped_tier_is_killed_before_its_blocks_are_used_again(
    rude: Rude, pool: PoolMemory
) -> None:
    """It is stopped while it writes into a block. Whatever wakes it up later writes nothing."""
    tier = rude.tier
    tier.put([1])
    rude.on("write")
    blocks = tier.blocks(NAMESPACE, [key_of(1)], [32])
    fetch = tier.begin_fetch(blocks, 3.0)
    tier.wait_until((rude.folder / "writing").exists)
    pid = tier.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    tier.wait_until(lambda: fetch.results)
    assert (fetch.results, fetch.released) == ([LATE], None)
    assert not tier.client.is_prompt
    tier.wait_until(lambda: fetch.released is not None)
    assert fetch.released == []
    pool.block(32)[:] = content_of(5, BLOCK)
    with pytest.raises(ProcessLookupError):  # it was killed and reaped
        os.kill(pid, signal.SIGCONT)
    assert np.array_equal(pool.block(32), content_of(5, BLOCK))
    rude.off("write")
    tier.wait_until(lambda: is_back(tier, pid))
    assert tier.put([1]) == [OK]
    assert tier.fetch([1]) == [OK]


def test_a_killed_tier_ends_what_is_pending_and_comes_back(
    disk: ProcessSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its process cannot be started at first."""
    numbers = list(range(16))
    disk.put(numbers)
    refusals = refuse_starts(monkeypatch, OSError("too many"))
    before = disk.client.pid
    assert before is not None
    os.kill(before, signal.SIGSTOP)
    blocks = disk.blocks(NAMESPACE, [key_of(n) for n in numbers], range(32, 48))
    fetch = disk.begin_fetch(blocks, 30.0)
    put = disk.begin_put(blocks)
    os.kill(before, signal.SIGKILL)
    disk.wait_until(lambda: (fetch.released, put.released) == ([], []))
    assert fetch.results == put.results == [MISS] * 16
    assert disk.fetch(numbers) == [MISS] * 16  # it is off
    assert disk.contains(numbers) == [False] * 16
    disk.wait_until(lambda: is_back(disk, before))
    assert disk.fetch(numbers) == [OK] * 16
    assert (disk.client.counts["deaths"], disk.client.in_flight, refusals) == (1, 0, [])


def test_what_is_read_and_written_is_counted(disk: ProcessSubject) -> None:
    """But not blocks that the tier has already, as when the pool was restored."""
    assert disk.put([0, 1]) == [OK, OK]
    assert disk.put([1, 2]) == [Result.PRESENT, OK]
    assert disk.fetch([0, 9, 2]) == [OK, MISS, OK]
    expected = {"written": 3, "written_bytes": 3 * BLOCK, "promoted": 2, "read_bytes": 2 * BLOCK}
    assert disk.client.counts.items() >= expected.items()


def test_a_drop_reaches_a_tier_that_was_dead(disk: ProcessSubject) -> None:
    """And before anything is found in it again."""
    disk.put([1, 2, 3])
    before = disk.client.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    disk.wait_until(lambda: not disk.client.is_on)
    dropped = disk.begin_drop()
    disk.wait_until(lambda: is_back(disk, before))
    assert disk.contains([1, 2, 3]) == [False] * 3
    assert dropped.done()


def test_a_store_whose_drop_was_lost_is_named_again(disk: ProcessSubject) -> None:
    disk.put([1])
    assert disk.stores() == []
    before = disk.client.pid
    assert before is not None
    os.kill(before, signal.SIGSTOP)
    dropped = disk.begin_drop()
    os.kill(before, signal.SIGKILL)
    disk.wait_until(lambda: is_back(disk, before))
    assert isinstance(dropped.exception(), ProcessDied)
    assert disk.stores() == [NAMESPACE]
    disk.drop()
    assert disk.contains([1]) == [False]


def test_a_drop_is_done_also_if_the_daemon_stops_next(disk: ProcessSubject, start: Start) -> None:
    disk.put([1])
    disk.begin_drop()
    disk.close()
    assert start(disk.client.config).stores() == []


def test_a_drop_that_failed_is_logged(rude: Rude, capfd: pytest.CaptureFixture[str]) -> None:
    """It frees room only: nobody asks for the blocks again."""
    rude.tier.put([1])
    rude.on("drop")
    rude.tier.drop()
    output, errors = capfd.readouterr()
    assert "tier failed" in output
    assert "drop fails" in output
    assert "Traceback" not in output + errors
    assert rude.tier.contains([1]) == [True]
    assert rude.tier.client.counts["deaths"] == 0


def is_received(tier: ProcessSubject) -> bool:
    """Whether the process has received all that was sent to it."""
    connection = tier.client._process._socket
    assert connection is not None
    return fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)) == bytes(4)


def test_a_drop_of_a_store_ends_its_blocks_in_the_queue(start: Start, tmp_path: Path) -> None:
    """And waits for those in progress, so that no later write creates the store again."""
    rude = Rude(tmp_path, start, TierTimes(grace=30.0))
    tier = rude.tier
    rude.on("slow")
    puts = [tier.begin_put(tier.blocks(NAMESPACE, [key_of(n)], [n])) for n in range(3)]
    tier.wait_until(lambda: len(list(tmp_path.glob("slow-*"))) == 2)  # all threads
    dropped = tier.begin_drop()
    tier.wait_until(lambda: is_received(tier))
    until = time.monotonic() + 0.1
    tier.wait_until(lambda: time.monotonic() > until)
    assert not dropped.done()
    rude.off("slow")
    tier.wait_until(lambda: dropped.done() and all(put.results for put in puts))
    assert [put.results for put in puts] == [[OK], [OK], [MISS]]
    assert tier.contains(range(3)) == [False] * 3


def test_three_errors_turn_it_off_until_a_probe_is_answered(
    rude: Rude, capsys: pytest.CaptureFixture[str]
) -> None:
    tier, breaker = rude.tier, rude.tier.client.breaker
    tier.put([1])
    assert tier.contains([1]) == [True]
    rude.on("fetch")
    rude.on("contains")
    assert [tier.fetch([1]) for _ in range(3)] == [[ERROR]] * 3
    assert breaker.state != "closed"
    assert (tier.fetch([1]), tier.put([2]), tier.contains([1])) == ([MISS], [FULL], [False])
    tier.wait_until(lambda: tier.client.counts["openings"] == 2)  # the probe fails
    log = capsys.readouterr().out
    assert "fetch fails" in log
    assert "Traceback" not in log
    rude.off("contains")
    tier.wait_until(lambda: breaker.state == "closed")
    assert tier.contains([1]) == [True]
    assert tier.fetch([1]) == [ERROR]  # which is one too many
    assert tier.client.counts["openings"] == 3
    rude.off("fetch")
    tier.wait_until(lambda: breaker.state == "closed")
    assert tier.fetch([1]) == [OK]
    assert tier.client.counts["errors"] == 5


def test_a_late_answer_makes_others_miss_and_is_no_failure(start: Start, tmp_path: Path) -> None:
    rude = Rude(tmp_path, start, TierTimes(grace=30.0))
    tier = rude.tier
    tier.put([1])
    rude.on("slow reads")
    blocks = tier.blocks(NAMESPACE, [key_of(1)], [32])
    fetch = tier.begin_fetch(blocks, 0.2)
    tier.wait_until(lambda: fetch.results)
    assert (fetch.results, fetch.released) == ([LATE], None)
    assert (tier.fetch([1]), tier.contains([1])) == ([MISS], [False])
    assert tier.put([2]) == [OK]  # nobody waits for it
    rude.off("slow reads")
    tier.wait_until(lambda: fetch.released)
    assert fetch.released == [OK]
    assert (tier.fetch([1]), tier.contains([1])) == ([OK], [True])
    assert (tier.client.counts["openings"], tier.client.counts["deaths"]) == (0, 0)


def test_a_stopped_tier_costs_one_lookup_and_no_probe(start: Start, tmp_path: Path) -> None:
    """Others miss at once, also while it is probed; it is killed, and comes back by itself."""
    tier = Rude(tmp_path, start, TierTimes(grace=0.3)).tier
    tier.put([1])
    pid = tier.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    lookup = tier.begin_lookup([key_of(1)], 0.1)
    tier.wait_until(lambda: lookup)
    assert lookup == [LATE]
    while tier.client.pid == pid:
        assert tier.contains([1]) == [False]  # which waits for 30 s, if it is sent
        assert tier.fetch([1]) == [MISS]
    assert tier.client.counts["openings"] == 1
    tier.wait_until(lambda: is_back(tier, pid))
    assert tier.put([1]) == [OK]
    assert tier.contains([1]) == [True]
    assert tier.client.counts["deaths"] == 1


def test_a_process_whose_answers_have_arrived_is_not_killed(start: Start, tmp_path: Path) -> None:
    """Although the daemon's event loop is busy until after the grace time."""
    rude = Rude(tmp_path, start, TierTimes(grace=2.0))
    tier, pid = rude.tier, rude.tier.client.pid
    assert pid is not None
    rude.on("note lookups")
    os.kill(pid, signal.SIGSTOP)
    lookups = [tier.begin_lookup([key_of(n)], 0.05) for n in range(4)]
    tier.wait_until(lambda: all(lookups))
    assert lookups == [[LATE]] * 4
    os.kill(pid, signal.SIGCONT)
    answered = [tmp_path / f"lookup-{key_of(n).hex()}" for n in range(4)]
    until = time.monotonic() + 2.0

    async def block() -> None:
        while time.monotonic() < until or not all(each.exists() for each in answered):
            time.sleep(0.001)

    tier.runner.run(block())
    tier.wait_until(lambda: not tier.client.in_flight)
    assert (tier.client.pid, tier.client.counts["deaths"]) == (pid, 0)
    assert tier.client.counts["openings"] == 1  # because of late lookups in a row


def test_what_was_read_in_time_counts(rude: Rude) -> None:
    """Although other keys of the request are late."""
    rude.tier.put([1, 2])
    rude.on("slow second")
    assert rude.tier.fetch([1, 2], seconds=2.0) == [OK, LATE]


def test_lookups_miss_while_a_store_is_dropped(rude: Rude) -> None:
    """A drop may take long, and lookups are answered behind it."""
    tier = rude.tier
    tier.put([1], "other")
    rude.on("slow drop")
    dropped = tier.begin_drop()
    lookup = tier.begin_lookup([key_of(1)], 0.1, "other")
    tier.wait_until(lambda: lookup)
    assert lookup == [MISS]
    rude.off("slow drop")
    tier.wait_until(dropped.done)
    assert tier.contains([1], "other") == [True]


def test_a_lookup_that_fails_finds_nothing(rude: Rude) -> None:
    rude.tier.put([1])
    rude.on("contains")
    for _ in range(3):
        assert rude.tier.contains([1, 2]) == [False, False]
    assert rude.tier.client.counts["errors"] == 6
    assert rude.tier.client.breaker.state == "open"


def test_bytes_that_do_not_match_their_checksum_are_dropped(rude: Rude) -> None:
    rude.on("lie")
    rude.tier.put([1])
    rude.off("lie")
    assert rude.tier.contains([1]) == [True]
    assert rude.tier.fetch([1]) == [Result.CORRUPT]
    assert rude.tier.contains([1]) == [False]
    assert rude.tier.client.counts["checksum_failures"] == 1


def test_a_root_in_use_turns_it_off_until_it_is_free(disk: ProcessSubject, start: Start) -> None:
    """The reason is logged once, and again if it is another one."""
    disk.put([1])
    path, deaths = disk.client.config.options["path"], 0
    with capture_logs() as logs:
        second = start(disk.client.config, SOON_KILLED, wait=False)
        for mode, reason in ((0o700, "in use by another process"), (0o777, "mode 0777")):
            os.chmod(path, mode)
            second.wait_until(lambda reason=reason: reason in second.client.failure)  # type: ignore[misc]
            deaths = second.client.counts["deaths"]
            second.wait_until(lambda deaths=deaths: second.client.counts["deaths"] > deaths)  # type: ignore[misc]
    assert not second.client.is_on
    first, other = [line for line in logs if line["log_level"] != "debug"]
    assert (first["event"], first["tier"]) == ("tier cannot be opened", "disk")
    assert "give each daemon a path of its own" in first["reason"]
    assert "mode 0777" in other["reason"]
    os.chmod(path, 0o700)
    assert disk.fetch([1]) == [OK]
    disk.close()
    second.wait_until(lambda: second.client.is_on)
    assert not second.client.failure
    assert second.fetch([1]) == [OK]


def test_it_is_closed_cleanly_while_it_writes(disk: ProcessSubject) -> None:
    """Although nobody receives its answers; otherwise its last writes are not synced."""
    child = disk.client._process._process
    assert child is not None
    keys = [key_of(number) for number in range(32)]
    for at in range(0, 32, 4):
        blocks = disk.blocks(NAMESPACE, keys[at : at + 4], range(at, at + 4))
        disk.begin_put(blocks)
    disk.close()
    assert child.wait(TIMEOUT) == 0


def test_the_largest_requests_fit(disk: ProcessSubject) -> None:
    keys = [bytes(60) + n.to_bytes(4, "big") for n in range(MAX_TIER_KEYS)]
    blocks = TierBlocks(NAMESPACE, keys, bytes(8 * MAX_TIER_KEYS), BLOCK)
    fetches = [disk.begin_fetch(blocks, 30.0) for _ in range(8)]
    disk.wait_until(lambda: all(fetch.results for fetch in fetches))
    assert all(fetch.results == [MISS] * MAX_TIER_KEYS for fetch in fetches)


def test_the_process_is_told_which_stores_are_in_use(rude: Rude) -> None:
    rude.tier.used_stores = "c-part", "a-part"
    rude.tier.usage()
    rude.tier.wait_until(lambda: (rude.folder / "used").read_text() == "a-part c-part")


def test_a_put_that_waits_for_reads_is_not_late(
    rude: Rude, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_client, "PUT_SECONDS", 0.5)
    tier = rude.tier
    tier.put([0])
    rude.on("paced reads")
    read = tier.blocks(NAMESPACE, [key_of(0)], [32])
    written = tier.blocks(NAMESPACE, [key_of(1)], [1])
    reads = [tier.begin_fetch(read) for _ in range(60)]  # 1.5 seconds for two threads
    put = tier.begin_put(written)
    tier.wait_until(lambda: put.results)
    assert put.results == [OK]
    assert len([fetch for fetch in reads if fetch.results]) > 50
    assert tier.client.counts["deaths"] == 0
