"""Host hits, failed loads, chunks, recency and metrics, through vLLM's own scheduler."""

from __future__ import annotations

import inspect
import logging
import signal
from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd
from support.vllm_stand_ins import prompt, vllm_config

PROMPTS = [prompt(number) for number in range(4)]
GROUPS = [("full",), ("full", "window")]


@pytest.mark.parametrize("groups", GROUPS)
def test_an_engine_reads_what_another_has_stored(
    core: Any, start: Any, groups: tuple[str, ...]
) -> None:
    first = start(*groups)
    assert first.run(*PROMPTS) == [0] * 4
    first.settle()
    first.close()
    second = start(*groups)
    cached = second.run(*PROMPTS)
    assert min(cached) >= 128
    if core.compat.HOST_SOURCE is not None:
        assert second.sources == {"host": sum(cached)}


def test_vllms_log_says_that_it_works(
    core: Any, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """caplog sees what vLLM's logger passes on."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")
    engine = start()
    engine.run(PROMPTS[0])
    assert "first load" not in caplog.text
    engine.run_anew(PROMPTS[0])
    engine.settle()
    tokens = (1 << 20) // (4 * core.PAGE) * 64
    assert f"kvferry: 1 MiB of host memory, {tokens:,} tokens, namespace " in caplog.text
    assert f"daemon {engine.manager.clients[0].directory} (" in caplog.text
    assert "kvferry: first load from host memory: 768 B in " in caplog.text


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_requests_whose_loads_are_lost_are_computed(
    core: Any,
    start: Any,
    start_kvferryd: StartKvferryd,
    groups: tuple[str, ...],
    overlaps: bool,
) -> None:
    if len(groups) > 1 and not core.compat.REPORTS_FAILED_REQUESTS:
        pytest.skip("this vLLM ends the engine")
    daemon = start_kvferryd()
    engine = start(*groups, directory=daemon.directory, overlaps=overlaps)
    engine.run(*PROMPTS)
    while not min(engine.run_anew(*PROMPTS)):  # until the mirror has all keys
        pass
    engine.settle()
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    daemon.process.send_signal(signal.SIGSTOP)
    names = [engine.add(one) for one in PROMPTS]
    for _ in range(3):
        engine.step()
    assert engine.worker.connector_worker._load_jobs  # in flight
    daemon.kill()
    engine.run_until(lambda: all(name in engine.finished for name in names))


@pytest.mark.parametrize("is_written", [False, True])
def test_a_load_is_submitted_before_the_forward_pass_unless_vllm_writes_its_blocks(
    core: Any, start: Any, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """vLLM calls start_load_kv after it has written blocks."""
    engine = start()
    engine.run(PROMPTS[0])
    written = range(128) if is_written else range(1)
    monkeypatch.setattr(core.compat, "written_blocks", lambda _: {*written})
    done: list[str] = []
    for owner, name in (
        (engine.worker, "handle_preemptions"),
        (engine.worker, "start_load_kv"),
        (engine.worker.connector_worker.worker, "submit_load"),
    ):
        call = getattr(owner, name)

        def note(*job: Any, name: str = name, call: Any = call) -> Any:
            done.append(name)
            return call(*job)

        monkeypatch.setattr(owner, name, note)
    assert engine.run_anew(PROMPTS[0]) == [192]
    assert done.count("submit_load") == 1
    before = done[done.index("submit_load") - 1]
    assert before == ("start_load_kv" if is_written else "handle_preemptions")


def test_a_prompt_that_the_gpu_served_is_evicted_last(core: Any, start: Any) -> None:
    """If chunks are stored at once. Host memory has room for 16, and a prompt has three."""
    host_bytes = 16 * 4 * core.PAGE
    engine = start(host_bytes=host_bytes, extra={"kvferry_store": "at_once"})
    first, second, *others = [prompt(number) for number in range(10, 16)]
    for one in (first, second, first, *others):
        engine.run(one)
        engine.settle()
    engine.close()
    later = start(host_bytes=host_bytes)
    assert later.run(first, second) == [192, 64]


@pytest.mark.parametrize(
    ("groups", "extra", "found"),
    [
        (("full",), {}, 192),
        (("full",), {"block_size": 16}, 208),
        (("full",), {"block_size": 128}, 128),
        (("full",), {"blocks_per_chunk": 4}, 192),
        (("window",), {"block_size": 64}, 192),
        (("full", "window"), {"block_size": 64}, 192),
        (("full", "window"), {}, 208),
        # Mamba states in the mode "align" are those of single blocks.
        (("full", "aligned states"), {"blocks_per_chunk": 4}, 208),
        (("full", "aligned states"), {"block_size": 64}, 208),
    ],
)
def test_whole_chunks_are_found_again(
    core: Any,
    start: Any,
    caplog: pytest.LogCaptureFixture,
    groups: tuple[str, ...],
    extra: dict[str, int],
    found: int,
) -> None:
    aligned = "aligned states" in groups
    if aligned and not core.compat.OFFLOADS_MAMBA_STATES:
        pytest.skip("kvferry refuses Mamba with this vLLM")
    engine = start(*groups, extra=extra)
    engine.run(prompt(0, 216))
    assert engine.run_anew(prompt(0, 216)) == [found]
    for key, value in extra.items():
        assert (f"{key} = {value} is ignored" in caplog.text) is aligned


def test_the_kv_of_the_last_token_is_in_no_block(start: Any) -> None:
    """It was sampled, and nothing followed it."""
    engine = start(extra={"block_size": 16})
    first, output = prompt(0, 60), [60, 61, 62, 63]
    engine.run(first)
    assert engine.run_anew([*first, *output, *prompt(1)]) == [48]


def test_blocks_of_generated_tokens_are_used_but_not_looked_up(
    core: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three chunks of a request the prompt has one and a half."""
    if core.compat.TOUCHES_KEYS:
        pytest.skip("this vLLM touches the keys of prompts only")
    engine, touched = start(), list[tuple[int, int]]()
    monkeypatch.setattr(
        engine.manager, "touch", lambda keys, new=0: touched.append((len(keys), new))
    )
    name = engine.add(prompt(0, 96), 97)
    engine.run_until(lambda: name in engine.finished)
    assert touched == [(3, 2)]


# Metrics


def test_what_loads_save_is_reported(
    core: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    engine.run(PROMPTS[0])
    rate = core.kvferry_of(engine.scheduler.connector)._prefill_rate
    monkeypatch.setattr(rate, "seconds", lambda tokens: tokens / 1000)
    assert engine.run_anew(PROMPTS[0]) == [192]
    engine.settle()
    status = engine.namespace()
    assert (status.saved_tokens, status.saved_seconds) == (192, 0.192)


@pytest.fixture
def measured(start: Any) -> Any:
    """An engine that has stored and loaded three chunks."""
    engine = start()
    engine.run(PROMPTS[0])
    assert engine.run_anew(PROMPTS[0]) == [192]
    engine.settle()
    return engine


def test_under_multi_connector_its_statistics_are_read(core: Any, measured: Any) -> None:
    """In another process than that which made them, by the name of their connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    said = measured.connector_stats[0]
    nested = 'stats_value["data"]' in inspect.getsource(MultiConnector.build_kv_connector_stats)
    sent = {"KVFerryConnector": {"data": said} if nested else said}
    assert MultiConnector.build_kv_connector_stats(sent).data["KVFerryConnector"].data == said


def test_vllms_own_metrics_are_filled(core: Any, measured: Any) -> None:
    """Those of transfers and of the host tier, each defined in the front end."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        get_connector_metric_definitions,
    )

    from kvferry.client.vllm import KVFerrySpec

    found = {name for said in measured.connector_stats for name in said.get("data", said)}
    defined = get_connector_metric_definitions() | KVFerrySpec.build_metric_definitions({})
    assert found <= defined.keys()
    assert {
        "vllm:kv_offload_load_bytes",
        "vllm:kv_offload_store_bytes",
        "vllm:kv_offload_cpu_allocation_size",
        "vllm:kv_offload_cpu_cache_usage_perc",
    } <= found
    # The front end has a configuration of its own, which no connector was created with.
    front = vllm_config("engine", {})
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    connector = measured.scheduler.connector
    metrics = connector.build_prom_metrics(front, types, ["engine"], {0: ["0"]})
    for said in measured.connector_stats:
        metrics.observe(said)
    loaded = REGISTRY.get_sample_value("vllm:kv_offload_load_bytes_total", {"engine": "0"})
    assert loaded == 3 * 4 * core.PAGE
    labels = {"engine": "0", "transfer_type": "CPU_to_GPU"}
    assert REGISTRY.get_sample_value("vllm:kv_offload_total_bytes_total", labels) == loaded
