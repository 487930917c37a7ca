"""Engines (traffic.py) in processes of their own, which can be paused and killed.

    with TrafficProcesses(daemon.directory) as traffic:
        traffic.start(TrafficOptions("one", owner=1))
        ...
        total = traffic.stop()
        assert not total.errors

All are forked from one process that has imported torch, and vLLM if it is installed, so they start
quickly.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from support.time_limits import TIMEOUT
from support.traffic_statistics import TrafficOptions, TrafficStatistics, merge_statistics
from support.vllm_traffic import VLLMTrafficOptions

VLLM_PRELOADED = ["support.vllm_core"] if find_spec("vllm") is not None else []
AnyOptions: TypeAlias = TrafficOptions | VLLMTrafficOptions


class TrafficProcess:
    """An engine's process."""

    def __init__(self, directory: Path, options: AnyOptions) -> None:
        self.options = options
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["support.traffic", *VLLM_PRELOADED])
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_work, args=(theirs, directory, options), name=options.name, daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def report(self, seconds: float = TIMEOUT) -> TrafficStatistics:
        """Its statistics so far. Raises EOFError if it is dead, TimeoutError after `seconds`."""
        return self._request("report", seconds)

    def stop(self) -> TrafficStatistics:
        """Let its jobs end, then end the process. Returns its statistics."""
        statistics = self._request("stop")
        self._process.join(TIMEOUT)
        self.kill()
        return statistics

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL. Returns when the process is dead."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _request(self, command: str, seconds: float = TIMEOUT) -> TrafficStatistics:
        try:
            self._pipe.send(command)
            if not self._pipe.poll(seconds):
                raise TimeoutError(f"{self.options.name} does not answer within {seconds:g} s")
            statistics: TrafficStatistics = self._pipe.recv()
        except (BrokenPipeError, EOFError) as error:
            raise EOFError(f"{self.options.name} has died, but was not killed") from error
        return statistics


class TrafficProcesses:
    """The processes by the names of their engines."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, TrafficProcess] = {}

    def start(self, *engines: AnyOptions) -> None:
        for options in engines:
            self.processes[options.name] = TrafficProcess(self.directory, options)

    def kill(self, name: str) -> None:
        self.processes.pop(name).kill()

    def report(self) -> TrafficStatistics:
        """The statistics of all, merged."""
        return merge_statistics(process.report() for process in self.processes.values())

    def stop(self) -> TrafficStatistics:
        """Stop all. Returns their statistics, merged."""
        stopped = [process.stop() for process in self.processes.values()]
        self.processes.clear()
        return merge_statistics(stopped)

    def __enter__(self) -> TrafficProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()


def mixed_engines(device: str, rng: random.Random, **common: Any) -> list[TrafficOptions]:
    """Two engines with a region each, two that share a namespace, and one that packs its KV."""
    shapes: list[dict[str, Any]] = [
        {"page": 1024},
        {
            "page": 32768,
            "factor": 1,
            "gpu_blocks": 24,
            "host_blocks": 40,
            "cancels": 0.05,
            "reconnect": True,
        },
        {"page": 512, "factor": 4, "model": "shared", "disconnects": 0.01},
        {"page": 512, "factor": 4, "model": "shared", "resets": 0.01, "reconnect": True},
        {"page": 1024, "model": "packed", "packed": True, "reconnect": True},
    ]
    return [
        TrafficOptions(
            f"engine-{number}",
            number,
            seed=rng.getrandbits(32),
            device=device,
            **{**shape, **common},
        )
        for number, shape in enumerate(shapes, 1)
    ]


def vllm_engines(rng: random.Random, **common: Any) -> list[VLLMTrafficOptions]:
    """Two engines with vLLM's scheduler, whose models have sliding windows."""
    shapes: dict[str, dict[str, Any]] = {
        "vllm-window": {"groups": ("full", "window")},
        "vllm-states": {"groups": ("full", "narrow", "aligned states"), "overlaps": True},
    }
    return [
        VLLMTrafficOptions(name, seed=rng.getrandbits(32), **shape, **common)
        for name, shape in shapes.items()
    ]


def _work(pipe: Connection, directory: Path, options: AnyOptions) -> None:
    """Generate traffic. Send the statistics on "report" and on "stop", and end on "stop"."""
    import torch

    torch.set_num_threads(1)
    traffic = options.create_traffic(directory)
    try:
        while True:
            traffic.step()
            time.sleep(options.step_pause)
            if pipe.poll(0):
                command = pipe.recv()
                pipe.send(traffic.finish() if command == "stop" else traffic.statistics)
                if command == "stop":
                    return
    except (EOFError, BrokenPipeError):  # the parent process is gone
        return
