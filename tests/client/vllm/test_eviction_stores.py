"""Stores at eviction, through vLLM's own scheduler and block pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from kvferry.testing.engine import until
from support.vllm_stand_ins import prompt

TOKENS, CHUNK = 16, 4
# Each GPU and each host memory has room for so many prompts of PROMPT blocks.
PROMPT, PROMPTS = 8, 40
# More than one memory has room for, and fewer than both, less what is stored early.
MANY = 55
BLOCKS, LARGE = 1 + PROMPT * PROMPTS, 1 + 100 * PROMPT
Opened: TypeAlias = Callable[..., Any]


@pytest.fixture
def opened(core: Any, start: Any) -> Opened:
    """opened(mode, *groups) -> an engine whose host memory is as large as the GPU's cache."""

    def open_engine(
        mode: str, *groups: str, chunk: int = 1, blocks: int = BLOCKS, **options: Any
    ) -> Any:
        extra = {"kvferry_store": mode, "blocks_per_chunk": chunk}
        host_bytes = PROMPTS * PROMPT * core.PAGE
        return start(*groups, blocks=blocks, host_bytes=host_bytes, extra=extra, **options)

    return open_engine


def serve(engine: Any, numbers: range) -> list[int]:
    """Serve prompts, one after the other. Returns the blocks of each that were found."""
    found = []
    for number in numbers:
        found.append(engine.run(prompt(number, PROMPT * TOKENS))[0] // TOKENS)
        engine.settle()
    return found


@pytest.mark.parametrize(("mode", "chunk"), [("auto", 1), ("at_eviction", CHUNK)])
def test_the_gpu_and_host_memory_have_different_prompts(
    opened: Opened, mode: str, chunk: int
) -> None:
    """Prompts in turn."""
    engine = opened(mode, chunk=chunk)
    serve(engine, range(MANY))
    serve(engine, range(MANY))
    found = serve(engine, range(MANY))
    assert sum(found) >= MANY * (PROMPT - chunk), found


def test_nothing_is_stored_before_its_eviction(opened: Opened) -> None:
    engine = opened("at_eviction", blocks=LARGE)
    serve(engine, range(4))
    assert engine.known_chunks() == 0


def test_auto_stores_at_once_while_there_is_room(opened: Opened) -> None:
    engine = opened("auto", blocks=LARGE)
    serve(engine, range(PROMPTS))
    until(lambda: engine.known_chunks() == PROMPTS * PROMPT)
    serve(engine, range(PROMPTS, 2 * PROMPTS))
    assert engine.known_chunks() == PROMPTS * PROMPT
    assert serve(engine, range(PROMPTS)) == [PROMPT - 1] * PROMPTS


def test_auto_stores_at_once_what_a_sibling_waits_for(opened: Opened) -> None:
    engine = opened("auto", blocks=LARGE)
    serve(engine, range(PROMPTS))
    for client in engine.manager.clients:
        client.namespace.is_shared = True
    serve(engine, range(100, 100 + PROMPTS))
    chunks = engine.scheduler.connector._late.noted._noted.values()
    newest = {chunk.key for chunk in [*chunks][-PROMPT:]}
    assert newest <= set(engine.manager.ready_keys[0])


def test_what_was_loaded_is_stored_again_if_host_memory_has_evicted_it(opened: Opened) -> None:
    engine = opened("at_eviction")
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


@pytest.fixture
def handled_signal() -> Iterator[list[int]]:
    """vLLM's engine process handles SIGTERM. Returns the signals that reach its handler."""
    received = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_an_engine_that_ends_stores_what_only_its_gpu_has(
    opened: Opened, handled_signal: list[int]
) -> None:
    first = opened("at_eviction")
    serve(first, range(6))
    connector = first.scheduler.connector
    assert not connector.has_pending_push_work()
    os.kill(os.getpid(), signal.SIGTERM)
    assert connector.has_pending_push_work()
    first.settle()
    assert handled_signal == [signal.SIGTERM]
    first.close()
    second = opened("at_eviction")
    until(lambda: second.known_chunks() == 6 * PROMPT)
    assert serve(second, range(6)) == [PROMPT - 1] * 6


def test_a_reset_forgets_what_was_to_be_stored(opened: Opened) -> None:
    engine = opened("at_eviction")
    serve(engine, range(MANY))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.runner.weights += 1
    serve(engine, range(100, 100 + MANY))
    assert serve(engine, range(9)) == [0] * 9


def test_models_whose_blocks_change_early_store_at_once(
    core: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not core.ONE_ALLOCATION:
        pytest.skip("this vLLM lets a connector wait for stores before it writes blocks")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine = opened("at_eviction", "full", "narrow", blocks=999)
    serve(engine, range(2))
    assert engine.known_chunks() > 0
