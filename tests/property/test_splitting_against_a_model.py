"""A transfer that the client sends in parts, compared with the same transfer in one message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.client.splitting import split_transfer
from kvferry.daemon.core.cache.cache import Cache
from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    TransferSpec,
)
from support.cached_keys import entries_of
from support.transfers_model import (
    ModelTransfer,
    changed_transfers,
    faults_of,
    models,
    moved_bytes,
    pairs_of,
    valid_transfers,
)

PROFILE = settings(max_examples=150)
LIMITS = st.integers(1, 12)


def spec_of(transfer: ModelTransfer) -> TransferSpec:
    gpu, host = transfer.spec, CPULoadStoreSpec(transfer.hosts)
    return (gpu, host) if transfer.direction is Direction.STORE else (host, gpu)


def sides(part: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    gpu, host = part if isinstance(part[0], GPULoadStoreSpec) else reversed(part)
    assert isinstance(gpu, GPULoadStoreSpec)
    assert isinstance(host, CPULoadStoreSpec)
    return gpu, host


@settings(PROFILE)
@given(st.data(), LIMITS)
def test_the_parts_move_the_bytes_of_the_transfer(data: st.DataObject, max_ids: int) -> None:
    """Each byte once, the last part first; a part is legal, and has at most `max_ids` ids."""
    model = data.draw(models())
    transfer, factor = data.draw(valid_transfers(model)), model.layout.block_size_factor
    moved: list[tuple[int, int]] = []
    for part in split_transfer(spec_of(transfer), factor, max_ids=max_ids):
        gpu, host = sides(part)
        assert gpu.block_ids.size <= max(max_ids, factor)
        assert host.block_ids.size <= max_ids
        resolved = model.block_layout.resolve(transfer.direction, gpu, host.block_ids)
        moved[:0] = pairs_of(model, resolved.extents)
    assert moved == moved_bytes(model, transfer)


def test_the_parts_of_a_load_have_its_section() -> None:
    spec = CPULoadStoreSpec(range(5)), GPULoadStoreSpec(range(5), section=3)
    parts = [sides(part)[0] for part in split_transfer(spec, 1, max_ids=2)]
    assert [part.section for part in parts] == [3, 3, 3]


@settings(PROFILE)
@given(st.data(), LIMITS)
def test_a_transfer_that_is_not_legal_has_a_part_that_is_not(
    data: st.DataObject, max_ids: int
) -> None:
    """Or the client refuses it. Blocks that occur twice may be in two parts."""
    model = data.draw(models())
    transfer, factor = data.draw(changed_transfers(model)), model.layout.block_size_factor
    faults = faults_of(model, transfer) - {Code.DUPLICATE_BLOCK}
    try:
        for part in split_transfer(spec_of(transfer), factor, max_ids=max_ids):
            gpu, host = sides(part)
            model.block_layout.resolve(transfer.direction, gpu, host.block_ids)
    except Refused:
        assert faults_of(model, transfer)
    else:
        assert not faults


@pytest.mark.parametrize("hosts", [3, 5])
def test_host_blocks_that_do_not_match_are_refused_before_anything_is_sent(hosts: int) -> None:
    spec = GPULoadStoreSpec(range(8)), CPULoadStoreSpec(range(hosts))
    with pytest.raises(Refused, match="name 4 host blocks") as refused:
        split_transfer(spec, 2, max_ids=2)
    assert refused.value.code == Code.SIZE_MISMATCH


@settings(PROFILE)
@given(st.integers(1, 40), st.integers(1, 4), LIMITS, st.sampled_from(["lru", "arc"]))
def test_the_keys_of_a_store_in_parts_are_evicted_in_the_same_order(
    number: int, factor: int, max_keys: int, policy: str
) -> None:
    """The first key last."""
    keys = tuple(bytes([each]) for each in range(number))
    spec = GPULoadStoreSpec(range(number * factor)), KeyLoadStoreSpec(keys, 3)
    caches = []
    for parts in ([spec], split_transfer(spec, factor, max_keys)):
        cache = Cache(number, policy, 1)
        for gpu, host in parts:
            assert isinstance(gpu, GPULoadStoreSpec)
            assert isinstance(host, KeyLoadStoreSpec)
            assert (gpu.block_ids.size, host.epoch) == (factor * len(host.keys), 3)
            reservation = cache.prepare_store(host.keys)
            assert reservation is not None
            cache.complete_store(reservation, success=True)
        caches.append([key for key, _ in entries_of(cache)])
    assert caches[0] == caches[1] == list(reversed(keys))
