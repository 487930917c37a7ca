"""Resets of the prefix cache while requests run, through vLLM's own scheduler."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd
from support.time_limits import TIMEOUT

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

GROUPS = [("full",), ("full", "window"), ("window",)]


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def prompt(tokens: int, rng: random.Random) -> list[int]:
    return [rng.randrange(900) for _ in range(tokens)]


def reset(engine: Any, preempts: bool = False) -> None:
    """Reset, and wait until the daemon has done it: what is offered then is stored."""
    engine.scheduler.reset_prefix_cache(preempts, reset_connector=True)
    wait_for_reset(engine)


def wait_for_reset(engine: Any) -> None:
    deadline = time.monotonic() + TIMEOUT
    while engine.manager.is_resetting:
        assert time.monotonic() < deadline
        engine.manager.poll()


def read_again(engine: Any, prompts: list[list[int]]) -> None:
    """Let requests read from host memory what was stored of these prompts."""
    engine.run_until(lambda: not engine.scheduler.requests)
    for one in prompts:
        engine.settle()
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
        engine.run([*one, 7, 8, 9])


def test_blocks_that_left_a_window_are_not_stored_after_a_reset(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    rng = random.Random(5)
    engine = core.EngineCore(start_kvferryd().directory, ("full", "window"), blocks=56)
    first, scheduler = prompt(64, rng), engine.scheduler
    name = engine.add(first, 120)
    engine.run_until(lambda: scheduler.requests[name].num_computed_tokens > 112)
    # They get the blocks of the first request's prompt.
    others = [engine.add(prompt(96, rng), 20) for _ in range(3)]
    engine.run_until(lambda: all(scheduler.requests[o].num_computed_tokens > 97 for o in others))
    reset(engine)
    read_again(engine, [first])
    assert not engine.wrong
    engine.close()


@pytest.mark.parametrize("began", ["before", "during"])
def test_blocks_that_are_offered_during_a_reset(
    core: Any, start_kvferryd: StartKvferryd, began: str
) -> None:
    """They are stored after it, unless their request began before it."""
    daemon = start_kvferryd()
    engine = core.EngineCore(daemon.directory, ("full",))
    first, scheduler = prompt(64, random.Random(5)), engine.scheduler

    def begin() -> str:
        name: str = engine.add(first, 400)  # more than the steps for which a store takes
        engine.run_until(lambda: scheduler.requests[name].num_computed_tokens > 68)
        return name

    name = begin() if began == "before" else ""
    engine.settle()
    daemon.process.send_signal(signal.SIGSTOP)
    scheduler.reset_prefix_cache(reset_connector=True)
    engine.step()
    name = name or begin()
    daemon.process.send_signal(signal.SIGCONT)
    wait_for_reset(engine)
    engine.run_until(lambda: name in engine.finished)
    engine.settle()
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    assert engine.run([*first, 7, 8, 9]) == [0 if began == "before" else 64]
    assert not engine.wrong
    engine.close()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_random_resets_preemptions_and_aborts(
    core: Any, start_kvferryd: StartKvferryd, groups: tuple[str, ...], overlaps: bool
) -> None:
    """The GPU has too few blocks for all requests, so that vLLM preempts some."""
    from kvferry.client.vllm import compat

    rng = random.Random(11)
    engine = core.EngineCore(start_kvferryd().directory, groups, blocks=40, overlaps=overlaps)
    scheduler = engine.scheduler
    prompts: list[list[int]] = []
    for _ in range(24):
        for _ in range(rng.randrange(1, 4)):
            begin = rng.choice(prompts)[: rng.randrange(64)] if prompts else []
            prompts.append(begin + prompt(rng.randrange(20, 120), rng))
            engine.add(prompts[-1], rng.randrange(1, 150))
        for _ in range(rng.randrange(10, 60)):
            engine.step()
        if scheduler.requests and rng.random() < 0.3:
            engine.abort(rng.choice(list(scheduler.requests)))
        if rng.random() < 0.8:
            if preempts := rng.random() < 0.3:  # vLLM refuses it during a step and during loads
                engine.finish_steps()
                preempts = all(r in scheduler.running for r in scheduler.requests.values())
            if len(groups) > 1 and not compat.REPORTS_FAILED_REQUESTS:  # a failed load ends it
                engine.run_until(lambda: not engine.waits_for_loads())
                preempts = False
            reset(engine, preempts)
    read_again(engine, prompts)
    assert not engine.wrong
    engine.close()
