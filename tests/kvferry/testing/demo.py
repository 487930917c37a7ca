"""Does a model notice that its KV cache has been away?

A small paged Llama (llama.py) reads a long prompt and writes on: the undisturbed run, in KV tensors
that the daemon never sees. A second run reads the same prompt into shared KV tensors. All full
blocks of the prompt then go to the host pool of a daemon in another process, the KV tensors are
overwritten with noise, the blocks come back into other GPU blocks, and the model writes on from the
prompt's tail, as an engine does after a prefix hit. Its tokens must equal the undisturbed ones.
They are loaded once more, and one page is replaced by noise: now the tokens must differ, else the
comparison could not see a wrong block.

Nothing here is aligned: a host block holds four GPU blocks and a job an odd number of them, host
and GPU blocks are in random order, and the prompt ends inside a block. Values of the timeline hold
the stores until the blocks are computed, and the loads until the noise is written.

Then the same over a disk tier, from one daemon to the next (demo_disk.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from kvferry.client import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVFerryError,
    LocalDaemon,
    OffloadClient,
    Timeline,
)
from kvferry.client.tensors import shared_empty
from kvferry.testing.demo_disk import DiskDemo
from kvferry.testing.llama import LlamaConfig, PagedLlama

SMALL = LlamaConfig()
LARGE = LlamaConfig(16, 1024, 16, 8, 128, 2816, dtype=torch.bfloat16)
FACTOR = 4
PREFILL_CHUNK = 512
PROBES = 50
TIMEOUT = 30.0


class DemoEngine:
    """The model, one prompt, and what an engine does with them in any block table."""

    def __init__(self, model: PagedLlama, prompt: bytes, steps: int, progress: Progress) -> None:
        self.model, self.prompt, self.steps, self._progress = model, list(prompt), steps, progress
        size = model.config.block_size
        self.full_blocks = (len(prompt) - 1) // size
        self.all_blocks = -(-(len(prompt) + steps) // size)
        self._cached = self.full_blocks * size

    def prefill(self, title: str, table: Tensor, caches: Sequence[Tensor]) -> None:
        """Compute the full blocks of the prompt."""
        chunks = range(0, self._cached, PREFILL_CHUNK)
        for start in self._progress.track(chunks, description=title):
            chunk = self.prompt[start : min(start + PREFILL_CHUNK, self._cached)]
            self.model.forward(chunk, start, table, caches)

    def generate(self, table: Tensor, caches: Sequence[Tensor]) -> list[int]:
        """Compute the tail of the prompt, which is never moved, and write on."""
        tail = self.prompt[self._cached :]
        return self.model.generate(tail, self._cached, self.steps, table, caches)


@dataclass(frozen=True)
class DemoMoved:
    what: str
    jobs: int
    nbytes: int
    device_seconds: float
    seconds: float


class DemoMover:
    """Moves the blocks of one request to its host blocks and back, several jobs at once."""

    def __init__(
        self, client: OffloadClient, timeline: Timeline, host_blocks: Tensor, progress: Progress
    ) -> None:
        self._client, self._timeline, self._progress = client, timeline, progress
        self._host_blocks, self._job_ids = host_blocks, count(1)

    def move(self, what: str, table: Tensor) -> DemoMoved:
        """A "store" or "load" behind what is queued so far; back when all jobs have ended well."""
        begin, size, fence = time.perf_counter(), len(table) // 16 | 1, self._timeline.signal()
        firsts = range(0, len(table), size)
        jobs = [self._submit(what, table[i : i + size], i, fence) for i in firsts]
        while self._timeline.reached < fence:
            begin = time.perf_counter()
        for job in self._progress.track(jobs, description=what):
            self._client.wait([job], timeout=TIMEOUT)
        nbytes, device_seconds = self._finished()
        return DemoMoved(what, len(jobs), nbytes, device_seconds, time.perf_counter() - begin)

    def round_trip(self, table: Tensor, index: int) -> float:
        """Seconds from submitting a load of one block until its end is seen."""
        begin = time.perf_counter()
        job = self._submit("load", table[index : index + 1], index, 0)
        self._client.wait([job], timeout=TIMEOUT)
        self._finished()
        return time.perf_counter() - begin

    def _submit(self, what: str, blocks: Tensor, first: int, wait_for: int) -> int:
        job, end = next(self._job_ids), first + len(blocks)
        gpu = GPULoadStoreSpec(blocks.numpy(), (len(blocks),), (first,))
        host = CPULoadStoreSpec(self._host_blocks[first // FACTOR : -(-end // FACTOR)].numpy())
        spec = (gpu, host) if what == "store" else (host, gpu)
        self._client.transfer_async(job, spec, wait_for=wait_for)
        return job

    def _finished(self) -> tuple[int, float]:
        """Bytes and device seconds of what has ended; raises what a job failed with."""
        results = list(self._client.get_finished())
        for result in results:
            if result.error is not None:
                raise result.error
        return sum(r.transfer_size for r in results), sum(r.transfer_time for r in results)


@dataclass
class Report:
    moved: list[DemoMoved] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    promotion_seconds: float = 0.0

    def differs_at(self, run: str) -> int | None:
        """The number of the first token that is not as in the undisturbed run; None: all are."""
        pairs = zip(self.tokens[run], self.tokens["undisturbed"], strict=True)
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def kv_tensors(model: PagedLlama, num_blocks: int) -> dict[str, Tensor]:
    shape, dtype = model.kv_cache_shape(num_blocks), model.config.dtype
    return {
        f"layer{i}": shared_empty(shape, dtype, model.device) for i in range(model.config.layers)
    }


def undisturbed(engine: DemoEngine) -> list[int]:
    """The tokens, from KV tensors that no daemon knows."""
    model, table = engine.model, torch.arange(engine.all_blocks)
    shape, dtype = model.kv_cache_shape(len(table)), model.config.dtype
    caches = [torch.empty(shape, dtype=dtype, device=model.device) for _ in model.layers]
    engine.prefill("prefill, undisturbed", table, caches)
    return engine.generate(table, caches)


def disturbed(
    engine: DemoEngine, client: OffloadClient, progress: Progress, tamper: bool, report: Report
) -> None:
    """Store, overwrite, load elsewhere, write on; load again, tamper, write on."""
    full, num_blocks = engine.full_blocks, 3 * engine.all_blocks
    first, second, third = torch.randperm(num_blocks).view(3, -1)
    tensors = kv_tensors(engine.model, num_blocks)
    caches = list(tensors.values())
    timeline = Timeline.create(engine.model.device.type)
    region = client.register_kv_caches(
        tensors, num_blocks=num_blocks, block_size_factor=FACTOR, timeline=timeline
    )
    mover = DemoMover(client, timeline, torch.randperm(region.num_blocks), progress)

    engine.prefill("prefill, shared", first, caches)
    report.moved.append(mover.move("store", first[:full]))
    for cache in caches:
        cache.normal_()
    report.moved.append(mover.move("load", second[:full]))
    report.tokens["round trip"] = engine.generate(second, caches)

    report.moved.append(mover.move("load", third[:full]))
    if tamper:
        caches[0][third[full // 2]].normal_()
    report.tokens["tampered"] = engine.generate(third, caches)

    report.latencies += [mover.round_trip(first, i % full) for i in range(PROBES)]


def show(report: Report, console: Console) -> None:
    moves = Table("", "jobs", "moved", "on the device", "end to end")
    for m in report.moved:
        rates = (f"{m.nbytes / s / 1e9:.2f} GB/s" for s in (m.device_seconds, m.seconds))
        moves.add_row(m.what, str(m.jobs), f"{m.nbytes / 2**20:.1f} MiB", *rates)
    runs = Table("run", "tokens begin", "differs")
    for run, tokens in report.tokens.items():
        at = report.differs_at(run)
        differs = "no" if at is None else f"from token {at}"
        runs.add_row(run, " ".join(map(str, tokens[:10])), differs)
    p50 = statistics.median(report.latencies) * 1e3
    latency = f"load of one block, submitted to seen: p50 {p50:.2f} ms"
    promotion = f"from disk to an empty pool: {report.promotion_seconds * 1e3:.0f} ms"
    console.print(moves, latency, promotion, runs, sep="\n")


def verdict(report: Report, console: Console) -> bool:
    """Says whether all hold, and returns it."""
    equal, seen = report.differs_at("round trip") is None, report.differs_at("tampered") is not None
    from_disk = report.differs_at("over a disk") is None
    survived = "[green]yes[/]" if equal else "[red]NO: the KV cache came back changed[/]"
    noticed = "[green]different (as it must be)[/]" if seen else "[red]THE SAME: nobody noticed[/]"
    print_line = partial(console.print, soft_wrap=True)
    print_line("tokens after the round trip equal the undisturbed run:", survived)
    print_line("with one tampered block:", noticed)
    returned = "[green]yes[/]" if from_disk else "[red]NO: the KV cache came back changed[/]"
    print_line("tokens after the way over a disk, into another daemon's pool, equal it:", returned)
    return equal and seen and from_disk


def prompt_of(size: int) -> bytes:
    """Something to read, `size` bytes of it."""
    lines = (
        f"Crossing {n}: the ferry left with {n * 7 % 41} blocks aboard, waited for the tide at "
        f"buoy {n * 11 % 37}, and landed them on the other shore in another order.\n".encode()
        for n in count(1)
    )
    return bytes(byte for byte, _ in zip(chain.from_iterable(lines), range(size), strict=False))


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("python -m kvferry.testing.demo", description=about)
    parser.add_argument("--device", default="auto", help="auto, cpu, or a CUDA device's number")
    parser.add_argument("--prompt-tokens", type=int, default=3000, metavar="N", help="256 or more")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="to write, 32 or more")
    parser.add_argument(
        "--no-tamper", action="store_true", help="spare the block: the demo must then fail"
    )
    chosen = parser.parse_args(argv)
    if chosen.prompt_tokens < 256 or chosen.steps < 32:
        parser.error("so few tokens show nothing")
    if chosen.device == "auto":
        chosen.device = "0" if torch.cuda.is_available() else "cpu"
    if chosen.device not in {"cpu", *map(str, range(torch.cuda.device_count()))}:
        parser.error(f"torch sees no device {chosen.device} here")
    return chosen


def play(chosen: argparse.Namespace, console: Console) -> Report:
    torch.manual_seed(0)
    cpu = chosen.device == "cpu"
    config, device = (SMALL, "cpu") if cpu else (LARGE, f"cuda:{chosen.device}")
    if not cpu:
        torch.cuda.set_device(device)
    model, report, prompt = PagedLlama(config, device), Report(), prompt_of(chosen.prompt_tokens)
    pool_bytes = 2 * len(prompt) // config.block_size * config.block_bytes
    with (
        LocalDaemon(device=chosen.device, pool_bytes=pool_bytes) as daemon,
        OffloadClient(daemon.directory, engine="demo", timeout=TIMEOUT) as client,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        console.print(
            f"kvferryd is another process (pid {daemon.pid}, sockets in {daemon.directory}); the "
            f"host pool is its memory, {pool_bytes / 2**20:.0f} MiB; KV tensors on {device}",
            soft_wrap=True,
        )
        engine = DemoEngine(model, prompt, chosen.steps, progress)
        report.tokens["undisturbed"] = undisturbed(engine)
        disturbed(engine, client, progress, not chosen.no_tamper, report)
        disk = DiskDemo(model, prompt, 3 * pool_bytes, chosen.device, progress)
        prefill = partial(engine.prefill, "prefill, for the disk")
        report.tokens["over a disk"], report.promotion_seconds = disk.run(
            prefill, engine.generate, engine.all_blocks
        )
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the tokens survive both round trips and a tampered block changes them, else 1.

    130 where it was interrupted.
    """
    chosen, console = options(argv), Console(highlight=False)
    try:
        report = play(chosen, console)
    except KVFerryError as error:
        console.print(
            f"[red]the blocks did not come through:[/] {escape(str(error))}", soft_wrap=True
        )
        return 1
    except KeyboardInterrupt:
        return 130
    show(report, console)
    return 0 if verdict(report, console) else 1


if __name__ == "__main__":
    raise SystemExit(main())
