"""What the traffic of device memory takes, without a daemon: an engine's time, and the link's.

    python tests/bench/memory_traffic.py [--link]

Staged copies cross the link into a buffer and from there into their places, or the other way. Here
one process does as much with plain torch, in pieces of 64 MiB, beside the bench's busy engine:
over the link only; over the link and then once more on the device, which is the traffic of a
staged copy, each piece behind the one before it; and the copy on the device alone. Under
CUDA MPS (nvidia-cuda-mps-control -d, started before), the GPU runs both processes at once, so that
time slices are no part of the result.

With --link no engine is there: 1 GiB crosses the link in pieces of 32 MiB, alone, and while behind
each sixth piece a kernel gathers as much on the device, rows of 32 KiB in random order, as turns of
staged copies do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from kvferry.client.cli.bench.beside import Windows
from kvferry.client.cli.bench.busy import BusyEngine
from kvferry.client.cli.bench.movers import BenchMover, StreamMover

GIB = 1 << 30
PIECES = 16
WINDOWS = 3
LINK_PIECES, TURN, ROW, ROUNDS = 32, 6, 32 << 10, 15

Copy = Callable[[], object]


def beside_engines() -> None:
    with BusyEngine(0) as busy:
        windows = Windows(busy, WINDOWS, lambda _: None)
        print(f"{'':30}{'engine':>8}{'GB/s':>8}{'step':>8}{'ms/GiB':>8}   min..max")
        for name, mover in movers().items():
            for row in windows.rows(name, 0, {name: mover}):
                step = row.with_ms.median / row.alone_ms.median
                lost = row.lost_ms_per_gib
                print(
                    f"{name:30}{row.loop:>8}{row.rate.median:8.1f}{step:8.3f}{lost.median:8.2f}"
                    f"   {lost.low:.2f}..{lost.high:.2f}",
                    flush=True,
                )


def link() -> None:
    host = torch.ones(GIB, dtype=torch.int8, pin_memory=True)
    buffer, source, gathered = (torch.ones(GIB, dtype=torch.int8, device="cuda") for _ in range(3))
    order = torch.randperm(GIB // LINK_PIECES * TURN // ROW, device="cuda")
    rows, into = source.view(-1, ROW), gathered.view(-1, ROW)[: order.numel()]
    print(f"{'GB/s over the link':24}{'alone':>8}{'beside':>8}{'x':>7}   of it min..max")
    for way, dst, src in (("store", host, buffer), ("load", buffer, host)):
        pieces = list(zip(dst.chunk(LINK_PIECES), src.chunk(LINK_PIECES), strict=True))
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(crossing(pieces, lambda: None))
            beside.append(crossing(pieces, lambda: torch.index_select(rows, 0, order, out=into)))
        parts = sorted(a / b for a, b in zip(alone, beside, strict=True))
        rates = [GIB / statistics.median(times) / 1e6 for times in (alone, beside)]
        print(
            f"{way:24}{rates[0]:8.1f}{rates[1]:8.1f}{statistics.median(parts):7.3f}"
            f"   {parts[0]:.3f}..{parts[-1]:.3f}",
            flush=True,
        )


def crossing(pieces: list[tuple[torch.Tensor, torch.Tensor]], turn: Copy) -> float:
    """Milliseconds that the pieces take, with a turn behind each sixth of them."""
    cuda: Any = torch.cuda
    across, behind = cuda.Stream(), cuda.Stream()
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    begin.record(across)
    for number, (dst, src) in enumerate(pieces, 1):
        with cuda.stream(across):
            dst.copy_(src, non_blocking=True)
        if number % TURN == 0:
            behind.wait_stream(across)
            with cuda.stream(behind):
                turn()
    end.record(across)
    cuda.synchronize()
    return float(begin.elapsed_time(end))


def movers() -> dict[str, BenchMover]:
    host = torch.ones(GIB, dtype=torch.int8, pin_memory=True)
    buffer, tensors = (torch.ones(GIB, dtype=torch.int8, device="cuda") for _ in range(2))
    pieces = list(zip(*(whole.chunk(PIECES) for whole in (host, buffer, tensors)), strict=True))
    ways: dict[str, list[Copy]] = {
        "load, the link": [copies((b, h)) for h, b, _ in pieces],
        "load, the link and the device": [copies((b, h), (t, b)) for h, b, t in pieces],
        "store, the link": [copies((h, b)) for h, b, _ in pieces],
        "store, the device and the link": [copies((b, t), (h, b)) for h, b, t in pieces],
        "the device": [copies((t, b)) for _, b, t in pieces],
    }
    return {name: StreamMover(ways[name], GIB // PIECES) for name in ways}


def copies(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Copy:
    def launch() -> None:
        for dst, src in pairs:
            dst.copy_(src, non_blocking=True)

    return launch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", action="store_true", help="without an engine")
    link() if parser.parse_args().link else beside_engines()
