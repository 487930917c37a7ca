"""Loads of one section of the layers, through real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    OffloadClient,
    Refused,
    TensorLayout,
    TensorRef,
    shared_empty,
)
from kvferry.testing.plugin import StartKvferryd

PAGE, LAYERS, SECTIONS = 4096, 5, 2
LAYOUT = KVLayout(
    (TensorLayout(8, PAGE, PAGE),) * LAYERS,
    (tuple(TensorRef(layer, PAGE) for layer in range(LAYERS)),),
    sections=SECTIONS,
)
GPU, HOST = [3, 1, 6], CPULoadStoreSpec([0, 1, 2])


@pytest.fixture
def client(start_kvferryd: StartKvferryd, device: str) -> Iterator[OffloadClient]:
    daemon = start_kvferryd("0" if device.startswith("cuda") else device)
    with OffloadClient(daemon.directory, engine="engine") as client:
        yield client


def test_sections_arrive_one_after_the_other(client: OffloadClient) -> None:
    tensors = client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20).tensors
    for layer, tensor in enumerate(tensors):
        tensor.fill_(layer + 1)
    synchronize(tensors)
    client.transfer_async(1, (GPULoadStoreSpec(GPU), HOST))
    client.wait([1])
    for tensor in tensors:
        tensor.zero_()
    synchronize(tensors)
    for section, loaded in ((1, {2, 3, 4}), (0, {0, 1, 2, 3, 4})):
        client.transfer_async(2 + section, (HOST, GPULoadStoreSpec(GPU, section=section)))
        client.wait([2 + section])
        for layer, tensor in enumerate(tensors):
            wanted = torch.zeros(8, PAGE, dtype=torch.int8)
            wanted[GPU] = layer + 1 if layer in loaded else 0
            assert torch.equal(tensor.cpu(), wanted), f"layer {layer}, section {section}"
    results = client.get_finished()
    pages = [LAYERS, LAYERS - LAYERS // SECTIONS, LAYERS // SECTIONS]
    assert [result.transfer_size for result in results] == [len(GPU) * PAGE * n for n in pages]


def test_a_section_that_is_not_registered_is_refused(client: OffloadClient, device: str) -> None:
    caches = {str(n): shared_empty((8, PAGE), torch.int8, device) for n in range(LAYERS)}
    with pytest.raises(Refused, match="6 sections of 1 groups, one of which has 5 references"):
        client.register_kv_caches(caches, num_blocks=8, sections=LAYERS + 1)
    client.register_kv_caches(caches, num_blocks=8, sections=SECTIONS, host_bytes=1 << 20)
    client.transfer_async(1, (HOST, GPULoadStoreSpec(GPU, section=SECTIONS)))
    client.transfer_async(2, (GPULoadStoreSpec(GPU, section=0), HOST))
    client.wait([1, 2])
    for result in client.get_finished():
        assert result.error is not None
        assert result.error.code == Code.BAD_SPEC


def synchronize(tensors: list[torch.Tensor]) -> None:
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
