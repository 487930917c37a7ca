"""What an engine loses to the traffic of device memory alone, without a daemon: ms per GiB.

    python tests/bench/memory_traffic.py [--mps]

Staged copies cross the link into a buffer and from there into their places, or the other way. Here
one process does as much with plain torch, in pieces of 64 MiB, beside the bench's busy engines:
over the link only; over the link and then once more on the device, which is the traffic of a
staged copy, each piece behind the one before it; and the copy on the device alone. With --mps both
processes are clients of CUDA MPS, so that what is lost is not the turns of the GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch

from kvferry.client.cli.bench.beside import Windows
from kvferry.client.cli.bench.busy import Busy
from kvferry.client.cli.bench.movers import Streamed
from kvferry.client.cli.bench.mps import mps

GIB = 1 << 30
PIECES = 16
WINDOWS = 3

Copy = Callable[[], object]


def main() -> None:
    with contextlib.ExitStack() as stack:
        if "--mps" in sys.argv[1:]:
            stack.enter_context(mps())
        windows = Windows(stack.enter_context(Busy(0)), WINDOWS, lambda _: None)
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


def movers() -> dict[str, Streamed]:
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
    return {name: Streamed(ways[name], GIB // PIECES) for name in ways}


def copies(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Copy:
    def launch() -> None:
        for dst, src in pairs:
            dst.copy_(src, non_blocking=True)

    return launch


if __name__ == "__main__":
    main()
