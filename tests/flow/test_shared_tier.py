"""A tier whose storage other hosts use, too, through a real daemon."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from kvferry.testing.engine import until
from support.patient_daemon import PatientDaemon
from support.tiered_engine import PAGE, TieredEngine


def test_blocks_are_written_and_found_in_the_epoch_that_is_settled() -> None:
    options: dict[str, Any] = {
        "tiers_custom_module": "kvferry.testing.memory_tier",
        "tiers_custom_options": "{ size = 16777216, shared = true }",
        "tiers_custom_shared": "true",
        "tiers_custom_write": "write_through",
    }
    with PatientDaemon(pool_bytes=1 << 20, **options) as daemon, ExitStack() as stack:
        engine = TieredEngine(daemon, stack, cpu_bytes_to_use=32 * PAGE)
        engine.store(range(8))
        engine.wait_written(8)
        engine.client.reset()
        assert engine.find(range(8)).prefix == 0
        engine.store(range(8, 16))
        engine.wait_written(16)
        engine.store(range(100, 132))  # evicts them
        until(lambda: engine.find(range(8, 16)).prefix == 8)
        engine.promote(range(8, 16))
        engine.load(range(8, 16))
        assert engine.find(range(8)).prefix == 0
        assert engine.tier().errors == 0
