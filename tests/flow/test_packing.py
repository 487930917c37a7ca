"""Packed host blocks through real processes: equal bytes, and blocks that cannot be packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.client import (
    Code,
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    OffloadClient,
    Refused,
    TensorLayout,
    TensorRef,
    offload_key,
)
from kvferry.client.doctor import run_checks
from kvferry.proto.keys import Lookup
from kvferry.proto.packing import packed_bytes
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.time_limits import PROMPTLY

PAGE, BLOCKS, FACTOR = 8192, 32, 2
LAYOUT = KVLayout(
    (TensorLayout(BLOCKS, PAGE, PAGE),) * 2,
    ((TensorRef(0, PAGE), TensorRef(1, PAGE)),),
    FACTOR,
    True,
)
FINGERPRINT = Fingerprint(
    "llama",
    LAYOUT.host_block_bytes,
    dtype="bfloat16",
    hash_algorithm="sha256",
    key_bytes=12,
    extra=(("packing", "12.25 bits"),),
)


def keys(*numbers: int) -> list[bytes]:
    return [offload_key(number.to_bytes(8, "big")) for number in numbers]


def values(seed: int) -> torch.Tensor:
    """The pages of a GPU block, as bfloat16: (2, PAGE / 2)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, PAGE // 2), generator=generator).to(torch.bfloat16)


class PackedEngine:
    def __init__(self, directory: Any, stack: ExitStack, name: str = "engine") -> None:
        self.client = stack.enter_context(OffloadClient(directory, engine=name))
        self.client.open_namespace(FINGERPRINT)
        self._tensors = self.client.allocate_kv_caches(LAYOUT).tensors
        self._jobs = 0

    def write(self, block: int, pages: torch.Tensor) -> None:
        for tensor, page in zip(self._tensors, pages, strict=True):
            tensor[block] = page.view(torch.int8).to(tensor.device)

    def read(self, block: int) -> torch.Tensor:
        return torch.stack([tensor[block].cpu().view(torch.bfloat16) for tensor in self._tensors])

    def transfer(self, spec: Any) -> Any:
        self._jobs += 1
        self.client.transfer_async(self._jobs, spec)
        self.client.wait([self._jobs])
        (result,) = self.client.get_finished()
        assert result.success, result.error
        return result

    def store(self, *numbers: int) -> Any:
        """Store keys; key n has GPU blocks 2n and 2n + 1."""
        blocks = [block for n in numbers for block in (FACTOR * n, FACTOR * n + 1)]
        return self.transfer((GPULoadStoreSpec(blocks), KeyLoadStoreSpec(keys(*numbers))))

    def load(self, number: int, into: int) -> None:
        spec = KeyLoadStoreSpec(keys(number)), GPULoadStoreSpec([into, into + 1])
        self.transfer(spec)

    def lookup(self, number: int) -> Lookup:
        return self.client.lookup(keys(number)[0])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_packed_blocks_are_equal_and_smaller(
    device: str, start_kvferryd: StartKvferryd, stack: ExitStack
) -> None:
    daemon = start_kvferryd("0" if device.startswith("cuda") else device)
    engine = PackedEngine(daemon.directory, stack)
    for block in range(8):
        engine.write(block, values(block))
    assert engine.store(0, 1, 2, 3).transfer_size == packed_bytes(8 * 2 * PAGE)
    reader = PackedEngine(daemon.directory, stack, "reader")
    until(lambda: reader.lookup(3) is Lookup.HIT, PROMPTLY)
    reader.load(3, into=20)
    for block, into in ((6, 20), (7, 21)):
        assert torch.equal(reader.read(into).view(torch.int16), values(block).view(torch.int16))
    (namespace,) = reader.client.namespaces()
    assert namespace.block_bytes == packed_bytes(FACTOR * 2 * PAGE)
    assert namespace.stores_unpackable == 0


def test_a_block_that_cannot_be_packed_is_a_miss_and_the_others_are_stored(
    device: str, start_kvferryd: StartKvferryd, stack: ExitStack
) -> None:
    daemon = start_kvferryd("0" if device.startswith("cuda") else device)
    engine = PackedEngine(daemon.directory, stack)
    for block in range(6):
        engine.write(block, values(block))
    noise = np.random.default_rng(3).integers(-128, 128, (2, PAGE), dtype=np.int8)
    engine.write(3, torch.from_numpy(noise).view(torch.bfloat16))  # the second block of key 1
    engine.store(0, 1, 2)
    until(lambda: engine.lookup(2) is Lookup.HIT, PROMPTLY)
    assert [engine.lookup(n) for n in (0, 1)] == [Lookup.HIT, Lookup.MISS]
    (namespace,) = engine.client.namespaces()
    assert (namespace.stored, namespace.stores_unpackable, namespace.ready) == (2, 1, 2)
    (warning,) = [f for f in run_checks(daemon.directory) if f.check == "packing"]
    assert warning.found.startswith("1 of 3 blocks of llama were not stored")
    engine.load(2, into=20)
    assert torch.equal(engine.read(21), values(5))
    engine.write(3, values(3))  # other KV of the key can be stored
    engine.store(1)
    until(lambda: engine.lookup(1) is Lookup.HIT, PROMPTLY)


def test_packing_needs_a_namespace_and_whole_tiles(
    start_kvferryd: StartKvferryd, stack: ExitStack
) -> None:
    client = stack.enter_context(OffloadClient(start_kvferryd().directory, engine="raw"))
    with pytest.raises(Refused, match="packed host blocks need a namespace") as refused:
        client.allocate_kv_caches(LAYOUT)
    assert refused.value.code == Code.BAD_LAYOUT
    odd = KVLayout((TensorLayout(4, 3072, 3072),), ((TensorRef(0, 3072),),), packed=True)
    with pytest.raises(Refused, match="page of 3072 bytes, not a multiple of 2048"):
        client.allocate_kv_caches(odd)
