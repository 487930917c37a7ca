"""Engines that only store or only load, and requests whose KV another connector loads."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPT = [n * 11 % 900 for n in range(200)]


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def run(engine: Any) -> int:
    """The number of tokens that are found for the prompt, not counting the GPU's cache."""
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    (found,) = engine.run(PROMPT)
    engine.settle()
    assert not engine.wrong
    return int(found)


@pytest.mark.parametrize("groups", [("full",), ("full", "window")])
def test_a_producer_only_stores_and_a_consumer_only_loads(
    core: Any, start_kvferryd: StartKvferryd, groups: tuple[str, ...]
) -> None:
    daemon = start_kvferryd()
    consumer = core.EngineCore(daemon.directory, groups, kv_role="kv_consumer")
    assert [run(consumer), run(consumer)] == [0, 0]  # it has stored nothing
    assert consumer.known_chunks() == 0
    producer = core.EngineCore(daemon.directory, groups, kv_role="kv_producer")
    assert [run(producer), run(producer)] == [0, 0]  # it does not look up
    consumer.run_until(lambda: consumer.known_chunks() == producer.known_chunks() > 0)
    assert run(consumer) == 192
    producer.close()
    consumer.close()


def test_a_request_that_waits_for_a_prefill_engine_is_not_looked_up(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    engine = core.EngineCore(start_kvferryd().directory, ("full",))
    run(engine)
    assert run(engine) == 192
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    name = engine.add(PROMPT, do_remote_prefill=True)
    engine.run_until(lambda: name in engine.finished)
    assert engine.finished[name] == 0
    # The other connector has cleared the key, and its load has failed.
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    name = engine.add(PROMPT, do_remote_prefill=False)
    engine.run_until(lambda: name in engine.finished)
    assert engine.finished[name] == 192
    engine.close()
