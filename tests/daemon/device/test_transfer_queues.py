"""What a transfer at the head of its queue has to wait for."""

from __future__ import annotations

from typing import cast

import numpy as np

from kvferry.daemon.core.actions import CopyPlan
from kvferry.daemon.core.layout import BlockLayout
from kvferry.daemon.device.transfer_queues import RegistrationQueues
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.memory.shared_memory import TimelineReader
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction
from support.raw_client import one_tensor


class RevokedWhileRead:
    """An engine revokes its timeline, and then a late write of its stream reaches the fence."""

    revoked = False

    def reached(self, value: int) -> bool:
        self.revoked = True
        return True

    def is_revoked(self) -> bool:
        return self.revoked


def test_the_revocation_is_read_after_the_fence() -> None:
    layout = BlockLayout(LayoutArrays.from_layout(one_tensor()), 0, 4)
    timeline = cast(TimelineReader, RevokedWhileRead())
    queues = RegistrationQueues(Mapping(layout, np.zeros(1, dtype=np.int64)), timeline)
    plan = CopyPlan(1, 1, Direction.LOAD, (), 0, wait_for=5, after=0, host_end=0)
    assert queues.must_wait(plan, pool_ready=1 << 30)
