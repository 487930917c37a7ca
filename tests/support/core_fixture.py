"""CoreFixture: a core with sessions, for example-based tests.

Sessions are named engine/process. The first session of an engine registers it. The time is
always 101.
"""

from __future__ import annotations

from typing import Any

from kvferry.daemon.core.actions import (
    Action,
    CopyPlan,
    MapTensors,
    Report,
    SendMessage,
    StartTransfer,
    TensorsMapped,
    TransferCompleted,
)
from kvferry.daemon.core.core import Core, PoolBounds
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.ports import Ports
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)
from support.own_epochs import OwnEpochs
from support.region_records_model import RegionRecordsModel

MAX_JOBS = 3
POOL = 16 * 4096
LAYOUT = KVLayout((TensorLayout(8, 1024, 1024),), ((TensorRef(0, 1024),),), 2)
MAX_GPU_BLOCKS = 16
LIMITS = proto_status.Limits(1 << 20, MAX_GPU_BLOCKS, MAX_JOBS)
DEVICE = proto_status.DeviceInfo("cpu", "cpu", "host memory")
FAULT = ErrorInfo(Code.COPY_FAILED, "the copy failed")


def new_core(pool_bytes: int = POOL) -> Core:
    return Core(
        DaemonIdentity("0.1", "boot", 4711, DEVICE, LIMITS, 100.0),
        PoolBounds(pool_bytes),
        Ports(OwnEpochs()),
    )


def store(*blocks: int, hosts: tuple[int, ...] = (0,)) -> TransferSpec:
    return GPULoadStoreSpec(blocks), CPULoadStoreSpec(hosts)


def load(*blocks: int, hosts: tuple[int, ...] = (0,)) -> TransferSpec:
    return CPULoadStoreSpec(hosts), GPULoadStoreSpec(blocks)


class CoreFixture:
    """A core and short methods for the tests. The time is always 101."""

    def __init__(
        self,
        *sessions: str,
        registered: bool = True,
        timeline: int | None = None,
        pool_bytes: int = POOL,
    ) -> None:
        """Sessions are named engine/process. The first session of an engine registers it."""
        self.core = new_core(pool_bytes)
        self.region_records = RegionRecordsModel()
        seen: set[str] = set()
        for session in sessions:
            engine = session.partition("/")[0]
            self.core.open_session(session, make_hello(session, engine))
            if registered and engine not in seen:
                (mapping,) = self.send(session, wire.AllocateKVCaches(1, LAYOUT, 4096, timeline))
                assert mapping == MapTensors(
                    len(seen) + 1, session, mapping.layout, (), None, timeline
                )
                self.report(TensorsMapped(mapping.registration, session))
            seen.add(engine)

    def send(self, session: str, message: wire.ClientMessage) -> list[Any]:
        return self.region_records.observe(self.core.handle(session, message, now=101.0))

    def report(self, report: Report) -> list[Any]:
        return self.region_records.observe(self.core.report(report))

    def submit(
        self, session: str, job_id: int, spec: TransferSpec, wait_for: int = 0, part: int = 0
    ) -> list[Any]:
        return self.send(session, wire.Submit(job_id, *spec, wait_for, part))

    def start(
        self, session: str, job_id: int, spec: TransferSpec, wait_for: int = 0, part: int = 0
    ) -> CopyPlan:
        (action,) = self.submit(session, job_id, spec, wait_for, part)
        assert isinstance(action, StartTransfer)
        return action.plan

    def fill(self, session: str) -> None:
        """Store into every host block of an engine."""
        plan = self.start(session, 1000, store(0, 1, 2, 3, hosts=(0, 1)))
        self.report(TransferCompleted(plan.serial, Outcome.DONE))

    def refused(
        self, session: str, job_id: int, spec: TransferSpec, wait_for: int = 0, part: int = 0
    ) -> str:
        """The code with which a Submit is refused."""
        (action,) = self.submit(session, job_id, spec, wait_for, part)
        (result,) = action.message.results
        assert (action.session, result.job_id, result.outcome) == (session, job_id, "refused")
        assert (result.nbytes, result.seconds) == (0, 0.0)
        return str(result.error.code)

    def error(self, session: str, message: wire.ClientMessage) -> str:
        """The code with which another request is refused."""
        (action,) = self.send(session, message)
        assert isinstance(action.message, wire.Error)
        assert action.session == session
        assert action.message.request_id == getattr(message, "request_id", None)
        return action.message.error.code


def finished(actions: list[Action]) -> list[tuple[str, int, str, str | None]]:
    """(session, job id, outcome, error code) of every result sent."""
    return [
        (a.session, r.job_id, r.outcome, None if r.error is None else r.error.code)
        for a in actions
        if isinstance(a, SendMessage) and isinstance(a.message, wire.Finished)
        for r in a.message.results
    ]
