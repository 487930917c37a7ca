"""Prompts whose drafting layers' KV alone is not in host memory."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPT = [n * 7 % 900 for n in range(200)]
DRAFT, TARGET = -1, 0  # of the groups


@pytest.mark.parametrize(("lost", "counted"), [(DRAFT, 2), (TARGET, 0), (None, 0)])
def test_requests_that_miss_the_draft_alone_are_counted_and_warned_of_once(
    core: Any,
    start_kvferryd: StartKvferryd,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: int | None,
    counted: int,
) -> None:
    from kvferry.client.vllm import KVFerrySpec
    from kvferry.client.vllm.draft_groups import DRAFT_MISSES

    misses = []

    class CountingEngine(core.EngineCore):  # type: ignore[misc]  # vLLM has no types
        def _count_sources(self, stats: Any) -> None:
            values = (getattr(stats, "kv_connector_stats", None) or {}).get("data", {})
            misses.extend(values.get(DRAFT_MISSES, {}).values())

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    # Before 0.29 vLLM plans only groups of different kinds.
    groups = ("full", "draft") if core.ONE_ALLOCATION else ("full", "window", "draft")
    engine = CountingEngine(start_kvferryd().directory, groups, host_bytes=4 << 20, drafts=2)
    side = core.kvferry_of(engine.scheduler.connector).connector_scheduler.manager
    if lost is not None:
        # The group's stores fail.
        offer = side.offer_keys
        end = range(len(groups))[lost].to_bytes(4, "big")
        monkeypatch.setattr(
            side,
            "offer_keys",
            lambda keys, *rest, **named: offer(
                [key for key in keys if key[-4:] != end], *rest, **named
            ),
        )
    engine.run(PROMPT)
    engine.settle()
    found = []
    for _ in range(2):
        assert engine.scheduler.reset_prefix_cache()
        found += engine.run(PROMPT)
        engine.settle()
    assert found == [0, 0] if lost is not None else min(found) >= 128
    assert sum(misses) == counted
    assert caplog.text.count("none of its drafting layers") == (counted > 0)
    assert DRAFT_MISSES in KVFerrySpec.build_metric_definitions({})
    engine.close()
