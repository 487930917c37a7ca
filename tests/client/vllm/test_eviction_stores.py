"""Stores at eviction, through vLLM's own scheduler and block pool."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.vllm_traffic import RandomRequests

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

TOKENS, CHUNK = 16, 4
# Each GPU and each host memory has room for so many prompts of PROMPT blocks.
PROMPT, PROMPTS = 8, 40
# More than one memory has room for, and fewer than both, less what is stored early.
MANY = 55
BLOCKS = 1 + PROMPT * PROMPTS


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def prompt(number: int) -> list[int]:
    return [number + 1, *((number * 31 + n) % 900 for n in range(1, PROMPT * TOKENS))]


def start(core: Any, directory: object, mode: str, chunk: int = 1, **options: Any) -> Any:
    """An engine with stores of a mode, whose host memory is as large as the GPU's cache."""
    host_bytes = PROMPTS * PROMPT * core.PAGE
    extra = core.kvferry_options(directory, host_bytes)
    extra |= {"kvferry_store": mode, "blocks_per_chunk": chunk}
    options = {"blocks": BLOCKS} | options
    groups = options.pop("groups", ("full",))
    return core.EngineCore(directory, groups, kv_connector_extra_config=extra, **options)


def serve(engine: Any, numbers: range) -> list[int]:
    """Serve prompts, one after the other. Returns the blocks of each that were found."""
    found = []
    for number in numbers:
        found.append(engine.run(prompt(number))[0] // TOKENS)
        engine.settle()
    return found


@pytest.mark.parametrize("chunk", [1, CHUNK])
@pytest.mark.parametrize("mode", ["auto", "at_eviction"])
def test_the_gpu_and_host_memory_have_different_prompts(
    core: Any, start_kvferryd: StartKvferryd, mode: str, chunk: int
) -> None:
    """Prompts in turn."""
    engine = start(core, start_kvferryd().directory, mode, chunk)
    serve(engine, range(MANY))
    serve(engine, range(MANY))
    found = serve(engine, range(MANY))
    assert sum(found) >= MANY * (PROMPT - chunk), found
    assert not engine.wrong
    engine.close()


def test_stored_at_once_host_memory_repeats_the_gpu(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    engine = start(core, start_kvferryd().directory, "at_once")
    serve(engine, range(MANY))
    serve(engine, range(MANY))
    assert sum(serve(engine, range(MANY))) == 0
    engine.close()


def test_nothing_is_stored_before_its_eviction(core: Any, start_kvferryd: StartKvferryd) -> None:
    engine = start(core, start_kvferryd().directory, "at_eviction", blocks=1 + 100 * PROMPT)
    serve(engine, range(4))
    assert engine.known_chunks() == 0
    engine.close()


def test_auto_stores_at_once_while_there_is_room(core: Any, start_kvferryd: StartKvferryd) -> None:
    engine = start(core, start_kvferryd().directory, "auto", blocks=1 + 100 * PROMPT)
    serve(engine, range(PROMPTS))
    until(lambda: engine.known_chunks() == PROMPTS * PROMPT)
    serve(engine, range(PROMPTS, 2 * PROMPTS))
    assert engine.known_chunks() == PROMPTS * PROMPT
    assert serve(engine, range(PROMPTS)) == [PROMPT - 1] * PROMPTS
    engine.close()


def test_auto_stores_at_once_what_a_sibling_waits_for(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    engine = start(core, start_kvferryd().directory, "auto", blocks=1 + 100 * PROMPT)
    serve(engine, range(PROMPTS))
    for client in engine.manager.clients:
        client.namespace.is_shared = True
    serve(engine, range(100, 100 + PROMPTS))
    keys = engine.manager.ready_keys[0]
    chunks = engine.scheduler.connector._late.noted._noted.values()
    newest = {chunk.key for chunk in [*chunks][-PROMPT:]}
    assert newest <= set(keys)
    engine.close()


def test_what_was_loaded_is_stored_again_if_host_memory_has_evicted_it(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    engine = start(core, start_kvferryd().directory, "at_eviction")
    serve(engine, range(MANY))  # the first ones are in host memory
    assert serve(engine, range(1)) == [PROMPT - 1]
    # Host memory gets others, while the GPU has it.
    for number in range(100, 100 + 2 * PROMPTS):
        serve(engine, range(number, number + 1))
        if number % 10 == 0:
            serve(engine, range(1))
    assert serve(engine, range(200, 200 + PROMPTS)) == [0] * PROMPTS
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    assert serve(engine, range(1)) == [PROMPT - 1]
    assert not engine.wrong
    engine.close()


@pytest.fixture
def handled_signal() -> Iterator[list[int]]:
    """vLLM's engine process handles SIGTERM. Returns the signals that reach its handler."""
    received = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_an_engine_that_ends_stores_what_only_its_gpu_has(
    core: Any, start_kvferryd: StartKvferryd, handled_signal: list[int]
) -> None:
    directory = start_kvferryd().directory
    first = start(core, directory, "at_eviction")
    serve(first, range(6))
    connector = first.scheduler.connector
    assert not connector.has_pending_push_work()
    os.kill(os.getpid(), signal.SIGTERM)
    assert connector.has_pending_push_work()
    first.settle()
    assert handled_signal == [signal.SIGTERM]
    first.close()
    second = start(core, directory, "at_eviction")
    until(lambda: second.known_chunks() == 6 * PROMPT)
    assert serve(second, range(6)) == [PROMPT - 1] * 6
    assert not first.wrong + second.wrong
    second.close()


def test_a_reset_forgets_what_was_to_be_stored(core: Any, start_kvferryd: StartKvferryd) -> None:
    engine = start(core, start_kvferryd().directory, "at_eviction")
    serve(engine, range(MANY))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.runner.weights += 1
    serve(engine, range(100, 100 + MANY))
    assert serve(engine, range(9)) == [0] * 9
    assert not engine.wrong
    engine.close()


@pytest.mark.parametrize("chunk", [1, CHUNK])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("groups", [("full",), ("full", "window")])
def test_nothing_wrong_is_read(
    core: Any,
    start_kvferryd: StartKvferryd,
    pytestconfig: pytest.Config,
    groups: tuple[str, ...],
    overlaps: bool,
    chunk: int,
) -> None:
    """Requests are preempted, aborted and reset, at random, and host memory is small."""
    engine = start(
        core,
        start_kvferryd().directory,
        "at_eviction",
        chunk,
        groups=groups,
        overlaps=overlaps,
        blocks=1 + 40 * len(groups),
    )
    requests = RandomRequests(engine, random.Random(pytestconfig.option.seed))
    for _ in range(1500):
        requests.step()
    requests.finish()
    assert engine.loaded > 0
    assert not engine.wrong, f"seed {pytestconfig.option.seed}"
    engine.close()


def test_models_whose_blocks_change_early_store_at_once(
    core: Any, start_kvferryd: StartKvferryd, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not core.ONE_ALLOCATION:
        pytest.skip("this vLLM lets a connector wait for stores before it writes blocks")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    groups = ("full", "narrow")
    engine = start(core, start_kvferryd().directory, "at_eviction", groups=groups, blocks=999)
    serve(engine, range(2))
    assert engine.known_chunks() > 0
    engine.close()
