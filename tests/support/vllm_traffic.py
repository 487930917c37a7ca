"""An engine with vLLM's scheduler that serves random requests and checks what they read.

traffic_processes.py starts it in a process for soak.py; a test of vLLM runs the requests without
one. Importing this needs no vLLM, creating an engine does.
"""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.client.vllm.request_hints import PREFETCH, RELEASE, RETAIN
from support.time_limits import TIMEOUT
from support.traffic_statistics import TrafficStatistics

# Tokens of a request: at most of the shared beginning, of its own, and of its output. The output is
# three times as long as the windows of the models.
SHARED, OWN, OUTPUT = 60, 60, 120
BEGINNINGS = 6
# Requests at a time, and their probability per step.
REQUESTS, ARRIVES = 6, 0.4
# Probability per step that a request is aborted.
ABORTS = 0.02
# The kv_transfer_params of requests: half of them have a hint.
HINTS: tuple[dict[str, Any], ...] = (
    *[{}] * 4,
    {RELEASE: {}},
    {PREFETCH: {}},
    {RETAIN: {"seconds": 0.1}},
    {RETAIN: {"seconds": 600}},
)
# Probability per step that a beginning is replaced by one that no request has had.
RENEWS = 0.004


def gpu_blocks(groups: tuple[str, ...], drafts: int) -> int:
    """The GPU has room for two requests, so that vLLM preempts and evicts."""
    return 1 + 2 * len(groups) * ((SHARED + OWN + OUTPUT) // 16 + 1 + drafts)


class RandomRequests:
    """Requests that share beginnings, decode past their windows, are aborted and preempted. Some
    have hints.

    resets: probability per step that the prefix cache is reset. connector_resets: that the
    connector is reset with it. If both discard the KV of all requests, the model has other weights
    afterwards: what was stored before must not be found.
    """

    def __init__(
        self,
        engine: Any,
        rng: random.Random,
        resets: float = 0.04,
        connector_resets: float = 0.2,
    ) -> None:
        from kvferry.client.vllm import compat

        self._engine, self._rng = engine, rng
        self._resets, self._connector_resets = resets, connector_resets
        # Before 0.30 a failed load ends an engine with several groups.
        self._fragile = not compat.REPORTS_FAILED_REQUESTS
        self._beginnings = [self._tokens(SHARED) for _ in range(BEGINNINGS)]
        self._prompts = deque([self._beginnings[0]], 20)
        self._running = set[str]()
        self.resets = 0

    def step(self) -> None:
        engine, rng = self._engine, self._rng
        self._running -= engine.finished.keys()
        if rng.random() < RENEWS:
            self._beginnings[rng.randrange(BEGINNINGS)] = self._tokens(SHARED)
        if len(self._running) < REQUESTS and rng.random() < ARRIVES:
            self._add_request()
        if self._running and rng.random() < ABORTS and not self._fragile:
            name = rng.choice(sorted(self._running))
            self._running.remove(name)
            engine.abort(name)
        if rng.random() < self._resets and not (self._fragile and engine.waits_for_loads()):
            self._reset()
        engine.step()

    def finish(self) -> None:
        """Run until all requests have ended. Raises AssertionError if they hang."""
        self._engine.run_until(lambda: self._running <= self._engine.finished.keys())

    def _add_request(self) -> None:
        rng = self._rng
        beginning = rng.choice(self._beginnings)[: rng.randrange(20, SHARED)]
        self._prompts.append(beginning + self._tokens(rng.randrange(1, OWN)))
        prompt = rng.choice(self._prompts) if rng.random() < 0.5 else self._prompts[-1]
        tokens, hint = rng.choice((4, 40, OUTPUT)), rng.choice(HINTS)
        self._running.add(self._engine.add(prompt, tokens, **hint))

    def _reset(self) -> None:
        engine, rng = self._engine, self._rng
        preempts = rng.random() < 0.3
        if preempts:  # vLLM refuses it during a step
            engine.finish_steps()
            preempts = not engine.waits_for_loads()
        connector = rng.random() < self._connector_resets
        done = engine.scheduler.reset_prefix_cache(preempts, reset_connector=connector)
        assert done or not preempts
        self.resets += connector
        if preempts and connector:
            engine.runner.weights += 1

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(900) for _ in range(count)]


@dataclass(frozen=True)
class VLLMTrafficOptions:
    """groups, drafts, overlaps, host_bytes: see EngineCore. step_pause: seconds between steps."""

    name: str
    groups: tuple[str, ...]
    seed: int = 1
    drafts: int = 0
    overlaps: bool = False
    host_bytes: int = 1 << 18
    step_pause: float = 0.0

    def create_traffic(self, directory: Path) -> VLLMTraffic:
        return VLLMTraffic(directory, self)


class VLLMTraffic:
    """One engine in a process of its own. Wrong reads and requests that hang are errors.

    Engines of one name share a namespace, but not their weights. So each begins with a reset.
    """

    def __init__(self, directory: Path, options: VLLMTrafficOptions) -> None:
        from support.vllm_core import EngineCore

        # Model runner v2 is the default from vLLM 0.29.
        os.environ |= {"PYTHONHASHSEED": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        logging.disable(logging.WARNING)  # of each reset, and of each daemon that is killed
        rng = random.Random(options.seed)
        model = directory.parent / f"model of {options.name}"
        model.mkdir(exist_ok=True)
        self._statistics = TrafficStatistics(options.name)
        self._engine = EngineCore(
            directory,
            options.groups,
            gpu_blocks(options.groups, options.drafts),
            drafts=options.drafts,
            host_bytes=options.host_bytes,
            overlaps=options.overlaps,
            engine_id=options.name,
            folder=str(model),
        )
        self._engine.runner.weights = options.seed
        self._engine.scheduler.reset_prefix_cache(reset_connector=True)
        self._requests = RandomRequests(self._engine, rng, 0.02, 0.15)

    @property
    def statistics(self) -> TrafficStatistics:
        engine, statistics = self._engine, self._statistics
        for wrong in engine.wrong:
            statistics.add_error(wrong)
        engine.wrong.clear()
        statistics.counts |= {
            "vLLM requests": len(engine.finished),
            "vLLM chunks loaded": engine.loaded,
            "vLLM blocks compared": engine.runner.compared,
            "vLLM connector resets": self._requests.resets,
            **{f"vLLM tokens from {source}": count for source, count in engine.sources.items()},
        }
        return statistics

    def step(self) -> None:
        self._requests.step()

    def finish(self) -> TrafficStatistics:
        """Wait until all requests have ended, then disconnect."""
        try:
            self._requests.finish()
            self._engine.settle()
        except AssertionError as error:
            self._statistics.add_error(f"after {TIMEOUT:g} s: {error}")
        self._engine.close()
        return self.statistics
