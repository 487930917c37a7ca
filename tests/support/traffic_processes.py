"""Engines in processes of their own, to be killed, stopped and asked: traffic.py does the work.

    with Crew(daemon.directory) as crew:
        crew.start(TrafficOptions("one", owner=1))
        ...
        total = crew.dismiss()
        assert not total.complaints

All are forked from one process that has imported torch already, so that there can be many, and a
new one is there in a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.traffic_statistics import TrafficOptions, TrafficStatistics, together

PATIENCE = 60.0


class TrafficProcess:
    """An engine's process."""

    def __init__(self, directory: Path, options: TrafficOptions) -> None:
        self.options = options
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["support.traffic"])
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

    def report(self) -> TrafficStatistics:
        """What it has seen so far. Raises EOFError where it died."""
        return self._ask("report")

    def dismiss(self) -> TrafficStatistics:
        """Have it end what it does and go; what it saw."""
        tally = self._ask("stop")
        self._process.join(PATIENCE)
        self.kill()
        return tally

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and back when it is dead."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _ask(self, command: str) -> TrafficStatistics:
        try:
            self._pipe.send(command)
            if not self._pipe.poll(PATIENCE):
                raise TimeoutError(f"{self.options.name} does not answer")
            tally: TrafficStatistics = self._pipe.recv()
        except (BrokenPipeError, EOFError) as error:
            raise EOFError(f"{self.options.name} is dead, and nobody killed it") from error
        return tally


class TrafficProcesses:
    """Members, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.members: dict[str, TrafficProcess] = {}

    def start(self, *several: TrafficOptions) -> None:
        for options in several:
            self.members[options.name] = TrafficProcess(self.directory, options)

    def kill(self, name: str) -> None:
        self.members.pop(name).kill()

    def report(self) -> TrafficStatistics:
        return together(member.report() for member in self.members.values())

    def dismiss(self) -> TrafficStatistics:
        """All go; what they saw together."""
        tallies = [member.dismiss() for member in self.members.values()]
        self.members.clear()
        return together(tallies)

    def __enter__(self) -> TrafficProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            member.kill()


def mixed_engines(device: str, dice: random.Random, **common: Any) -> list[TrafficOptions]:
    """Two engines with blocks of their own, two that share a namespace, of different sizes."""
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
        {"page": 512, "factor": 4, "model": "shared", "leaves": 0.01},
        {"page": 512, "factor": 4, "model": "shared", "resets": 0.01, "reconnect": True},
    ]
    return [
        TrafficOptions(
            f"engine-{number}",
            number,
            seed=dice.getrandbits(32),
            device=device,
            **{**shape, **common},
        )
        for number, shape in enumerate(shapes, 1)
    ]


def _work(pipe: Connection, directory: Path, options: TrafficOptions) -> None:
    """Work until told to "stop", and send the tally; to "report", send it and go on."""
    import torch

    from support.traffic import Traffic

    torch.set_num_threads(1)
    traffic = Traffic(directory, options)
    try:
        while True:
            traffic.step()
            time.sleep(options.pause)
            if pipe.poll(0):
                command = pipe.recv()
                pipe.send(traffic.finish() if command == "stop" else traffic.tally)
                if command == "stop":
                    return
    except (EOFError, BrokenPipeError):  # whoever started us is gone
        return
