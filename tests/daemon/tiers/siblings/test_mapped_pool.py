"""Copies from a sibling's pool stay inside its chunks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kvferry.daemon.tiers.siblings import mapped_pool
from kvferry.daemon.tiers.siblings.mapped_pool import MappedPool

from kvferry.proto.errors import Code, Refused
from kvferry.shm.memfd import sealed_memfd

CHUNK = 8192


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """Two chunks and a half, of bytes that differ."""
    with ExitStack() as opened:
        made = []
        for number, size in enumerate((CHUNK, CHUNK, CHUNK // 2)):
            made.append(sealed_memfd("chunk", size))
            opened.callback(os.close, made[-1])
            os.pwrite(made[-1], content(number * CHUNK, size), 0)
        yield made


def content(offset: int, nbytes: int) -> bytes:
    return bytes((at * 7 + at // 256) % 256 for at in range(offset, offset + nbytes))


def copied(pool: MappedPool, offset: int, nbytes: int) -> bytes | None:
    target = ctypes.create_string_buffer(nbytes)
    done = pool.copy_block(offset, nbytes, ctypes.addressof(target))
    return target.raw if done else None


def test_blocks_are_copied_also_across_chunks(descriptors: list[int]) -> None:
    pool = MappedPool(CHUNK, 0)
    for descriptor in descriptors:
        pool.add_chunk(os.dup(descriptor))
    pool.map()
    for offset, nbytes in ((0, 4096), (CHUNK - 100, 300), (1, 2 * CHUNK), (2 * CHUNK, CHUNK // 2)):
        assert copied(pool, offset, nbytes) == content(offset, nbytes)


def test_the_first_chunk_may_have_any_number(descriptors: list[int]) -> None:
    pool = MappedPool(CHUNK, CHUNK)
    pool.add_chunk(os.dup(descriptors[1]))
    assert copied(pool, CHUNK, CHUNK) is None
    pool.map()
    assert copied(pool, CHUNK, CHUNK) == content(CHUNK, CHUNK)
    assert copied(pool, 0, 10) is None


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(2 * CHUNK + CHUNK // 2 - 1, 2), (3 * CHUNK, 1), (1 << 62, 1), (-1, 1), (-CHUNK, 4)],
)
def test_nothing_beyond_the_chunks_is_read(
    descriptors: list[int], offset: int, nbytes: int
) -> None:
    pool = MappedPool(CHUNK, 0)
    for descriptor in descriptors:
        pool.add_chunk(os.dup(descriptor))
    pool.map()
    assert copied(pool, offset, nbytes) is None


def test_memory_that_its_owner_can_shrink_is_refused() -> None:
    descriptor = os.memfd_create("chunk", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, CHUNK)
    with pytest.raises(Refused, match="shrunk") as raised:
        MappedPool(CHUNK, 0).add_chunk(descriptor)
    assert raised.value.code == Code.NOT_SHAREABLE


@pytest.mark.parametrize("nbytes", [0, 2 * CHUNK])
def test_chunks_of_a_wrong_size_are_refused(nbytes: int) -> None:
    descriptor = sealed_memfd("chunk", nbytes)
    with pytest.raises(Refused, match="not up to 8192"):
        MappedPool(CHUNK, 0).add_chunk(descriptor)


def test_only_the_last_chunk_may_be_smaller(descriptors: list[int]) -> None:
    pool = MappedPool(CHUNK, 0)
    pool.add_chunk(os.dup(descriptors[2]))
    with pytest.raises(Refused, match="not up to 8192"):
        pool.add_chunk(os.dup(descriptors[0]))


def test_the_chunks_of_one_sibling_are_limited(
    descriptors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_pool, "MAX_CHUNKS", 2)
    pool = MappedPool(CHUNK, 0)
    for descriptor in descriptors[:2]:
        pool.add_chunk(os.dup(descriptor))
    with pytest.raises(Refused, match=r"more than 2 chunks; raise its pool.chunk"):
        pool.add_chunk(os.dup(descriptors[2]))


def test_the_memory_is_unmapped_with_the_pool(descriptors: list[int]) -> None:
    """The memory of a sibling that has died must not stay."""
    pool = MappedPool(CHUNK, 0)
    before = mappings()
    pool.add_chunk(os.dup(descriptors[0]))
    pool.map()
    assert mappings() == before + 1
    del pool
    assert mappings() == before


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:chunk")
