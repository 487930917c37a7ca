"""Host hits, failed loads and recency, through vLLM's own scheduler."""

from __future__ import annotations

import logging
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def prompt(number: int) -> list[int]:
    """Of 200 tokens."""
    return [(number * 37 + n * 11) % 900 for n in range(200)]


PROMPTS = [prompt(number) for number in range(4)]
GROUPS = [("full",), ("full", "window")]


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize("groups", GROUPS)
def test_an_engine_reads_what_another_has_stored(
    core: Any, start_kvferryd: StartKvferryd, groups: tuple[str, ...]
) -> None:
    from kvferry.client.vllm import compat

    daemon = start_kvferryd()
    first = core.EngineCore(daemon.directory, groups)
    assert first.run(*PROMPTS) == [0] * 4
    first.settle()
    first.close()
    second = core.EngineCore(daemon.directory, groups)
    cached = second.run(*PROMPTS)
    assert min(cached) >= 128
    if compat.HOST_SOURCE is not None:
        assert second.sources == {"host": sum(cached)}
    assert not first.wrong + second.wrong
    second.close()


def test_vllms_log_says_that_it_works(
    core: Any,
    start_kvferryd: StartKvferryd,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """caplog sees what vLLM's logger passes on."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")
    daemon = start_kvferryd()
    engine = core.EngineCore(daemon.directory, ("full",))
    engine.run(PROMPTS[0])
    engine.settle()
    assert "first load" not in caplog.text
    engine.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.run(PROMPTS[0])
    engine.settle()
    chunk = 4 * core.PAGE
    tokens = (1 << 20) // chunk * 64
    assert f"kvferry: 1 MiB of host memory, {tokens:,} tokens, namespace " in caplog.text
    assert f"daemon {daemon.directory} (" in caplog.text
    assert "kvferry: first load from host memory: 768 B in " in caplog.text
    engine.close()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_requests_whose_loads_are_lost_are_computed(
    core: Any,
    start_kvferryd: StartKvferryd,
    tmp_path: Path,
    groups: tuple[str, ...],
    overlaps: bool,
) -> None:
    from kvferry.client.vllm import compat

    if len(groups) > 1 and not compat.REPORTS_FAILED_REQUESTS:
        pytest.skip("this vLLM ends the engine")
    daemon = start_kvferryd(runtime_dir=tmp_path / "run")
    engine = core.EngineCore(daemon.directory, groups, overlaps=overlaps)
    engine.run(*PROMPTS)
    found = [0]
    while not min(found):  # until the mirror has all keys
        engine.settle()
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
        found = engine.run(*PROMPTS)
    engine.settle()
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    daemon.process.send_signal(signal.SIGSTOP)
    names = [engine.add(one) for one in PROMPTS]
    for _ in range(3):
        engine.step()
    assert engine.worker.connector_worker._load_jobs  # in flight
    daemon.kill()
    engine.run_until(lambda: all(name in engine.finished for name in names))
    assert not engine.wrong
    engine.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("groups", GROUPS)
def test_nothing_is_stored_from_a_block_that_another_request_holds(
    core: Any, start_kvferryd: StartKvferryd, groups: tuple[str, ...], seed: int
) -> None:
    """Requests decode past their windows and are preempted, aborted and reset, at random."""
    from kvferry.client.vllm import compat

    engine = core.EngineCore(start_kvferryd().directory, groups, blocks=48, host_bytes=4 << 20)
    rng, running = random.Random(seed), set[str]()
    for _ in range(400):
        running -= engine.finished.keys()
        if len(running) < 6 and rng.random() < 0.4:
            prefix = prompt(rng.randrange(4))[: rng.randrange(20, 120)]
            running.add(engine.add(prefix, rng.choice((4, 60, 150))))
        if running and rng.random() < 0.02:
            name = rng.choice(sorted(running))
            running.remove(name)
            engine.abort(name)
        if rng.random() < 0.03:
            if len(groups) > 1 and not compat.REPORTS_FAILED_REQUESTS:  # a failed load ends it
                engine.run_until(lambda: not engine.waits_for_loads())
            # vLLM cannot preempt a request whose load is in flight.
            preempt = rng.random() < 0.3 and not engine.waits_for_loads()
            engine.scheduler.reset_prefix_cache(preempt, reset_connector=True)
        engine.step()
    engine.run_until(lambda: running <= engine.finished.keys())
    for _ in range(4):  # what was stored is also read
        engine.settle()
        engine.scheduler.kv_cache_manager.reset_prefix_cache()
        engine.run(*(prompt(number)[:120] for number in range(4)))
    assert not engine.wrong
    engine.close()


def test_a_prompt_that_the_gpu_served_is_evicted_last(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    """If chunks are stored at once. Host memory has room for 16, and a prompt has three."""
    daemon = start_kvferryd()
    host_bytes = 16 * 4 * core.PAGE
    extra = core.kvferry_options(daemon.directory, host_bytes) | {"kvferry_store": "at_once"}
    engine = core.EngineCore(daemon.directory, ("full",), kv_connector_extra_config=extra)
    first, second, *others = [prompt(number) for number in range(10, 16)]
    for one in (first, second, first, *others):
        engine.run(one)
        engine.settle()
    engine.close()
    later = core.EngineCore(daemon.directory, ("full",), host_bytes=host_bytes)
    assert later.run(first, second) == [192, 64]
    assert not engine.wrong + later.wrong
    later.close()


@pytest.mark.parametrize("option", [{"blocks_per_chunk": 4}, {"block_size": 64}])
@pytest.mark.parametrize(
    "groups", [("full",), ("window",), ("full", "window"), ("full", "aligned states")]
)
def test_with_larger_chunks_prompts_are_found_again(
    core: Any,
    start_kvferryd: StartKvferryd,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    groups: tuple[str, ...],
    option: dict[str, int],
) -> None:
    """With Mamba states in the mode "align", a chunk is one block, and the log says so."""
    from kvferry.client.vllm import compat

    aligned = "aligned states" in groups
    if aligned and not compat.OFFLOADS_MAMBA_STATES:
        pytest.skip("kvferry refuses Mamba with this vLLM")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    directory = start_kvferryd().directory
    extra = core.kvferry_options(directory, 1 << 20) | option
    engine = core.EngineCore(directory, groups, kv_connector_extra_config=extra)
    engine.run(PROMPTS[0])
    engine.settle()
    engine.scheduler.kv_cache_manager.reset_prefix_cache()
    assert engine.run(PROMPTS[0]) == [192]
    (key,) = option
    assert (f"{key} = {option[key]} is ignored" in caplog.text) is aligned
    assert not engine.wrong
    engine.close()
