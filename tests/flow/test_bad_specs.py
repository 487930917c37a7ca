"""A refused transfer returns a code, is counted, and copies no byte.

tests/daemon/core/test_layout.py and test_transfers.py cover which transfers are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LocalDaemon,
    Refused,
    TransferSpec,
)
from kvferry.testing.engine import GroupOptions, SmallEngine, StartSmallEngine

ALL = range(32)
TWO_GROUPS = (GroupOptions(2, (4, 2, 8)), GroupOptions(3, (2, 1, 8)))


def gpu(ids: list[int], sizes: Any = None, firsts: Any = None) -> GPULoadStoreSpec:
    sizes = (len(ids), 0) if sizes is None else sizes
    return GPULoadStoreSpec(np.array(ids, dtype=np.int64), sizes, firsts)


def cpu(*ids: int) -> CPULoadStoreSpec:
    return CPULoadStoreSpec(np.array(ids, dtype=np.int64))


def errors(engine: SmallEngine, code: Code) -> int:
    return engine.client.status().errors.get(code, 0)


@pytest.fixture
def engine(start_engine: StartSmallEngine, daemon: LocalDaemon) -> SmallEngine:
    """Two groups, factor 2, 16 host blocks, all of them written by stores."""
    opened = start_engine(daemon, groups=TWO_GROUPS, block_size_factor=2, host_bytes=16 * 2 * 512)
    assert opened.region.num_blocks == 16
    fence = opened.worker.write(ALL, 1)
    opened.finish(opened.store(ALL, range(16), sizes=(32, 0), wait_for=fence))
    return opened


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ((gpu([0, 32]), cpu(0)), Code.BLOCK_OUT_OF_RANGE),
        ((cpu(0), gpu([4, 4])), Code.DUPLICATE_BLOCK),
    ],
    ids=["store", "load"],
)
def test_a_refused_transfer_copies_nothing_and_does_not_affect_others(
    engine: SmallEngine, spec: TransferSpec, code: Code
) -> None:
    fence = engine.worker.write(ALL, 2)
    before, counted = engine.worker.snapshot(), errors(engine, code)
    held = engine.store([30, 31], [15], sizes=(2, 0), wait_for=fence + 1)
    refused_job = engine.submit(spec)
    (result,) = engine.finish(refused_job)
    assert (result.outcome, result.success, result.transfer_size) == ("refused", False, 0)
    assert isinstance(result.error, Refused)
    assert result.error.code == code
    assert result.error.message
    assert errors(engine, code) == counted + 1

    assert engine.worker.signal() == fence + 1
    assert engine.finish(held)[0].success
    snapshots = zip(engine.worker.snapshot(), before, strict=True)
    assert all(np.array_equal(now, then) for now, then in snapshots)
    engine.finish(engine.load(range(16), ALL, sizes=(32, 0)))
    wanted = engine.expected(ALL, 1)
    wanted[30:] = engine.expected([30, 31], 2)
    assert np.array_equal(engine.worker.read(ALL), wanted)
