"""Effect of device-memory traffic on an engine and on the link, without a daemon.

    python tests/bench/memory_traffic.py [--link]

Staged copies move bytes over the link into a buffer and from there into the tensors, or the other
way. Here one process does the same with plain torch, in chunks of 64 MiB, beside the bench's busy
engine: over the link only; over the link and then once more on the device, which is the traffic of
a staged copy, each chunk after the previous one; and the copy on the device alone. Under CUDA MPS
(nvidia-cuda-mps-control -d, started before), the GPU runs both processes at once, so that the
result does not include time slices.

With --link there is no engine: 1 GiB is copied over the link in chunks of 32 MiB, first alone. Then
after each sixth chunk a kernel gathers the same number of bytes on the device, rows of 32 KiB in
random order, as staged copies do.
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


def measure_link() -> None:
    host = torch.ones(GIB, dtype=torch.int8, pin_memory=True)
    buffer, source, gathered = (torch.ones(GIB, dtype=torch.int8, device="cuda") for _ in range(3))
    order = torch.randperm(GIB // LINK_PIECES * TURN // ROW, device="cuda")
    rows, into = source.view(-1, ROW), gathered.view(-1, ROW)[: order.numel()]
    print(f"{'GB/s over the link':24}{'alone':>8}{'beside':>8}{'x':>7}   of it min..max")
    for direction, dst, src in (("store", host, buffer), ("load", buffer, host)):
        pieces = list(zip(dst.chunk(LINK_PIECES), src.chunk(LINK_PIECES), strict=True))
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(time_copies(pieces, lambda: None))
            beside.append(time_copies(pieces, lambda: torch.index_select(rows, 0, order, out=into)))
        parts = sorted(a / b for a, b in zip(alone, beside, strict=True))
        rates = [GIB / statistics.median(times) / 1e6 for times in (alone, beside)]
        print(
            f"{direction:24}{rates[0]:8.1f}{rates[1]:8.1f}{statistics.median(parts):7.3f}"
            f"   {parts[0]:.3f}..{parts[-1]:.3f}",
            flush=True,
        )


def time_copies(pieces: list[tuple[torch.Tensor, torch.Tensor]], kernel: Copy) -> float:
    """Milliseconds of the copies, with a kernel after each sixth of them."""
    cuda: Any = torch.cuda
    copy_stream, kernel_stream = cuda.Stream(), cuda.Stream()
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    begin.record(copy_stream)
    for number, (dst, src) in enumerate(pieces, 1):
        with cuda.stream(copy_stream):
            dst.copy_(src, non_blocking=True)
        if number % TURN == 0:
            kernel_stream.wait_stream(copy_stream)
            with cuda.stream(kernel_stream):
                kernel()
    end.record(copy_stream)
    cuda.synchronize()
    return float(begin.elapsed_time(end))


def movers() -> dict[str, BenchMover]:
    host = torch.ones(GIB, dtype=torch.int8, pin_memory=True)
    buffer, tensors = (torch.ones(GIB, dtype=torch.int8, device="cuda") for _ in range(2))
    pieces = list(zip(*(tensor.chunk(PIECES) for tensor in (host, buffer, tensors)), strict=True))
    sequences: dict[str, list[Copy]] = {
        "load, the link": [copies((b, h)) for h, b, _ in pieces],
        "load, the link and the device": [copies((b, h), (t, b)) for h, b, t in pieces],
        "store, the link": [copies((h, b)) for h, b, _ in pieces],
        "store, the device and the link": [copies((b, t), (h, b)) for h, b, t in pieces],
        "the device": [copies((t, b)) for _, b, t in pieces],
    }
    return {name: StreamMover(sequences[name], GIB // PIECES) for name in sequences}


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
    measure_link() if parser.parse_args().link else beside_engines()
