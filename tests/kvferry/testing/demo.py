"""Does a model generate the same tokens after its KV cache was offloaded and loaded?

A small paged Llama (llama.py) prefills a long prompt and generates tokens: the undisturbed run, in
KV tensors that the daemon does not map. A second run prefills the same prompt into shared KV
tensors. Then all full blocks of the prompt are stored to the host pool of a daemon in another
process, the KV tensors are overwritten with noise, and the blocks are loaded into other GPU blocks.
The model continues with the prompt's tail, as an engine does after a prefix hit. Its tokens must
equal the undisturbed ones. The blocks are loaded again, and one page is replaced by noise. Now the
tokens must differ, else the comparison could not detect a wrong block.

Nothing is aligned: a host block has four GPU blocks and a job an odd number of them, host and GPU
blocks are in random order, and the prompt ends inside a block. Stores wait for the timeline value
after the kernels that compute the blocks, and loads for the value after the noise.

The same is then done with a disk tier, from one daemon to the next (demo_disk.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

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
from kvferry.testing.llama import Array, BlockTable, LlamaConfig, PagedLlama

FACTOR = 4
PREFILL_CHUNK = 512
PROBES = 50
TIMEOUT = 60.0


class DemoEngine:
    """The model and one prompt: prefill and generation with any block table."""

    def __init__(self, model: PagedLlama, prompt: bytes, steps: int, progress: Progress) -> None:
        self.model, self.prompt, self.steps, self._progress = model, list(prompt), steps, progress
        size = model.config.block_size
        self.full_blocks = (len(prompt) - 1) // size
        self.all_blocks = -(-(len(prompt) + steps) // size)
        self._cached = self.full_blocks * size

    def prefill(self, title: str, table: BlockTable, caches: Sequence[Array]) -> None:
        """Compute the full blocks of the prompt."""
        chunks = range(0, self._cached, PREFILL_CHUNK)
        for start in self._progress.track(chunks, description=title):
            chunk = self.prompt[start : min(start + PREFILL_CHUNK, self._cached)]
            self.model.forward(chunk, start, table, caches)

    def generate(self, table: BlockTable, caches: Sequence[Array]) -> list[int]:
        """Compute the tail of the prompt, which is never offloaded, and generate tokens."""
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
    """Stores the blocks of one request to its host blocks and loads them, in several jobs."""

    def __init__(
        self, client: OffloadClient, timeline: Timeline, host_blocks: BlockTable, progress: Progress
    ) -> None:
        self._client, self._timeline, self._progress = client, timeline, progress
        self._host_blocks, self._job_ids = host_blocks, count(1)

    def move(self, what: str, table: BlockTable) -> DemoMoved:
        """Run a "store" or "load" after the kernels queued so far. Returns when all jobs are done.

        Raises the error of a failed job.
        """
        begin, size, fence = time.perf_counter(), len(table) // 16 | 1, self._timeline.signal()
        firsts = range(0, len(table), size)
        jobs = [self._submit(what, table[i : i + size], i, fence) for i in firsts]
        while self._timeline.reached < fence:
            begin = time.perf_counter()
        for job in self._progress.track(jobs, description=what):
            self._client.wait([job], timeout=TIMEOUT)
        nbytes, device_seconds = self._finished()
        return DemoMoved(what, len(jobs), nbytes, device_seconds, time.perf_counter() - begin)

    def round_trip(self, table: BlockTable, index: int) -> float:
        """Seconds from submitting a load of one block until its result is received."""
        begin = time.perf_counter()
        job = self._submit("load", table[index : index + 1], index, 0)
        self._client.wait([job], timeout=TIMEOUT)
        self._finished()
        return time.perf_counter() - begin

    def _submit(self, what: str, blocks: BlockTable, first: int, wait_for: int) -> int:
        job, end = next(self._job_ids), first + len(blocks)
        gpu = GPULoadStoreSpec(blocks, (len(blocks),), (first,))
        host = CPULoadStoreSpec(self._host_blocks[first // FACTOR : -(-end // FACTOR)])
        spec = (gpu, host) if what == "store" else (host, gpu)
        self._client.transfer_async(job, spec, wait_for=wait_for)
        return job

    def _finished(self) -> tuple[int, float]:
        """Bytes and device seconds of the finished jobs. Raises the error of a failed job."""
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
        """The index of the first token that differs from the undisturbed run; None if none does."""
        pairs = zip(self.tokens[run], self.tokens["undisturbed"], strict=True)
        return next((i for i, (token, expected) in enumerate(pairs) if token != expected), None)


def kv_tensors(model: PagedLlama, num_blocks: int) -> dict[str, Array]:
    shape = model.kv_cache_shape(num_blocks)
    return {f"layer{i}": shared_empty(shape, np.float32) for i in range(model.config.layers)}


def overwrite(pages: Array, generator: np.random.Generator) -> None:
    """Fill pages with noise."""
    pages[...] = generator.standard_normal(pages.shape, dtype=np.float32)


def undisturbed(engine: DemoEngine) -> list[int]:
    """Generate tokens with KV tensors that no daemon maps."""
    model, table = engine.model, np.arange(engine.all_blocks)
    caches = [np.empty(model.kv_cache_shape(len(table)), np.float32) for _ in model.layers]
    engine.prefill("prefill, undisturbed", table, caches)
    return engine.generate(table, caches)


def disturbed(
    engine: DemoEngine, client: OffloadClient, progress: Progress, tamper: bool, report: Report
) -> None:
    """Store, overwrite, load into other blocks, generate; load again, tamper, generate."""
    full, num_blocks = engine.full_blocks, 3 * engine.all_blocks
    generator = np.random.default_rng(0)
    first, second, third = generator.permutation(num_blocks).reshape(3, -1)
    tensors = kv_tensors(engine.model, num_blocks)
    caches = list(tensors.values())
    timeline = Timeline.create("cpu")
    region = client.register_kv_caches(
        tensors, num_blocks=num_blocks, block_size_factor=FACTOR, timeline=timeline
    )
    mover = DemoMover(client, timeline, generator.permutation(region.num_blocks), progress)

    engine.prefill("prefill, shared", first, caches)
    report.moved.append(mover.move("store", first[:full]))
    for cache in caches:
        overwrite(cache, generator)
    report.moved.append(mover.move("load", second[:full]))
    report.tokens["round trip"] = engine.generate(second, caches)

    report.moved.append(mover.move("load", third[:full]))
    if tamper:
        overwrite(caches[0][third[full // 2]], generator)
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
    """Print whether all comparisons are as expected. Returns it."""
    equal = report.differs_at("round trip") is None
    detected = report.differs_at("tampered") is not None
    disk_equal = report.differs_at("over a disk") is None
    yes, no = "[green]yes[/]", "[red]NO: the KV cache has changed[/]"
    different, same = "[green]different (as it must be)[/]", "[red]THE SAME: not detected[/]"
    print_line = partial(console.print, soft_wrap=True)
    print_line("tokens after the round trip equal the undisturbed run:", yes if equal else no)
    print_line("with one tampered block:", different if detected else same)
    print_line("tokens after a disk tier and another daemon's pool:", yes if disk_equal else no)
    return equal and detected and disk_equal


def prompt_of(size: int) -> bytes:
    """A text of `size` bytes."""
    lines = (
        f"Crossing {n}: the ferry left with {n * 7 % 41} blocks aboard, waited for the tide at "
        f"buoy {n * 11 % 37}, and landed them on the other shore in another order.\n".encode()
        for n in count(1)
    )
    return bytes(byte for byte, _ in zip(chain.from_iterable(lines), range(size), strict=False))


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("python -m kvferry.testing.demo", description=about)
    parser.add_argument("--prompt-tokens", type=int, default=3000, metavar="N", help="256 or more")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="tokens, 32 or more")
    parser.add_argument(
        "--no-tamper", action="store_true", help="do not tamper: the demo must then fail"
    )
    chosen = parser.parse_args(argv)
    if chosen.prompt_tokens < 256 or chosen.steps < 32:
        parser.error("give --prompt-tokens 256 or more, and --steps 32 or more")
    return chosen


def play(chosen: argparse.Namespace, console: Console) -> Report:
    model, report, prompt = PagedLlama(LlamaConfig()), Report(), prompt_of(chosen.prompt_tokens)
    pool_bytes = 2 * len(prompt) // model.config.block_size * model.config.block_bytes
    with (
        LocalDaemon(pool_bytes=pool_bytes) as daemon,
        OffloadClient(daemon.directory, engine="demo", timeout=TIMEOUT) as client,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        console.print(
            f"kvferryd is another process (pid {daemon.pid}, sockets in {daemon.directory}); the "
            f"host pool is its memory, {pool_bytes / 2**20:.0f} MiB; KV tensors are in shared "
            "memory instead of a GPU's",
            soft_wrap=True,
        )
        engine = DemoEngine(model, prompt, chosen.steps, progress)
        report.tokens["undisturbed"] = undisturbed(engine)
        disturbed(engine, client, progress, not chosen.no_tamper, report)
        disk = DiskDemo(model, prompt, 3 * pool_bytes, progress)
        prefill = partial(engine.prefill, "prefill, for the disk")
        report.tokens["over a disk"], report.promotion_seconds = disk.run(
            prefill, engine.generate, engine.all_blocks
        )
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """0 if both round trips keep the tokens and a tampered block changes them, else 1.

    130 after an interrupt.
    """
    chosen, console = options(argv), Console(highlight=False)
    try:
        report = play(chosen, console)
    except KVFerryError as error:
        console.print(f"[red]a transfer failed:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    show(report, console)
    return 0 if verdict(report, console) else 1


if __name__ == "__main__":
    raise SystemExit(main())
