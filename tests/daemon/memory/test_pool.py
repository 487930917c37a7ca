"""The host pool: limits of memory and descriptors, and the pool before it."""

from __future__ import annotations

import os
import resource
from importlib import import_module
from typing import Any

import pytest

from kvferry.daemon import app
from kvferry.daemon.app import DESCRIPTORS, check_descriptors, make_engine
from kvferry.daemon.config import Config, PoolConfig
from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.daemon.memory.available_memory import available_memory
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.memory.pool import HostPool, check_fits
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.daemon.systemd import Supervisor
from kvferry.proto.errors import Code, Refused
from kvferry.proto.sizes import parse_bytes
from kvferry.shm.memfd import sealed_memfd


def test_a_pool_larger_than_memory_is_refused() -> None:
    check_fits(available_memory()[0] // 2)
    with pytest.raises(Refused, match=r"reduce pool\.size") as refused:
        check_fits(1 << 50)
    assert refused.value.code == Code.POOL_TOO_LARGE
    assert "a host pool of 1024 TiB does not fit" in str(refused.value)


@pytest.mark.parametrize(
    "config", [PoolConfig("4MiB", "1MiB"), PoolConfig("2MiB", "1MiB", keep=False)]
)
def test_a_released_pool_makes_room_for_the_next_one(
    config: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check whether the new pool fits counts the memory of the old one.

    store_new_pool() frees the memory, although other processes still have the descriptors.
    """
    old = [sealed_memfd("pool", 1 << 20) for _ in range(2)]
    for descriptor in old:
        os.pwrite(descriptor, bytes(1 << 20), 0)
    supervisor = Supervisor({})
    supervisor.stored_fds = {
        f"pool-{number:05}": os.dup(descriptor) for number, descriptor in enumerate(old)
    }
    supervisor.stored_fds["incarnation"] = PoolIncarnation().descriptor
    spares: list[int] = []

    def check(nbytes: int, *, spare: int) -> None:
        spares.append(spare)

    monkeypatch.setattr(app, "check_fits", check)
    pool, kept = app.make_pool(Config(pool=config), supervisor)
    assert spares == [2 << 20]
    assert sum(os.fstat(descriptor).st_blocks for descriptor in old) == (2 << 20) // 512
    kept.store_new_pool()
    assert [os.fstat(descriptor).st_blocks for descriptor in old] == [0, 0]
    assert not [chunk for chunk in pool.descriptors if os.fstat(chunk).st_blocks]
    pool.close(ReferenceEngine())
    for descriptor in old:
        os.close(descriptor)


@pytest.mark.parametrize("chunk", ["1000000", "2MiB"])
def test_the_engine_and_the_pool_have_equal_chunks(
    chunk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both round pool.chunk to pages."""
    assert isinstance(make_engine(Config(device="CPU")), ReferenceEngine)  # in any case
    created: list[Any] = []
    engine = import_module("kvferry.daemon.engine.cuda.cuda_engine")
    monkeypatch.setattr(engine, "CudaEngine", lambda _, options: created.append(options))
    make_engine(Config(device="0", pool=PoolConfig(chunk=chunk)))
    pool = HostPool(4 << 20, parse_bytes(chunk))
    assert [options.chunk_bytes for options in created] == [pool.chunk_bytes]
    pool.close(ReferenceEngine())


def test_the_descriptor_limit_counts_chunks_of_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2 * (DESCRIPTORS + (32 << 20) // PAGE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    check_descriptors(32 << 20, 2000)
    with pytest.raises(Refused, match=r"pool\.chunk"):
        check_descriptors((32 << 20) + 1, 2000)
