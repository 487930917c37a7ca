"""The connector inside vLLM's own classes, over a real daemon, without a GPU and without a model.

Skipped where vLLM is not installed: `make vllm-tests` runs it with each supported version. Its
halves are tested without vLLM in test_scheduler.py and test_worker.py.
"""

from __future__ import annotations

import inspect
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from kvferry.client import OffloadClient, Refused
from kvferry.testing.plugin import StartKvferryd
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import vllm_config

if TYPE_CHECKING:
    from support.vllm_engine import VLLMConnectorEngine

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

Start: TypeAlias = "Callable[..., VLLMConnectorEngine]"


@pytest.fixture(scope="module")
def vllm() -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; see `make vllm-tests`")
    from support import vllm_engine

    return vllm_engine


@pytest.fixture
def start(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(daemon, **Engine's options) -> Engine; all are closed after the test."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    running: list[VLLMConnectorEngine] = []

    def start_engine(daemon: Any, **options: Any) -> VLLMConnectorEngine:
        running.append(vllm.VLLMConnectorEngine(daemon.directory, **options))
        return running[-1]

    yield start_engine
    for engine in running:
        engine.close()


def fill(engine: VLLMConnectorEngine) -> None:
    """Every block its own number, in every layer."""
    for layer in engine.kv.values():
        for block in range(layer.shape[0]):
            layer[block] = block


def matches(vllm: Any, engine: VLLMConnectorEngine, number: int, blocks: int) -> Any:
    """A new request for the same prompt, and how many tokens of it are in host memory."""
    request = vllm.prompt(number, blocks)
    return request, in_the_end(engine, request)


def in_the_end(engine: VLLMConnectorEngine, request: Any) -> int | None:
    """How many tokens are in host memory, asked until some are."""
    deadline = time.monotonic() + TIMEOUT
    while not (found := engine.matched(request)) and time.monotonic() < deadline:
        engine.step()
    return found


def test_an_engine_loads_blocks_that_another_computed(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    daemon = start_kvferryd()
    first, second = start(daemon, name="one"), start(daemon, name="two")
    fill(first)
    first.compute(vllm.prompt(1, 10), range(1, 11))
    request, tokens = matches(vllm, second, 1, 10)
    assert tokens == 8 * vllm.TOKENS  # two chunks of four blocks; the tail is not offloaded
    second.load(request, range(20, 28), tokens)
    assert second.received_all(request)
    assert not second.errors
    for layer in second.kv.values():
        assert [int(layer[block].float().mean()) for block in range(20, 28)] == list(range(1, 9))


@pytest.mark.parametrize(
    ("extra", "tokens"),
    [({}, 128), ({"block_size": 16}, 160), ({"block_size": 32}, 160), ({"block_size": 128}, 128)],
)
def test_chunks_are_as_large_as_the_user_says(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd, extra: Any, tokens: int
) -> None:
    engine = start(start_kvferryd(), **extra)
    engine.compute(vllm.prompt(1, 10), range(1, 11))
    assert matches(vllm, engine, 1, 10)[1] == tokens


def test_layers_of_one_type_and_several_widths_have_the_same_chunk_on_both_sides(
    vllm: Any,
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    from kvferry.client.vllm import KVFerryConnector

    workers = vllm.kv_cache_config_of_widths(8, (8, 16))
    chunks = []
    for role, caches in (
        (KVConnectorRole.WORKER, workers),
        (KVConnectorRole.SCHEDULER, generate_scheduler_kv_cache_config([workers])),
    ):
        config = vllm_config("engine", {"kvferry_dirs": "/nowhere"})
        connector: Any = KVFerryConnector(config, role, caches)
        if role is KVConnectorRole.WORKER:
            place = connector.connector_worker.spec.engine_config
        else:
            place = connector.connector_scheduler.manager._config
        chunks.append((place.factor, place.fingerprint.host_block_bytes))
        connector.shutdown()
    assert chunks[0] == chunks[1] == (4, 4 * 3 * vllm.PAGE)


@pytest.mark.parametrize(
    ("zeroed", "computes", "order"),
    [
        ([], False, ["load", "prepare"]),
        ([40], True, ["load", "prepare"]),
        ([21], False, ["prepare", "load"]),
        ([21], True, ["prepare", "load"]),
    ],
)
def test_a_load_is_submitted_before_the_forward_pass_and_after_zeroing_of_its_blocks(
    vllm: Any,
    start: Start,
    start_kvferryd: StartKvferryd,
    zeroed: list[int],
    computes: bool,
    order: list[str],
) -> None:
    """Once."""
    engine = start(start_kvferryd())
    fill(engine)
    engine.compute(vllm.prompt(1, 4), range(1, 5))
    request, tokens = matches(vllm, engine, 1, 4)
    other = vllm.prompt(2, 1)
    engine.scheduler.on_new_request(other)
    engine.zeroed, engine.done = zeroed, []
    engine.load(request, range(20, 24), tokens, new=[(other, [9])] if computes else [])
    assert engine.done == order
    assert engine.received_all(request)
    assert engine.done.count("load") == 1
    assert not engine.errors
    assert not engine.failed


def has_failed(engine: VLLMConnectorEngine, request: Any) -> bool:
    """Whether vLLM was told that this request's load to blocks 20 to 23 failed."""
    from kvferry.client.vllm import compat

    if compat.REPORTS_FAILED_REQUESTS:
        return engine.failed == {request.request_id} and not engine.errors
    return engine.errors == {20, 21, 22, 23}


def test_a_load_that_fails_is_reported(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    daemon = start_kvferryd()
    engine = start(daemon)
    engine.compute(vllm.prompt(1, 4), range(1, 5))
    request, tokens = matches(vllm, engine, 1, 4)
    with OffloadClient(daemon.directory, engine="other") as other:  # resets behind its back
        place = engine.scheduler.connector_scheduler.manager._config
        other.open_namespace(place.fingerprint)
        other.reset()
    engine.load(request, range(20, 24), tokens)
    assert engine.received_all(request)
    assert has_failed(engine, request)
    engine.finish(request, range(20, 24))
    engine.settle()
    assert not engine.scheduler.has_pending_push_work()


def test_a_daemon_killed_with_loads_and_stores_under_way(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd, tmp_path: Path
) -> None:
    daemon = start_kvferryd(runtime_dir=tmp_path / "run")
    engine = start(daemon)
    engine.compute(vllm.prompt(1, 4), range(1, 5))
    request, tokens = matches(vllm, engine, 1, 4)
    daemon.process.send_signal(signal.SIGSTOP)
    engine.load(request, range(20, 24), tokens)
    storing = vllm.prompt(2, 4)
    engine.scheduler.on_new_request(storing)
    engine.step(new=[(storing, range(5, 9))])
    engine.step()
    daemon.kill()
    assert engine.received_all(request)
    assert has_failed(engine, request)
    deadline = time.monotonic() + TIMEOUT  # until the scheduler has noticed it, too
    while engine.matched(vllm.prompt(1, 4)) != 0 and time.monotonic() < deadline:
        engine.step()
    assert engine.matched(vllm.prompt(1, 4)) == 0
    engine.finish(request, range(20, 24))
    engine.finish(storing, [])
    start_kvferryd(runtime_dir=tmp_path / "run")
    deadline = time.monotonic() + TIMEOUT
    found = 0
    while not found and time.monotonic() < deadline:
        engine.compute(vllm.prompt(3, 4), range(1, 5))
        found = engine.matched(vllm.prompt(3, 4)) or 0
    assert found == 4 * vllm.TOKENS


def test_a_reset_with_a_load_under_way(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    engine = start(start_kvferryd())
    engine.compute(vllm.prompt(1, 4), range(1, 5))
    request, tokens = matches(vllm, engine, 1, 4)
    engine.load(request, range(20, 24), tokens)
    assert engine.scheduler.reset_cache()
    engine.step()
    assert engine.received_all(request)
    assert engine.matched(vllm.prompt(1, 4)) == 0
    engine.finish(request, range(20, 24))
    engine.settle()
    manager = engine.scheduler.connector_scheduler.manager
    deadline = time.monotonic() + TIMEOUT
    while manager.is_resetting():  # what a request offers at its end meanwhile may be dropped
        assert time.monotonic() < deadline
    engine.compute(vllm.prompt(1, 4), range(1, 5))
    assert matches(vllm, engine, 1, 4)[1] == 4 * vllm.TOKENS


def test_a_preempted_request_waits_for_its_stores(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    engine = start(start_kvferryd(reference_stall=0.2))
    request = vllm.prompt(1, 4)
    engine.scheduler.on_new_request(request)
    engine.step(new=[(request, range(1, 5))])
    engine.step(preempted=[request])  # returns when the store has ended
    engine.finish(request, range(20, 24))
    engine.settle()
    assert matches(vllm, engine, 1, 4)[1] == 4 * vllm.TOKENS


def goes_on(vllm: Any, request: Any) -> Any:
    """With four blocks that nobody has stored."""
    request.block_hashes += vllm.prompt(99, 4).block_hashes
    return request


def half_computed(vllm: Any, engine: VLLMConnectorEngine) -> Any:
    """A request that runs: four blocks are computed, and four more have room."""
    request = vllm.prompt(1, 4)
    engine.scheduler.on_new_request(request)
    engine.step(new=[(request, range(1, 9))])
    return goes_on(vllm, request)


def test_a_request_that_is_aborted_while_it_waits(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    engine = start(start_kvferryd())
    request = vllm.prompt(1, 8)
    assert engine.matched(request) == 0
    engine.end(request)
    engine.settle()
    assert engine.matched(vllm.prompt(1, 8)) == 0


def test_a_request_that_is_aborted_while_it_loads(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    engine = start(start_kvferryd())
    engine.compute(vllm.prompt(1, 4), range(1, 5))
    request, tokens = matches(vllm, engine, 1, 4)
    goes_on(vllm, request)
    engine.load(request, range(20, 24), tokens)
    request.num_computed_tokens = tokens
    engine.end(request, range(20, 24))
    assert engine.received_all(request)
    engine.settle()
    assert not engine.scheduler.has_pending_push_work()
    assert matches(vllm, engine, 1, 4)[1] == 4 * vllm.TOKENS


def test_a_request_that_is_aborted_when_it_was_preempted(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    """Its blocks are somebody else's."""
    engine = start(start_kvferryd())
    request = half_computed(vllm, engine)
    engine.step(preempted=[request])
    request.num_computed_tokens = 0
    engine.end(request)
    engine.settle()
    request = goes_on(vllm, vllm.prompt(1, 4))
    assert in_the_end(engine, request) == 4 * vllm.TOKENS


def test_the_kv_of_the_last_token_is_in_no_block(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    """It was sampled, and nothing came after it."""
    engine = start(start_kvferryd())
    request = half_computed(vllm, engine)
    request.num_computed_tokens = request.num_tokens - 1
    engine.end(request, range(1, 9))
    engine.settle()
    request = goes_on(vllm, vllm.prompt(1, 4))
    assert in_the_end(engine, request) == 4 * vllm.TOKENS


def test_what_loads_save_is_reported(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    engine = start(start_kvferryd())
    engine.compute(vllm.prompt(1, 8), range(1, 9))
    request, tokens = matches(vllm, engine, 1, 8)
    engine.scheduler._prefill_rate._rates.append(1000.0)
    engine.load(request, range(20, 28), tokens)
    assert engine.received_all(request)
    engine.step()
    client = engine.scheduler.connector_scheduler.manager._manager._clients[0]
    with OffloadClient(client.directory, engine="reader") as reader:
        (status,) = reader.namespaces()
    assert (status.saved_tokens, status.saved_seconds) == (tokens, tokens / 1000)


def test_blocks_of_generated_tokens_are_used_but_not_looked_up(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three chunks of a request the prompt has one and a half."""
    from kvferry.client.vllm import compat

    if compat.TOUCHES_KEYS:
        pytest.skip("this vLLM touches the keys of prompts only")
    engine = start(start_kvferryd())
    monkeypatch.setattr(vllm.FakeRequest, "num_prompt_tokens", 6 * vllm.TOKENS)
    request = vllm.prompt(1, 12)
    engine.scheduler.on_new_request(request)
    engine.step(new=[(request, range(1, 13))])
    request.num_computed_tokens = request.num_tokens
    engine.scheduler.request_finished(request, list(range(1, 13)))
    touched = engine.scheduler.connector_scheduler.manager._manager._uses._touched
    assert [*touched.values()] == [True, True, False]  # the first chunk is the most recent


def test_under_multi_connector_its_statistics_are_read(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    """In another process than that which made them, by the name of their connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    engine = start(start_kvferryd())
    engine.compute(vllm.prompt(1, 4), range(1, 5))
    said = engine.scheduler.get_kv_connector_stats()
    assert said is not None
    nested = 'stats_value["data"]' in inspect.getsource(MultiConnector.build_kv_connector_stats)
    sent = {"KVFerryConnector": {"data": said.data} if nested else said.data}
    assert MultiConnector.build_kv_connector_stats(sent).data["KVFerryConnector"].data == said.data


def test_our_spec_is_not_for_vllms_own_connector(vllm: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    from kvferry.client import Code

    extra = {"spec_name": "KVFerrySpec", "spec_module_path": "kvferry.client.vllm"}
    config, caches = vllm_config("engine", extra), vllm.kv_cache_config(8)
    with pytest.raises(Refused, match="KVFerryConnector") as refused:
        OffloadingConnector(config, KVConnectorRole.SCHEDULER, caches)
    assert refused.value.code == Code.BAD_CONFIG


def test_vllms_own_metrics_are_filled(
    vllm: Any, start: Start, start_kvferryd: StartKvferryd
) -> None:
    """Those of transfers and of the host tier, each defined in the front end."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        get_connector_metric_definitions,
    )

    from kvferry.client.vllm import KVFerrySpec

    engine = start(start_kvferryd())
    engine.compute(vllm.prompt(1, 4), range(1, 5))
    request, tokens = matches(vllm, engine, 1, 4)
    engine.load(request, range(20, 24), tokens)
    assert engine.received_all(request)
    said = engine.scheduler.get_kv_connector_stats().data
    found = said["data"] if "types" in said else said
    defined = get_connector_metric_definitions() | KVFerrySpec.build_metric_definitions({})
    assert found.keys() <= defined.keys()
    assert {
        "vllm:kv_offload_load_bytes",
        "vllm:kv_offload_store_bytes",
        "vllm:kv_offload_cpu_allocation_size",
        "vllm:kv_offload_cpu_cache_usage_perc",
    } <= found.keys()
    # The front end has a configuration of its own, which no connector was created with.
    front = vllm_config("engine", {})
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = engine.scheduler.build_prom_metrics(front, types, ["engine"], {0: ["0"]})
    metrics.observe(said)
    loaded = REGISTRY.get_sample_value("vllm:kv_offload_load_bytes_total", {"engine": "0"})
    assert loaded == 4 * len(vllm.LAYERS) * vllm.PAGE
    labels = {"engine": "0", "transfer_type": "CPU_to_GPU"}
    assert REGISTRY.get_sample_value("vllm:kv_offload_total_bytes_total", labels) == loaded
