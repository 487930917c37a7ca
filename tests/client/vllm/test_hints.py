"""Hints in requests, through vLLM's own scheduler, a worker and a daemon."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias

import pytest

from kvferry.client.vllm.hinted_prefixes import HINT_COUNTERS
from kvferry.client.vllm.request_hints import RELEASE, RETAIN
from kvferry.testing.plugin import StartKvferryd
from support.vllm_stand_ins import prompt

TOKENS = 16
# Blocks of a prompt; prompts for which the GPU and host memory have room.
PROMPT, GPU, HOST = 8, 10, 24
KEEP = {RETAIN: {"seconds": 600}}
Hinted: TypeAlias = Callable[..., Any]


@pytest.fixture
def hinted(core: Any, start: Any) -> Hinted:
    """hinted(*groups, mode=when it stores) -> an engine."""

    def open_engine(*groups: str, mode: str = "at_eviction", **options: Any) -> Any:
        extra = {"kvferry_store": mode, "blocks_per_chunk": 1}
        blocks = 1 + GPU * PROMPT * max(1, len(groups))
        host_bytes = HOST * PROMPT * core.PAGE
        return start(*groups, blocks=blocks, host_bytes=host_bytes, extra=extra, **options)

    return open_engine


def serve(engine: Any, *numbers: int, **parameters: Any) -> list[int]:
    """Serve prompts, one after the other. Returns the blocks of each that were found."""
    found = []
    for number in numbers:
        name = engine.add(prompt(number, PROMPT * TOKENS), 1, **parameters)
        engine.run_until(lambda name=name: name in engine.finished)
        engine.settle()
        found.append(engine.finished[name] // TOKENS)
    return found


def counts(engine: Any) -> list[int]:
    """What became of hints, when all answers have arrived."""
    engine.run_until(lambda: not engine.scheduler.connector._hinted._unanswered)
    serve(engine, 900)  # vLLM reports its counters with a request
    return [engine.counted(name) for name in HINT_COUNTERS]


@pytest.mark.parametrize("mode", ["at_eviction", "at_once"])
def test_a_retained_prompt_outlives_all_others(hinted: Hinted, mode: str) -> None:
    engine = hinted(mode=mode)
    serve(engine, 0, **KEEP)
    assert engine.known_chunks() >= PROMPT
    serve(engine, *range(100, 100 + 2 * HOST + GPU))
    assert serve(engine, 0, 100) == [PROMPT - 1, 0]
    assert counts(engine) == [PROMPT, 0, 0, 0, 0]


def test_a_retained_prompt_with_windows_is_found(hinted: Hinted) -> None:
    engine = hinted("full", "window")
    serve(engine, 0, **KEEP)
    serve(engine, *range(100, 100 + HOST))
    found = serve(engine, 0, 100)
    assert found[0] >= PROMPT - 2
    assert found[1] == 0


def test_chunks_that_only_the_gpu_has_are_stored_when_they_are_retained(hinted: Hinted) -> None:
    engine = hinted()
    serve(engine, 0)
    assert engine.known_chunks() == 0
    assert serve(engine, 0, **KEEP) == [PROMPT - 1]
    assert engine.known_chunks() == PROMPT


def test_a_part_of_a_prompt_is_retained(hinted: Hinted) -> None:
    from kvferry.client.vllm import KVFerrySpec

    engine = hinted()
    serve(engine, 0, **{RETAIN: {"seconds": 600, "tokens": 3 * TOKENS + 1}})
    assert counts(engine) == [3, 0, 0, 0, 0]
    assert engine.namespace().retained == 3
    assert HINT_COUNTERS.keys() <= KVFerrySpec.build_metric_definitions({}).keys()


def test_released_prompts_are_not_stored_and_their_chunks_go_first(
    hinted: Hinted, start_kvferryd: StartKvferryd
) -> None:
    engine = hinted(mode="at_once")
    release: dict[str, Any] = {RELEASE: {}}
    serve(engine, *range(HOST - 1))
    serve(engine, HOST - 1, **release)
    serve(engine, 100)
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    assert serve(engine, 0, HOST - 1) == [PROMPT - 1, 0]
    engine.close()

    late = hinted(directory=start_kvferryd().directory)
    serve(late, *range(2 * GPU), **release)
    assert late.known_chunks() == 0
    assert counts(late)[0] == 2 * GPU * PROMPT


def test_a_hostile_client_harms_only_itself(hinted: Hinted) -> None:
    """It retains all that it can, releases what others retain, and sends nonsense."""
    engine = hinted()
    request = {"cache_salt": "honest"}
    label_requests(engine, request)
    serve(engine, 0, **KEEP)
    request["cache_salt"] = "hostile"
    serve(engine, 0, **{RELEASE: {}})
    serve(engine, *range(50, 50 + HOST), **{RETAIN: {"seconds": 1e300}})
    nonsense: tuple[Any, ...] = None, [], {"seconds": math.nan}, {"seconds": "\ud800"}
    for payload in (*nonsense, {"seconds": 2**63}):
        serve(engine, 1, **{RETAIN: payload, RELEASE: payload, "kvferry.x@1": payload})
    share = HOST * PROMPT // 16
    _, clipped, missing, refused, unknown = counts(engine)
    assert engine.namespace().retained == PROMPT + share
    assert clipped >= (HOST - 3) * PROMPT - share
    assert missing <= 1  # vLLM 0.26 computes the last block of a hit again
    assert unknown == 5
    assert refused >= 9
    assert serve(engine, 0) == [PROMPT - 1]


def label_requests(engine: Any, fields: dict[str, Any]) -> None:
    """Give requests these fields. A salt of vLLM's would change their keys."""
    add = engine.scheduler.add_request

    def add_labelled(request: Any) -> None:
        for name, value in fields.items():
            setattr(request, name, value)
        add(request)

    engine.scheduler.add_request = add_labelled


def test_hints_of_a_router(core: Any, hinted: Hinted) -> None:
    if find_spec("vllm.v1.kv_hints") is None:
        pytest.skip("this vLLM has no hints of routers")
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    engine = hinted()
    action = KvHintAction("1", "kvferry.retain", "1", {"seconds": 60})
    label_requests(engine, {"kv_hints": KvHintsEnvelope("1", "m", [action])})
    serve(engine, 0)
    assert engine.namespace().retained == PROMPT


def test_an_aborted_request_and_a_reset_end_well(hinted: Hinted) -> None:
    engine = hinted()
    engine.abort(engine.add(prompt(0), 9, **KEEP))
    name = engine.add(prompt(1), 9, **KEEP)
    engine.step()
    engine.abort(name)
    engine.settle()
    serve(engine, 2, **KEEP)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.runner.weights += 1
    engine.settle()
    assert engine.namespace().retained == 0
    assert serve(engine, 2) == [0]


def test_without_a_daemon_hints_are_missing(hinted: Hinted, start_kvferryd: StartKvferryd) -> None:
    daemon = start_kvferryd()
    engine = hinted(directory=daemon.directory)
    daemon.stop()
    release: dict[str, Any] = {RELEASE: {}}
    for parameters in (KEEP, release):
        name = engine.add(prompt(0), 1, **parameters)
        engine.run_until(lambda name=name: name in engine.finished)
    engine.run_until(lambda: not engine.scheduler.connector._hinted)
