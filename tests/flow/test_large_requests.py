"""A request of a million tokens, and the largest layouts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KVLayout,
    Lookup,
    OffloadClient,
    OffloadingManager,
    TensorLayout,
    TensorRef,
    shared_empty,
)
from kvferry.proto.messages import Allocated, AllocateKVCaches
from kvferry.proto.specs import MAX_REFS, MAX_TENSORS
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.process_usage import ProcessUsage
from support.raw_client import RawClient
from support.time_limits import TIMEOUT

# A million tokens in blocks of 16, and bytes of a GPU block.
BLOCKS, PAGE = 62_500, 64
FINGERPRINT = Fingerprint("model", 2 * PAGE, key_bytes=64)
KEYS = [number.to_bytes(64) for number in range(BLOCKS)]
EVERY = GPULoadStoreSpec(range(2 * BLOCKS))


def test_a_prompt_of_a_million_tokens(start_kvferryd: StartKvferryd, tmp_path: Path) -> None:
    """By key, two GPU blocks in a host block."""
    numbered = torch.arange(2 * BLOCKS)[:, None].expand(-1, PAGE // 8)
    tensor = shared_empty((2 * BLOCKS, PAGE // 8), torch.int64)
    tensor.copy_(numbered)
    daemon = start_kvferryd(pool_bytes=32 << 20, tiers_disk_path=tmp_path, tiers_disk_size="64MiB")
    with OffloadClient(daemon.directory, timeout=TIMEOUT) as client:
        client.open_namespace(FINGERPRINT)
        client.register_kv_caches({"layer": tensor}, num_blocks=2 * BLOCKS, block_size_factor=2)
        manager = OffloadingManager(client)
        search = manager.prefetch(KEYS)
        until(lambda: manager.lookup(KEYS[0]) is Lookup.MISS)
        assert (search.done, search.found_keys) == (True, ())
        offered = manager.prepare_store(KEYS)
        assert offered is not None
        client.transfer_async(1, (EVERY, offered.store_spec))
        client.wait([1])
        manager.complete_store(KEYS)
        (stored,) = client.get_finished()
        assert (stored.job_id, stored.transfer_size) == (1, tensor.nbytes)
        until(lambda: all(manager.lookup(key) is Lookup.HIT for key in KEYS))
        tensor.zero_()
        manager.touch(KEYS)
        client.transfer_async(2, (manager.prepare_load(KEYS), EVERY))
        client.wait([2])
        manager.complete_load(KEYS)
        (loaded,) = client.get_finished()
        assert (loaded.job_id, loaded.transfer_size) == (2, tensor.nbytes)
        assert torch.equal(tensor, numbered)
        assert manager.usage.pinned == 0


def test_the_largest_layouts_take_little_memory(start_kvferryd: StartKvferryd) -> None:
    """A granted layout takes about 2 MB in the daemon: its arrays and its tensor mappings."""
    tensors = (TensorLayout(1, PAGE, PAGE),) * MAX_TENSORS
    refs = tuple(TensorRef(tensor, PAGE) for tensor in range(MAX_TENSORS))
    largest = KVLayout(tensors, (refs,) * (MAX_REFS // MAX_TENSORS))
    daemon, engines = start_kvferryd(pool_bytes=64 << 20), 8
    with ExitStack() as stack:
        for number in range(engines + 1):
            raw = stack.enter_context(RawClient(daemon.directory, f"engine-{number}"))
            raw.ask(AllocateKVCaches(number, largest, 1 << 20), Allocated)
            if number == 0:  # the first one also loads modules
                before = ProcessUsage.of(daemon.pid).private
        assert ProcessUsage.of(daemon.pid).private - before < engines * (2 << 20)
