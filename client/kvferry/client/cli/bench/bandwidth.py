"""GB/s by fragment size: random blocks to the host pool and back into others.

One round, with the slab's blocks and the host blocks each split at random in two (a, b and x, y):

    store   a -> x                 measured
    both    a -> y, x -> b         measured; then b must hold what a holds
    load    y -> b                 measured, b overwritten before; then the same again

so each measured copy is read back by the next one; each is done once, after nothing, and then some
times over. What is compared is a sample of blocks, in all tensors, filled with new random bytes
before every round: bytes left from the last one would show. The first round warms up and does not
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from kvferry.client.cli.bench.engine import Engine, Moved, Shape
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.results import (
    IN_A_ROW,
    QUICK_REPS,
    REPS,
    WAYS,
    Copies,
    Fragments,
    Rate,
)
from kvferry.client.cli.bench.rig import Rig
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


def steps(plan: Plan) -> int:
    """How often `measure_all` calls `step`."""
    return len(_sizes(plan)) * (plan.times(REPS, QUICK_REPS) + 2)


def measure_all(rig: Rig, plan: Plan, step: Callable[[str], None]) -> Iterator[Fragments]:
    """Every fragment size, and a contiguous copy after each."""
    for page_bytes in _sizes(plan):
        yield measure(rig, page_bytes, plan.times(REPS, QUICK_REPS), step)
        step("contiguous copy")
        rig.raw.sample()


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.pick(plan.sizes, SIZES, QUICK_SIZES)


def measure(rig: Rig, page_bytes: int, reps: int, step: Callable[[str], None]) -> Fragments:
    """Raises Failed (COPY_FAILED) where a copy brought other bytes than it should."""
    shape = Shape.of(page_bytes)
    rounds: list[dict[str, Went]] = []
    with rig.engine(shape) as engine:
        trip = Trip(engine)
        for _ in range(reps + 1):
            step(f"fragments of {size(page_bytes)}")
            rounds.append(trip.round())
    copies = {way: _copies([went[way] for went in rounds[1:]]) for way in WAYS}
    tensors, factor, jobs = shape.tensors, shape.factor, len(trip.stores)
    return Fragments(page_bytes, tensors, factor, shape.host_block_bytes, jobs, copies)


@dataclass(frozen=True, slots=True)
class Went:
    once: Moved
    in_a_row: Moved


class Trip:
    """The transfers of one round, made once, and the blocks whose bytes are compared."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        random, half = np.random.default_rng(seed), engine.host_blocks // 2
        blocks = 2 * half * engine.shape.factor
        a, b = random.permutation(engine.num_blocks)[:blocks].reshape(2, -1)
        x, y = random.permutation(engine.host_blocks)[: 2 * half].reshape(2, -1)
        self._engine = engine
        self.stores, self.stores_too = _jobs(engine, "store", a, x), _jobs(engine, "store", a, y)
        self.loads, self.loads_too = _jobs(engine, "load", b, x), _jobs(engine, "load", b, y)
        count = max(2, min(SAMPLE_BLOCKS, SAMPLE_BYTES // engine.shape.block_bytes))
        picked = random.choice(a.size, min(count, a.size), replace=False)
        device = engine.pages.device
        self._a, self._b = (torch.from_numpy(ids[picked]).to(device) for ids in (a, b))

    def round(self) -> dict[str, Went]:
        self._renew(self._a)
        store = self._go(self.stores, AHEAD)
        both = self._go(_alternating(self.stores_too, self.loads), 2 * AHEAD)
        self._compare()
        self._renew(self._b)
        load = self._go(self.loads_too, AHEAD)
        self._compare()
        return {"store": store, "load": load, "both": both}

    def _go(self, specs: list[TransferSpec], ahead: int) -> Went:
        return Went(self._engine.run(specs), self._engine.run(specs * IN_A_ROW, ahead=ahead))

    def _renew(self, blocks: torch.Tensor) -> None:
        """New random bytes in the sampled blocks, before anything is submitted."""
        pages = self._engine.pages
        shape = (pages.shape[0], len(blocks), pages.shape[2])
        pages[:, blocks] = torch.randint(-128, 128, shape, dtype=torch.int8, device=pages.device)
        self._engine.settle()

    def _compare(self) -> None:
        pages = self._engine.pages
        if not torch.equal(pages[:, self._a], pages[:, self._b]):
            raise Failed(
                Code.COPY_FAILED,
                f"fragments of {size(pages.shape[2])} came back with other bytes; report a bug",
                f"fragments of {size(pages.shape[2])}",
            )


def _jobs(engine: Engine, way: str, blocks: BlockIds, hosts: BlockIds) -> list[TransferSpec]:
    """GPU blocks in this order to or from these host blocks, in jobs of about JOB_BYTES."""
    factor = engine.shape.factor
    step = max(1, JOB_BYTES // engine.shape.host_block_bytes)
    specs: list[TransferSpec] = []
    for at in range(0, hosts.size, step):
        gpu = GPULoadStoreSpec(blocks[at * factor : (at + step) * factor])
        host = CPULoadStoreSpec(hosts[at : at + step])
        specs.append((gpu, host) if way == "store" else (host, gpu))
    return specs


def _alternating(some: list[TransferSpec], others: list[TransferSpec]) -> list[TransferSpec]:
    return list(chain.from_iterable(zip(some, others, strict=True)))


def _copies(went: list[Went]) -> Copies:
    once, in_a_row = [each.once for each in went], [each.in_a_row for each in went]
    return Copies(
        Rate.of(once[0].nbytes, [moved.wall for moved in once]),
        Rate.of(in_a_row[0].nbytes, [moved.wall for moved in in_a_row]),
        Rate.of(once[0].nbytes, [moved.device for moved in once]),
    )
