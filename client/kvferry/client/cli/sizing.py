"""`kvferry size`: the hits that host memory of each size brings for a recorded trace.

The trace has one JSON object per line, in the format of Mooncake's traces: `hash_ids` are numbers
of the blocks of a prompt, in prefix order; two blocks have one number if they and all before them
are equal. It is replayed against LRU caches of all sizes at once: a cache of n blocks has a block
if fewer than n others were used since.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvferry.client.cli.units import size
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import Int64s

GIB = 1 << 30
# Sizes are doubled until another doubling brings less.
LEAST_GAIN = 0.001


class _Prompt(msgspec.Struct):
    hash_ids: list[int]


class SizeResult(msgspec.Struct):
    """hit_rate: the share of all blocks of prompts that are found. tokens: that are found."""

    nbytes: int
    blocks: int
    hit_rate: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """distances: of each block of each prompt, the number of other blocks used since its last use;
    -1 at its first one."""

    prompts: int
    distances: Int64s

    @property
    def different(self) -> int:
        """Different blocks."""
        return int(np.count_nonzero(self.distances < 0))

    def hits(self, blocks: int) -> int:
        """The blocks that a cache of so many blocks has when they are looked up."""
        return int(np.count_nonzero((self.distances >= 0) & (self.distances < blocks)))


def read_trace(path: Path, console: Console) -> Trace:
    """Raises Refused (BAD_CONFIG), naming the line, for another format; OSError."""
    found, last_use, times = list[Int64s](), dict[int, int](), np.zeros(0, np.int64)
    clock, prompts = 1, 0
    for blocks in _prompts(path, console):
        prompts += 1
        before = np.array([last_use.get(block, 0) for block in blocks], np.int64)
        distances = len(times) - np.searchsorted(times, before) - 1
        found.append(np.where(before > 0, distances, -1))
        # The first block is the last to be evicted.
        order = [*dict.fromkeys(reversed(blocks))]
        again = np.unique(before[before > 0])
        times = np.delete(times, np.searchsorted(times, again))
        times = np.concatenate((times, np.arange(clock, clock + len(order))))
        last_use.update(zip(order, range(clock, clock + len(order)), strict=True))
        clock += len(order)
    if not clock > 1:
        raise Refused(Code.BAD_CONFIG, f"{path} has no blocks; give a trace with hash_ids")
    return Trace(prompts, np.concatenate(found))


def measure_sizes(
    trace: Trace, block_bytes: int, block_tokens: int, sizes: Sequence[int]
) -> list[SizeResult]:
    """The hits of each size in bytes; without sizes, of doubled ones while they bring more."""

    def measure(nbytes: int) -> SizeResult:
        blocks = nbytes // block_bytes
        hits = trace.hits(blocks)
        return SizeResult(nbytes, blocks, hits / trace.distances.size, hits * block_tokens)

    if sizes:
        return [measure(nbytes) for nbytes in sizes]
    results = [measure(max(GIB, 1 << (block_bytes - 1).bit_length()))]
    while results[-1].blocks < trace.different:
        results.append(measure(2 * results[-1].nbytes))
    while len(results) > 1 and results[-1].hit_rate - results[-2].hit_rate < LEAST_GAIN:
        results.pop()
    return results


def print_sizes(trace: Trace, results: Sequence[SizeResult], console: Console) -> None:
    used_before = 1 - trace.different / trace.distances.size
    console.print(
        f"{trace.prompts:,} prompts with {trace.distances.size:,} blocks, {trace.different:,} "
        f"different ones: at most {used_before:.1%} can be found",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for title in ("host memory", "blocks", "found", "tokens found"):
        table.add_column(title, justify="right")
    for each in results:
        row = size(each.nbytes), f"{each.blocks:,}", f"{each.hit_rate:.1%}", f"{each.tokens:,}"
        table.add_row(*row)
    console.print(table)


def _prompts(path: Path, console: Console) -> Iterator[list[int]]:
    decode = msgspec.json.Decoder(_Prompt).decode
    with (
        path.open("rb") as file,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("reading the trace", total=path.stat().st_size)
        for number, line in enumerate(_lines(file, path), 1):
            if not number % 256:
                progress.update(task, completed=file.tell())
            if line.strip():
                try:
                    yield decode(line).hash_ids
                except msgspec.MsgspecError as error:
                    text = f"line {number} of {path}: {error}; give one JSON object per line"
                    raise Refused(Code.BAD_CONFIG, text) from error


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    try:
        yield from gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    except (EOFError, gzip.BadGzipFile) as error:
        raise Refused(Code.BAD_CONFIG, f"{path} is damaged: {error}") from error
