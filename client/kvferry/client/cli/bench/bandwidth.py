"""GB/s by fragment size: random blocks to the host pool, and back into other blocks.

One round, with the GPU blocks and the host blocks each split at random in two halves (a, b; x, y):

    store   a -> x                 measured
    both    a -> y, x -> b         measured; then b must equal a
    load    y -> b                 measured, b overwritten before; then b must equal a

So each measured copy is read back by the next one. Each is done once, and then IN_A_ROW times in a
row. A sample of blocks, in all tensors, is compared; it is filled with new random bytes before each
round, so that bytes of the round before cannot pass. The first round warms up and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from kvferry.client.cli.bench.bench_engine import BenchEngine, Shape, TimedTransfers
from kvferry.client.cli.bench.bench_results import (
    DIRECTIONS,
    IN_A_ROW,
    QUICK_REPS,
    REPS,
    Copies,
    Fragments,
    Rate,
)
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.rig import BenchRig
from kvferry.client.cli.units import size
from kvferry.proto.errors import Code, Failed
from kvferry.proto.specs import BlockIds

SIZES = tuple(kib << 10 for kib in (1, 4, 16, 32, 64, 128, 256, 1024, 2048))
QUICK_SIZES = (4 << 10, 64 << 10, 2 << 20)
JOB_BYTES = 1 << 30
SAMPLE_BYTES = 16 << 20
SAMPLE_BLOCKS = 32
# Jobs in flight per direction.
AHEAD = 2


def count_steps(plan: Plan) -> int:
    """How often `measure_all` calls `step`."""
    return len(_sizes(plan)) * (plan.times(REPS, QUICK_REPS) + 2)


def measure_all(rig: BenchRig, plan: Plan, step: Callable[[str], None]) -> Iterator[Fragments]:
    """Measure each fragment size, and a contiguous copy after each."""
    for page_bytes in _sizes(plan):
        yield measure(rig, page_bytes, plan.times(REPS, QUICK_REPS), step)
        step("contiguous copy")
        rig.raw.sample()


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.pick(plan.sizes, SIZES, QUICK_SIZES)


def measure(rig: BenchRig, page_bytes: int, reps: int, step: Callable[[str], None]) -> Fragments:
    """Raises Failed (COPY_FAILED) if a copy delivered wrong bytes."""
    shape = Shape.of(page_bytes)
    rounds: list[dict[str, TimedCopies]] = []
    with rig.engine(shape) as engine:
        trip = RoundTrip(engine)
        for _ in range(reps + 1):
            step(f"fragments of {size(page_bytes)}")
            rounds.append(trip.run_round())
    copies = {
        direction: _copies([round_[direction] for round_ in rounds[1:]]) for direction in DIRECTIONS
    }
    tensors, factor, jobs = shape.tensors, shape.factor, len(trip.stores)
    return Fragments(page_bytes, tensors, factor, shape.host_block_bytes, jobs, copies)


@dataclass(frozen=True, slots=True)
class TimedCopies:
    once: TimedTransfers
    in_a_row: TimedTransfers


class RoundTrip:
    """The transfers of one round, and the blocks whose bytes are compared."""

    def __init__(self, engine: BenchEngine) -> None:
        random, half = np.random.default_rng(0), engine.host_blocks // 2
        blocks = 2 * half * engine.shape.factor
        a, b = random.permutation(engine.num_blocks)[:blocks].reshape(2, -1)
        x, y = random.permutation(engine.host_blocks)[: 2 * half].reshape(2, -1)
        self._engine = engine
        self.stores, self.more_stores = _jobs(engine, "store", a, x), _jobs(engine, "store", a, y)
        self.loads, self.more_loads = _jobs(engine, "load", b, x), _jobs(engine, "load", b, y)
        count = max(2, min(SAMPLE_BLOCKS, SAMPLE_BYTES // engine.shape.block_bytes))
        picked = random.choice(a.size, min(count, a.size), replace=False)
        device = engine.pages.device
        self._a, self._b = (torch.from_numpy(ids[picked]).to(device) for ids in (a, b))

    def run_round(self) -> dict[str, TimedCopies]:
        self._randomize(self._a)
        store = self._run(self.stores, AHEAD)
        both = self._run(_interleave(self.more_stores, self.loads), 2 * AHEAD)
        self._compare()
        self._randomize(self._b)
        load = self._run(self.more_loads, AHEAD)
        self._compare()
        return {"store": store, "load": load, "both": both}

    def _run(self, specs: list[TransferSpec], ahead: int) -> TimedCopies:
        return TimedCopies(self._engine.run(specs), self._engine.run(specs * IN_A_ROW, ahead=ahead))

    def _randomize(self, blocks: torch.Tensor) -> None:
        """Write new random bytes to the sampled blocks, before anything is submitted."""
        pages = self._engine.pages
        shape = (pages.shape[0], len(blocks), pages.shape[2])
        pages[:, blocks] = torch.randint(-128, 128, shape, dtype=torch.int8, device=pages.device)
        self._engine.synchronize()

    def _compare(self) -> None:
        pages = self._engine.pages
        if not torch.equal(pages[:, self._a], pages[:, self._b]):
            raise Failed(
                Code.COPY_FAILED,
                f"fragments of {size(pages.shape[2])} came back with other bytes; report a bug",
                f"fragments of {size(pages.shape[2])}",
            )


def _jobs(
    engine: BenchEngine, direction: str, blocks: BlockIds, hosts: BlockIds
) -> list[TransferSpec]:
    """Jobs of about JOB_BYTES that copy GPU blocks, in order, to or from host blocks."""
    factor = engine.shape.factor
    step = max(1, JOB_BYTES // engine.shape.host_block_bytes)
    specs: list[TransferSpec] = []
    for at in range(0, hosts.size, step):
        gpu = GPULoadStoreSpec(blocks[at * factor : (at + step) * factor])
        host = CPULoadStoreSpec(hosts[at : at + step])
        specs.append((gpu, host) if direction == "store" else (host, gpu))
    return specs


def _interleave(first: list[TransferSpec], second: list[TransferSpec]) -> list[TransferSpec]:
    return list(chain.from_iterable(zip(first, second, strict=True)))


def _copies(rounds: list[TimedCopies]) -> Copies:
    once, in_a_row = [each.once for each in rounds], [each.in_a_row for each in rounds]
    return Copies(
        Rate.of(once[0].nbytes, [moved.wall for moved in once]),
        Rate.of(in_a_row[0].nbytes, [moved.wall for moved in in_a_row]),
        Rate.of(once[0].nbytes, [moved.device for moved in once]),
    )
