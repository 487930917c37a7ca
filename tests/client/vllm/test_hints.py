"""Hints in requests, through vLLM's own scheduler, a worker and a daemon."""

from __future__ import annotations

import math
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client import namespace as client_namespace
from kvferry.client.vllm.hinted_prefixes import HINT_COUNTERS
from kvferry.client.vllm.request_hints import PREFETCH, RELEASE, RETAIN
from kvferry.proto.status import NamespaceStatus, TierStatus
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.patient_daemon import PatientDaemon
from support.time_limits import TIMEOUT
from support.vllm_traffic import RandomRequests

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

TOKENS = 16
# Blocks of a prompt; prompts for which the GPU and host memory have room.
PROMPT, GPU, HOST = 8, 10, 40
KEEP = {RETAIN: {"seconds": 600}}


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def prompt(number: int) -> list[int]:
    return [number + 1, *((number * 31 + n) % 900 for n in range(1, PROMPT * TOKENS))]


class Hinted:
    """An engine, and what became of its hints."""

    def __init__(
        self, core: Any, directory: Path, mode: str = "at_eviction", **options: Any
    ) -> None:
        counts = self.counts = dict.fromkeys(HINT_COUNTERS, 0)

        class CountingEngine(core.EngineCore):  # type: ignore[misc]  # vLLM has no types
            def _count_sources(self, stats: Any) -> None:
                values = (getattr(stats, "kv_connector_stats", None) or {}).get("data", {})
                for name in counts:
                    found = values.get(name, 0)
                    counts[name] += sum(found.values()) if isinstance(found, dict) else found

        extra = core.kvferry_options(directory, HOST * PROMPT * core.PAGE)
        extra |= {"kvferry_store": mode, "blocks_per_chunk": 1}
        options = {"groups": ("full",), "blocks": 1 + GPU * PROMPT} | options
        self.engine = CountingEngine(directory, kv_connector_extra_config=extra, **options)
        self.directory = directory

    def serve(self, *numbers: int, **parameters: Any) -> list[int]:
        """Serve prompts, one after the other. Returns the blocks of each that were found."""
        engine, found = self.engine, []
        for number in numbers:
            name = engine.add(prompt(number), 1, **parameters)
            engine.run_until(lambda name=name: name in engine.finished)
            engine.settle()
            found.append(engine.finished[name] // TOKENS)
        return found

    def settled(self) -> list[int]:
        """The counters by result, when all answers have arrived."""
        connector = self.engine.scheduler.connector
        self.engine.run_until(lambda: not connector._hinted._unanswered)
        self.serve(900)  # vLLM reports its counters with a request
        return list(self.counts.values())

    def status(self) -> NamespaceStatus:
        with OffloadClient(self.directory, engine="observer") as client:
            (status,) = client.namespaces()
        return status


@pytest.mark.parametrize("mode", ["at_eviction", "at_once"])
def test_a_retained_prompt_outlives_all_others(
    core: Any, start_kvferryd: StartKvferryd, mode: str
) -> None:
    hinted = Hinted(core, start_kvferryd().directory, mode)
    hinted.serve(0, **KEEP)
    assert hinted.engine.known_chunks() >= PROMPT
    hinted.serve(*range(100, 100 + 2 * HOST + GPU))
    assert hinted.serve(0, 100) == [PROMPT - 1, 0]
    assert hinted.settled() == [PROMPT, 0, 0, 0, 0]
    assert not hinted.engine.wrong
    hinted.engine.close()


def test_chunks_that_only_the_gpu_has_are_stored_when_they_are_retained(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    hinted = Hinted(core, start_kvferryd().directory)
    hinted.serve(0)
    assert hinted.engine.known_chunks() == 0
    assert hinted.serve(0, **KEEP) == [PROMPT - 1]
    assert hinted.engine.known_chunks() == PROMPT
    assert hinted.settled()[0] == PROMPT
    hinted.engine.close()


def test_a_part_of_a_prompt_is_retained(core: Any, start_kvferryd: StartKvferryd) -> None:
    from kvferry.client.vllm import KVFerrySpec

    hinted = Hinted(core, start_kvferryd().directory)
    hinted.serve(0, **{RETAIN: {"seconds": 600, "tokens": 3 * TOKENS + 1}})
    assert hinted.settled() == [3, 0, 0, 0, 0]
    assert hinted.status().retained == 3
    assert HINT_COUNTERS.keys() <= KVFerrySpec.build_metric_definitions({}).keys()
    hinted.engine.close()


def test_released_prompts_are_not_stored_and_their_chunks_go_first(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    hinted = Hinted(core, start_kvferryd().directory, "at_once")
    hinted.serve(*range(HOST - 1))
    hinted.serve(HOST - 1, **{RELEASE: {}})
    hinted.serve(100)
    engine = hinted.engine
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    assert hinted.serve(0, HOST - 1) == [PROMPT - 1, 0]
    engine.close()

    late = Hinted(core, start_kvferryd().directory)
    late.serve(*range(2 * GPU), **{RELEASE: {}})
    assert late.engine.known_chunks() == 0
    assert late.settled()[0] == 2 * GPU * PROMPT
    late.engine.close()


def test_a_hostile_client_harms_only_itself(core: Any, start_kvferryd: StartKvferryd) -> None:
    """It retains all that it can, releases what others retain, and sends nonsense."""
    hinted = Hinted(core, start_kvferryd().directory)
    request = {"cache_salt": "honest"}
    engine = hinted.engine
    labelled(engine, request)
    hinted.serve(0, **KEEP)
    request["cache_salt"] = "hostile"
    hinted.serve(0, **{RELEASE: {}})
    for number in range(50, 50 + HOST):
        hinted.serve(number, **{RETAIN: {"seconds": 1e300}})
    nonsense: tuple[Any, ...] = None, [], {"seconds": math.nan}, {"seconds": "\ud800"}
    for payload in (*nonsense, {"seconds": 2**63}):
        hinted.serve(1, **{RETAIN: payload, RELEASE: payload, "kvferry.x@1": payload})
    share = HOST * PROMPT // 16
    _, clipped, missing, refused, unknown = hinted.settled()
    assert hinted.status().retained == PROMPT + share
    assert clipped >= (HOST - 3) * PROMPT - share
    assert missing <= 1  # vLLM 0.26 computes the last block of a hit again
    assert unknown == 5
    assert refused >= 9
    assert hinted.serve(0) == [PROMPT - 1]
    assert not engine.wrong
    engine.close()


def labelled(engine: Any, fields: dict[str, Any]) -> None:
    """Requests have these fields. A salt of vLLM's would change their keys."""
    add = engine.scheduler.add_request

    def add_labelled(request: Any) -> None:
        for name, value in fields.items():
            setattr(request, name, value)
        add(request)

    engine.scheduler.add_request = add_labelled


def test_hints_of_a_router(core: Any, start_kvferryd: StartKvferryd) -> None:
    hinted = Hinted(core, start_kvferryd().directory)
    if find_spec("vllm.v1.kv_hints") is None:
        pytest.skip("this vLLM has no hints of routers")
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    action = KvHintAction("1", "kvferry.retain", "1", {"seconds": 60})
    labelled(hinted.engine, {"kv_hints": KvHintsEnvelope("1", "m", [action])})
    hinted.serve(0)
    assert hinted.status().retained == PROMPT
    hinted.engine.close()


def test_an_aborted_request_and_a_reset_end_well(core: Any, start_kvferryd: StartKvferryd) -> None:
    hinted = Hinted(core, start_kvferryd().directory)
    engine = hinted.engine
    engine.abort(engine.add(prompt(0), 9, **KEEP))
    name = engine.add(prompt(1), 9, **KEEP)
    engine.step()
    engine.abort(name)
    engine.settle()
    hinted.serve(2, **KEEP)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.runner.weights += 1
    engine.settle()
    assert hinted.status().retained == 0
    assert hinted.serve(2) == [0]
    assert not engine.wrong
    engine.close()


def test_a_retained_prompt_with_windows_is_found(core: Any, start_kvferryd: StartKvferryd) -> None:
    groups = ("full", "window")
    hinted = Hinted(core, start_kvferryd().directory, groups=groups, blocks=1 + 2 * GPU * PROMPT)
    hinted.serve(0, **KEEP)
    hinted.serve(*range(100, 100 + HOST))
    found = hinted.serve(0, 100)
    assert found[0] >= PROMPT - 2
    assert found[1] == 0
    assert not hinted.engine.wrong
    hinted.engine.close()


@pytest.mark.parametrize("groups", [("full",), ("full", "window")])
def test_random_hints_change_no_kv(
    core: Any, start_kvferryd: StartKvferryd, pytestconfig: pytest.Config, groups: tuple[str, ...]
) -> None:
    """Requests are preempted, aborted and reset, at random."""
    draw = random.Random(pytestconfig.option.seed)
    hinted = Hinted(
        core, start_kvferryd().directory, groups=groups, blocks=1 + 40 * len(groups), overlaps=True
    )
    engine = hinted.engine
    add = engine.scheduler.add_request
    choices: list[Any] = [None, {RELEASE: {}}, {PREFETCH: {}}, {RETAIN: {"seconds": 0.1}}, KEEP]

    def add_hinted(request: Any) -> None:
        request.kv_transfer_params = draw.choice(choices)
        add(request)

    engine.scheduler.add_request = add_hinted
    requests = RandomRequests(engine, draw)
    for _ in range(600):
        requests.step()
    requests.finish()
    assert engine.loaded > 0
    assert hinted.status().hints_accepted > 0
    assert not engine.wrong, f"seed {pytestconfig.option.seed}"
    engine.close()


def test_without_a_daemon_hints_are_missing(core: Any, start_kvferryd: StartKvferryd) -> None:
    daemon = start_kvferryd()
    hinted = Hinted(core, daemon.directory)
    daemon.stop()
    engine = hinted.engine
    release: dict[str, Any] = {RELEASE: {}}
    for parameters in (KEEP, release):
        name = engine.add(prompt(0), 1, **parameters)
        engine.run_until(lambda name=name: name in engine.finished)
    engine.run_until(lambda: not engine.scheduler.connector._hinted)
    engine.close()


def test_a_prefetch_reads_a_prompt_from_disk(
    core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although computing the prompt is faster."""
    monkeypatch.setattr(client_namespace, "SEARCH_TIMEOUT", TIMEOUT)
    options: dict[str, Any] = {
        "pool_bytes": 16 << 20,
        "tiers_disk_path": tmp_path / "tier",
        "tiers_disk_size": "64MiB",
        "tiers_disk_write": "write_through",
    }

    def tier(daemon: LocalDaemon) -> TierStatus:
        with OffloadClient(daemon.directory, engine="observer") as client:
            return client.status().tiers[0]

    with PatientDaemon(**options) as daemon:
        first = Hinted(core, daemon.directory, "at_once")
        first.serve(0, 1)
        until(lambda: tier(daemon).written >= 2 * PROMPT)
        first.engine.close()
    with PatientDaemon(**options) as daemon:
        until(lambda: tier(daemon).state == "on")
        second = Hinted(core, daemon.directory, "at_once")
        rate = core.kvferry_of(second.engine.scheduler.connector)._prefill_rate
        monkeypatch.setattr(rate, "seconds", lambda tokens: 1e-12 * tokens)
        assert second.serve(0) == [0]
        assert tier(daemon).skipped == PROMPT
        assert second.serve(1, **{PREFETCH: {}}) == [PROMPT - 1]
        assert tier(daemon).skipped == PROMPT
        second.engine.close()
