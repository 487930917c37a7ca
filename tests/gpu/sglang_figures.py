"""SGLang's tree, pools and linker wrapper on a GPU, without a model, over a real kvferryd.

    python tests/gpu/sglang_figures.py pages,speed,fences [--json FILE]
    python tests/gpu/sglang_figures.py pages,speed,fences --device cpu --small

pages   random requests of two servers that share a namespace, with evictions and flushes. All words
        of each page that a match has promised are compared after its load
speed   stores and loads of one prompt, compared with one contiguous pinned copy of as many bytes.
        The goal: 0.95
fences  the forward stream is busy. A store must wait for kernels that write its pages late; kernels
        that read loaded pages are queued when these have arrived. Rows with a `control` break the
        fence: there, wrong pages must be found

Each row is one line of JSON in FILE. Exit status 1: a page was wrong, a control found none, or a
figure failed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client.sglang import loads
from support.eventually import wait_until
from support.json_rows import JsonRows
from support.sglang_pools import SMALL, ModelShape
from support.sglang_requests import run_random_requests
from support.sglang_tree import TreeServer, new_stream, publish_server_args
from support.vllm_measure import Record, print_figures

LLAMA = ModelShape(layers=32, heads=8, head_dim=128, max_tokens=1 << 15)
DEEPSEEK = ModelShape(layers=61, latent=512, rope=64, max_tokens=1 << 15)
# Cycles for which the forward stream is busy: about half a second.
BUSY_CYCLES = 1_000_000_000


@dataclass(frozen=True)
class RandomKind:
    """Servers of `pages`. pages: of a device, as for TreeServer. host: the namespace's quota. unit:
    multiplies the lengths of prompts."""

    kind: str
    pages: int
    host: int
    shape: ModelShape = SMALL
    page_size: int = 4
    unit: int = 1


# Devices hold a part of the prompts, and host memory most.
RANDOM = {
    "mha": RandomKind("mha", 64, 600 * 1536),
    "fp8": RandomKind("fp8", 64, 600 * 768),
    "mla": RandomKind("mla", 64, 600 * 1152),
    "swa": RandomKind("swa", 64, 600 * 512),
    "mamba": RandomKind("mamba", 64, 3000 * 256),
    "llama": RandomKind("mha", 512, 1200 << 21, LLAMA, 16, 4),
    "deepseek": RandomKind("mla", 512, 1200 * 1_124_352, DEEPSEEK, 16, 4),
}
# kind, shape and page size of each row of `speed`.
SPEED = {
    "llama, pages of 16": ("mha", LLAMA, 16),
    "llama, pages of 64": ("mha", LLAMA, 64),
    "deepseek, pages of 64": ("mla", DEEPSEEK, 64),
}


class TreeBench(JsonRows):
    """What the figures share."""

    def __init__(self, chosen: argparse.Namespace, root: Path) -> None:
        super().__init__(chosen.json)
        self.device, self.small, self.reps = chosen.device, chosen.small, chosen.reps
        self.pages, self.seconds, self.tokens = chosen.pages, chosen.seconds, chosen.tokens
        self._root, self._options = root, {"core": chosen.core, "kvferry_pack": chosen.pack}

    def fail(self, what: str) -> None:
        self.check(what, False)

    def shape(self, shape: ModelShape) -> ModelShape:
        return SMALL if self.small else shape

    @contextmanager
    def daemon(self, pool_bytes: int) -> Iterator[LocalDaemon]:
        device = "0" if self.device == "cuda" else "cpu"
        with LocalDaemon(device, pool_bytes=pool_bytes) as daemon:
            with OffloadClient(daemon.directory, engine="observer") as client:
                began = time.monotonic()
                wait_until(lambda: client.status().pool.pinned_bytes >= pool_bytes)
            print_figures("daemon", gib=pool_bytes / 2**30, pinned_s=time.monotonic() - began)
            yield daemon

    def start(
        self, running: ExitStack, daemon: LocalDaemon, page_size: int, **options: Any
    ) -> TreeServer:
        directory = self._root / f"pages of {page_size}"
        directory.mkdir(exist_ok=True)
        args = publish_server_args(directory, page_size)
        server = TreeServer(args, daemon.directory, device=self.device, **self._options, **options)
        running.callback(server.close)
        return server


# Pages


def measure_pages(bench: TreeBench) -> None:
    loads.MIN_SECTIONED = 0
    with bench.daemon((64 << 20) if bench.small else (8 << 30)) as daemon:
        for name, it in RANDOM.items():
            if not bench.small or it.shape is SMALL:
                with bench.guarded(f"pages {name}"):
                    compare_pages(bench, daemon, name, it)


def compare_pages(bench: TreeBench, daemon: LocalDaemon, name: str, it: RandomKind) -> None:
    with ExitStack() as running:
        servers = [
            bench.start(
                running,
                daemon,
                it.page_size,
                kind=it.kind,
                pages=it.pages,
                shape=it.shape,
                cpu_bytes_to_use=it.host,
                kvferry_salt=name,
            )
            for _ in range(2)
        ]
        began = time.monotonic()
        run_random_requests(
            servers,
            random.Random(name),
            bench.pages,
            unit=it.unit,
            leaving=it.kind not in ("swa", "mamba"),
            seconds=bench.seconds,
        )
        row = {
            "compared": sum(server.compared for server in servers),
            "loaded": sum(server.loaded for server in servers),
            "wrong": sum(server.wrong for server in servers),
            "failed": sum(server.failed for server in servers),
        }
        bench.report(f"pages {name}", **row, seconds=time.monotonic() - began)
        if row["wrong"] or row["failed"]:
            bench.fail(f"pages {name}: {row}")


# Speed


class Stopwatch:
    """When a server's linker was called, and what the daemon says about its transfers.

    offered: the last store. started, landed: the last load. device_seconds and nbytes: of the
    transfers by direction, since `clear`.
    """

    def __init__(self, server: TreeServer) -> None:
        self.offered = self.started = self.landed = 0.0
        self._server = server
        self.clear()
        linker: Any = server.linker
        offload, start = linker.offload, linker.start_layer_wise_loading
        wait, get_finished = server.counter.wait_until, linker._session.get_finished

        def timed_offload(*arguments: Any, **options: Any) -> Any:
            synchronize(server)
            self.offered = time.perf_counter()
            return offload(*arguments, **options)

        def timed_start() -> Any:
            self.started = time.perf_counter()
            return start()

        def timed_wait(layer: int) -> None:
            wait(layer)
            self.landed = time.perf_counter()

        def timed_results() -> Any:
            results = get_finished()
            for result in results:
                direction = "store" if result.transfer_type[0] == "GPU" else "load"
                self.device_seconds[direction] += result.transfer_time
                self.nbytes[direction] += result.transfer_size
            return results

        linker.offload, linker.start_layer_wise_loading = timed_offload, timed_start
        server.counter.wait_until, linker._session.get_finished = timed_wait, timed_results

    def clear(self) -> None:
        self.landed = 0.0
        self.device_seconds, self.nbytes = {"store": 0.0, "load": 0.0}, {"store": 0, "load": 0}


def synchronize(server: TreeServer) -> None:
    if server.forward_stream is not None:
        torch.cuda.synchronize()


def measure_speed(bench: TreeBench) -> None:
    for name, (kind, shape, page_size) in SPEED.items():
        with (
            bench.guarded(f"speed {name}"),
            bench.daemon((64 << 20) if bench.small else (10 << 30)) as daemon,
            ExitStack() as running,
        ):
            tokens = 1024 if bench.small else bench.tokens
            server = bench.start(
                running,
                daemon,
                page_size,
                kind=kind,
                pages=tokens // page_size + 8,
                shape=bench.shape(shape),
            )
            compare_speed(bench, f"speed {name}", server, tokens)


def compare_speed(bench: TreeBench, name: str, server: TreeServer, tokens: int) -> None:
    watch, rows, copies = Stopwatch(server), list[Record](), None
    for number in range(-2, bench.reps):
        prompt = prompt_of(number, tokens)
        watch.clear()
        server.run(prompt)
        while server.cache.linker.pending_offloads:
            server.step()
        stored = time.perf_counter() - watch.offered
        server.evict_all()
        wait_host(server, prompt)
        began = time.perf_counter()
        server.match(prompt)
        lookup = time.perf_counter() - began
        synchronize(server)
        watch.landed = 0.0
        loaded = server.run(prompt)
        landed = watch.landed - watch.started
        moved = watch.nbytes["load"]
        copies = copies or ContiguousCopies(moved, bench.device)
        to_host, to_device = copies.seconds()
        row = {
            "tokens": loaded,
            "gib": moved / 2**30,
            "lookup_ms": 1e3 * lookup,
            "store_ms": 1e3 * stored,
            "load_ms": 1e3 * landed,
            "store_gbs": watch.nbytes["store"] / stored / 1e9,
            "load_gbs": moved / landed / 1e9,
            "copy_to_host_gbs": moved / to_host / 1e9,
            "copy_to_device_gbs": moved / to_device / 1e9,
            "store_of_copy": to_host * watch.nbytes["store"] / moved / stored,
            "load_of_copy": to_device / landed,
            "store_device_ms": 1e3 * watch.device_seconds["store"],
            "load_device_ms": 1e3 * watch.device_seconds["load"],
        }
        bench.report(name, round=number, **row)
        if number >= 0:
            rows.append(row)
        server.evict_all()
    bench.summarize(name, rows)
    if server.wrong or server.failed:
        bench.fail(f"{name}: {server.wrong} buffers of pages are wrong, {server.failed} loads fail")


class ContiguousCopies:
    """Copies of as many bytes, between one pinned buffer and one on the device."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._host = torch.empty(nbytes, dtype=torch.int8, pin_memory=device == "cuda")
        self._other = torch.zeros(nbytes, dtype=torch.int8, device=device)
        self.seconds()

    def seconds(self) -> tuple[float, float]:
        """To host memory, and to the device."""
        return self._copy(self._host, self._other), self._copy(self._other, self._host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> float:
        is_cuda = self._other.is_cuda
        if is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began


def prompt_of(number: int, tokens: int) -> list[int]:
    draw = random.Random(f"prompt {number}")
    return [draw.randrange(1000) for _ in range(tokens)]


def wait_host(server: TreeServer, prompt: list[int]) -> None:
    """Wait until the server's mirror shows a prompt whole; then end what that has promised."""
    whole = (len(prompt) - 1) // server.page_size * server.page_size
    wait_until(lambda: server.match(prompt).host_hit_length >= whole)
    server.linker._promises.end_all()


# Fences


def measure_fences(bench: TreeBench) -> None:
    tokens = 512 if bench.small else 4096
    controls = bench.device == "cuda"
    with bench.daemon((64 << 20) if bench.small else (8 << 30)) as daemon:
        for name, measure in (("store", late_writes), ("load", late_reads)):
            for control in ("", *(CONTROLS[name] if controls else ())):
                what = f"fences {name}" + (f", control: {control}" if control else "")
                with bench.guarded(what), ExitStack() as running:
                    server = bench.start(
                        running,
                        daemon,
                        64,
                        pages=tokens // 64 * 3 // 2,
                        shape=bench.shape(LLAMA),
                        kvferry_salt=what,
                    )
                    # The first round compiles kernels. A round shows nothing if the stream was
                    # no longer busy.
                    rounds = range(-1, 1 if control else bench.reps)
                    valid = [measure(bench, what, server, tokens, n, control) for n in rounds]
                    bench.check(f"{what}, busy", any(valid), rounds=sum(valid))


def break_fence(server: TreeServer) -> Callable[[], None]:
    """Signal in a stream in which nothing runs. Returns a function that repairs it."""
    transfers: Any = server.linker._transfers
    transfers._stream = new_stream()

    def repair() -> None:
        transfers._stream = server.forward_stream

    return repair


def break_wait(server: TreeServer) -> Callable[[], None]:
    """Do not wait for loads before kernels are queued that read them."""
    wait, server.counter.wait_until = server.counter.wait_until, lambda layer: None

    def repair() -> None:
        server.counter.wait_until = wait

    return repair


CONTROLS: dict[str, dict[str, Callable[[TreeServer], Callable[[], None]]]] = {
    "store": {"no fence": break_fence},
    "load": {"no wait": break_wait},
}


def keep_busy(server: TreeServer) -> None:
    """Kernels that take half a second, in the forward stream."""
    if server.forward_stream is not None:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        square = torch.ones(4096, 4096, device=server.device, dtype=torch.bfloat16)
        for _ in range(16):
            square = square @ square


def late_writes(
    bench: TreeBench, what: str, server: TreeServer, tokens: int, number: int, control: str
) -> bool:
    """The KV of a prompt is written after its pages are offered."""
    prompt = prompt_of(number, tokens)
    server.evict_all()
    synchronize(server)
    repair = CONTROLS["store"][control](server) if control else lambda: None
    server.before_forward = lambda: keep_busy(server)
    began = time.perf_counter()
    server.run(prompt)
    returned = time.perf_counter() - began
    was_busy = server.forward_stream is None or not server.forward_stream.query()
    while server.cache.linker.pending_offloads:
        server.step()
    stored = time.perf_counter() - began
    is_late = server.forward_stream is None or server.forward_stream.query()
    repair()
    server.before_forward = lambda: None
    server.evict_all()
    wait_host(server, prompt)
    before = server.wrong
    loaded = server.run(prompt)
    row = {
        "tokens": loaded,
        "wrong": server.wrong - before,
        "returned_ms": 1e3 * returned,
        "stored_ms": 1e3 * stored,
        "offered_early": was_busy,
        "stored_late": is_late,
    }
    bench.report(what, round=number, **row)
    return judge(bench, what, number, row, control, was_busy and (bool(control) or is_late))


def late_reads(
    bench: TreeBench, what: str, server: TreeServer, tokens: int, number: int, control: str
) -> bool:
    """The slots of a prompt are loaded with those of another while kernels read them."""
    first, second = (prompt_of(2 * number + which, tokens) for which in range(2))
    for prompt in (first, second):
        server.run(prompt)
        server.evict_all()
    wait_host(server, first)
    server.run(first)
    server.drain()
    synchronize(server)
    repair = CONTROLS["load"][control](server) if control else lambda: None
    before = server.wrong
    if control != "no wait":  # the kernels that are queued too early would be late as well
        server.before_forward = lambda: keep_busy(server)
    assert server.run(first) == 0, "the first prompt is not on the device"
    server.before_forward = lambda: None
    was_busy = server.forward_stream is None or not server.forward_stream.query()
    began = time.perf_counter()
    server.evict(len(first))
    wait_host(server, second)
    loaded = server.run(second)
    waited = time.perf_counter() - began
    row = {
        "tokens": loaded,
        "wrong": server.wrong - before,
        "load_ms": 1e3 * waited,
        "was_busy": was_busy,
    }
    repair()
    bench.report(what, round=number, **row)
    server.evict_all()
    return judge(bench, what, number, row, control, was_busy or control == "no wait")


def judge(
    bench: TreeBench, what: str, number: int, row: Record, control: str, is_valid: bool
) -> bool:
    """Whether the round counts."""
    is_valid = is_valid and number >= 0
    if is_valid and (not row["tokens"] or bool(row["wrong"]) != bool(control)):
        bench.fail(f"{what}: {row}")
    return is_valid


FIGURES = {"pages": measure_pages, "speed": measure_speed, "fences": measure_fences}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", help=f"figures, comma-separated: {', '.join(FIGURES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pack", choices=("auto", "on", "off"), default="off")
    parser.add_argument("--core", choices=("python", "rust"), default="python", help="the tree's")
    parser.add_argument("--small", action="store_true", help="small shapes, for a trial")
    parser.add_argument("--pages", type=int, default=5000, help="to load, of each kind")
    parser.add_argument("--seconds", type=float, default=10.0, help="at most, of each kind")
    parser.add_argument("--tokens", type=int, default=16384, help="of a prompt of `speed`")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("sglang-figures.jsonl"))
    chosen = parser.parse_args()
    names = chosen.what.split(",")
    if unknown := set(names) - FIGURES.keys():
        parser.error(f"unknown figures: {', '.join(sorted(unknown))}; choose from {[*FIGURES]}")
    if chosen.device == "cuda":
        # Streams that share a queue of the device wait for each other.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_stream(new_stream())
    with tempfile.TemporaryDirectory() as root:
        bench = TreeBench(chosen, Path(root))
        for name in names:
            with bench.guarded(name):
                FIGURES[name](bench)
    bench.report("all", failed=bench.failed)
    sys.exit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
