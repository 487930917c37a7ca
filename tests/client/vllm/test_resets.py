"""Resets of the prefix cache while requests run, through vLLM's own scheduler."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.vllm_stand_ins import prompt

FIRST = prompt(0, 64)


def test_blocks_that_left_a_window_are_not_stored_after_a_reset(start: Any) -> None:
    engine = start("full", "window", blocks=56)
    scheduler = engine.scheduler
    name = engine.add(FIRST, 120)
    engine.run_until(lambda: scheduler.requests[name].num_computed_tokens > 112)
    # They get the blocks of the first request's prompt.
    others = [engine.add(prompt(number, 96), 20) for number in (1, 2, 3)]
    engine.run_until(lambda: all(scheduler.requests[o].num_computed_tokens > 97 for o in others))
    scheduler.reset_prefix_cache(reset_connector=True)
    until(engine.is_reset)
    engine.run_until(lambda: not scheduler.requests)
    engine.run_anew([*FIRST, 7, 8, 9])


@pytest.mark.parametrize("began", ["before", "during"])
def test_blocks_that_are_offered_during_a_reset(
    start: Any, start_kvferryd: StartKvferryd, began: str
) -> None:
    """They are stored after it, unless their request began before it."""
    daemon = start_kvferryd()
    engine = start(directory=daemon.directory)
    scheduler = engine.scheduler

    def begin() -> str:
        name: str = engine.add(FIRST, 400)  # more than the steps for which a store takes
        engine.run_until(lambda: scheduler.requests[name].num_computed_tokens > 68)
        return name

    name = begin() if began == "before" else ""
    engine.settle()
    daemon.process.send_signal(signal.SIGSTOP)
    scheduler.reset_prefix_cache(reset_connector=True)
    engine.step()
    name = name or begin()
    daemon.process.send_signal(signal.SIGCONT)
    until(engine.is_reset)
    engine.run_until(lambda: name in engine.finished)
    assert engine.run_anew([*FIRST, 7, 8, 9]) == [0 if began == "before" else 64]
