"""The process of a tier: its queue, and mistakes in the code of a tier, which may be anybody's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.messages import TierArguments
from kvferry.daemon.tiers.tier_worker import check_tier
from kvferry.proto.errors import Code, Refused
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_subjects import NAMESPACE, PoolMemory, TierSetup, key_of, open_subject

from .rude_fixtures import SOON_KILLED, Rude, Start

OK, ERROR = Result.OK, Result.ERROR


def test_too_few_results_are_errors_of_the_call(
    rude: Rude, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = rude.tier
    rude.on("too few")
    assert tier.put([1, 2]) == [ERROR, ERROR]
    rude.off("too few")
    assert tier.put([3, 4]) == [OK, OK]
    rude.on("too few")
    assert tier.fetch([3, 4]) == [ERROR, ERROR]
    assert tier.contains([3, 4]) == [False, False]
    log = capsys.readouterr().out
    for call in ("contains", "fetch", "put"):
        assert f"{call} has returned 1 results for 2 keys; return one for each" in log


def test_a_tier_that_cannot_say_its_usage_stays_on(rude: Rude) -> None:
    tier = rude.tier
    tier.put([1])
    before = tier.usage()
    rude.on("usage")
    tier.put([2])
    assert tier.usage() == before
    assert tier.contains([1, 2]) == [True, True]
    assert tier.client.counts["deaths"] == 0


def test_fetches_overtake_puts(rude: Rude) -> None:
    """With both threads busy with puts, and more puts queued, fetches are next."""
    tier = rude.tier
    tier.put([0])
    rude.on("slow")
    rude.on("slow reads")
    written = [tier.blocks(NAMESPACE, [key_of(number)], [number]) for number in range(1, 6)]
    puts = [tier.begin_put(blocks) for blocks in written]
    tier.wait_until(lambda: len(list(rude.folder.glob("slow-*"))) == 2)
    read = tier.blocks(NAMESPACE, [key_of(0)], [32])
    fetches = [tier.begin_fetch(read) for _ in range(2)]
    assert tier.contains([0]) == [True]  # it has read them all
    rude.off("slow")
    tier.wait_until(lambda: len([put for put in puts if put.results]) == 2)
    assert not any(fetch.results for fetch in fetches)
    rude.off("slow reads")
    tier.wait_until(lambda: all(call.results for call in (*puts, *fetches)))


@pytest.fixture
def shared(start: Start, tmp_path: Path) -> Rude:
    return Rude(tmp_path, start, shared=True)


@pytest.mark.parametrize("fault", ["settle", "wrong settle"])
def test_a_tier_that_cannot_settle_leaves_all_epochs_out(
    shared: Rude, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shared.on(fault)
    assert shared.tier.settle({NAMESPACE: 7}) == {}
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "tier failed" in line)
    assert "settle" in line
    shared.off(fault)
    epochs = {NAMESPACE: (1 << 62) - 1, "other": 0}
    assert shared.tier.settle(epochs) == epochs
    assert shared.tier.client.is_prompt
    assert shared.tier.client.counts["deaths"] == 0


def test_a_tier_that_hangs_while_it_settles_serves_all_else(shared: Rude) -> None:
    """The network may be lost for long: neither a lookup waits for it, nor is it killed. If it
    dies, nothing is settled."""
    tier, pid = shared.tier, shared.tier.client.pid
    assert pid is not None
    shared.on("slow settle")
    settled = tier.begin_settle({NAMESPACE: 7})
    tier.wait_until(lambda: list(shared.folder.glob("slow settle-*")))
    ended = time.monotonic() + 3 * SOON_KILLED.grace
    while time.monotonic() < ended:
        assert tier.put([1]) == [OK]
        assert tier.contains([1]) == [True]
        assert tier.fetch([1]) == [OK]
    assert (tier.client.pid, tier.client.is_prompt, settled.done()) == (pid, True, False)
    os.kill(pid, signal.SIGKILL)
    tier.wait_until(settled.done)
    assert settled.result() == {}


# What a tier must have

GIVEN = TierArguments((), 0, 0, "own_tier", {})


class Partial:
    """Has `io_threads` and `put` only."""

    io_threads = 2

    def put(self) -> None: ...


def test_a_tier_that_lacks_something_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        check_tier(Partial(), GIVEN)
    lacks = "call_bytes, close, contains, drop, fetch, maintain, note_used, stores, usage"
    assert caught.value.info.code == Code.BAD_CONFIG
    assert caught.value.message == (
        f"Partial of own_tier lacks {lacks}; see Tier in kvferry.daemon.tiers.base"
    )


def test_a_tier_that_cannot_settle_is_no_shared_tier() -> None:
    check_tier(MemoryTier(1), GIVEN)
    with pytest.raises(Refused, match="MemoryTier of own_tier lacks settle; see SharedTier in"):
        check_tier(MemoryTier(1), msgspec.structs.replace(GIVEN, is_shared=True))


def test_a_tier_that_cannot_name_its_stores_is_not_used(
    pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old one could be found again."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    (tmp_path / "stores").touch()
    setup = TierSetup("rude_tier", {"folder": str(tmp_path)})
    with (
        pytest.raises(RuntimeError, match=r"tier rude_tier not opened: .*stores fails"),
        open_subject(setup, pool),
    ):
        pass
