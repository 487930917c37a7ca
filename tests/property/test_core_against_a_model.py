"""The core as a machine to which anything legal may happen.

The machine stands for the server and the device worker: it keeps the commands that the core gave,
reports what a worker could report in any order, and checks every reply against the requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.daemon.core.actions import (
    Action,
    CancelTransfers,
    CloseSession,
    CopyPlan,
    MapTensors,
    SendMessage,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.results import Outcome
from kvferry.proto.specs import KVLayout
from support.core_fixture import (
    FAULT,
    LAYOUT,
    MAX_JOBS,
    OTHER,
    POOL,
    finished,
    load,
    new_core,
    store,
)
from support.region_records_model import RegionRecordsModel


@dataclass
class ExpectedRegistration:
    """A registration as the device worker sees it: to be mapped, mapped, to be let go."""

    number: int
    engine: str
    session: str
    mapped: bool = False
    failed: bool = False
    leaving: bool = False
    timeline: bool = False
    plans: dict[int, CopyPlan] = field(default_factory=dict)


class CoreMachine(RuleBasedStateMachine):
    """Server and device worker. `owed` is what every living session has still to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.core = new_core()
        self.region_records = RegionRecordsModel()
        self.names = (f"s{n}" for n in count())
        self.request_ids = count(1)
        self.engine_of: dict[str, str] = {}
        self.claims: dict[int, ExpectedRegistration] = {}
        self.jobs: dict[int, tuple[str, int]] = {}
        """serial -> (engine, job id) of every plan that has not ended"""
        self.owner: dict[int, str] = {}
        """serial -> the session that wants to hear of it"""
        self.abandoned: set[int] = set()
        self.owed: dict[tuple[str, int], tuple[type[wire.DaemonMessage], ...]] = {}
        self.waits: dict[tuple[str, int], set[int]] = {}
        self.ending: tuple[int, str, str | None] | None = None
        """(serial, outcome, error code) that the result has to tell"""
        self.refusing: int | None = None
        self.refusals: list[str] = []

    # What the core may ask for

    def perform(self, actions: list[Action]) -> None:
        for action in self.region_records.observe(actions):
            match action:
                case SendMessage(session, message):
                    assert session in self.engine_of
                    self.told(session, message)
                case CloseSession(session):
                    self.forget(session)
                case MapTensors(number, session):
                    assert number not in self.claims
                    engine = self.engine_of[session]
                    assert engine not in {claim.engine for claim in self.claims.values()}
                    timeline = action.timeline is not None
                    self.claims[number] = ExpectedRegistration(
                        number, engine, session, timeline=timeline
                    )
                case UnmapTensors(number):
                    assert not self.claims[number].leaving
                    self.claims[number].leaving = True
                case StartTransfer(plan=plan):
                    claim = self.claims[plan.registration]
                    assert claim.mapped
                    assert not claim.leaving
                    assert plan.serial not in self.jobs
                    assert plan.after < plan.serial
                    claim.plans[plan.serial] = plan
                case CancelTransfers(number, serials):
                    assert self.claims[number].plans.keys() >= set(serials)
                    self.abandoned |= set(serials)

    def told(self, session: str, message: wire.DaemonMessage) -> None:
        match message:
            case wire.Finished((result,)) if result.outcome is Outcome.REFUSED:
                assert result.job_id == self.refusing
                assert result.error is not None
                self.refusals.append(result.error.code)
            case wire.Finished((result,)):
                assert self.ending is not None
                serial, outcome, code = self.ending
                assert self.owner.pop(serial) == session  # only once, and to whom it belongs
                assert (result.job_id, result.outcome) == (self.jobs[serial][1], outcome)
                assert (result.error and result.error.code) == code
            case (
                wire.Finished()
                | wire.Welcome()
                | wire.Goodbye()
                | wire.Snapshot()
                | wire.KeyEvents()
            ):
                raise AssertionError(message)
            case reply:
                assert reply.request_id is not None  # an Error to nothing
                key = session, reply.request_id
                assert isinstance(reply, self.owed.pop(key))
                if isinstance(reply, wire.Waited):
                    assert not self.waits.pop(key, set())  # all of them have ended

    def forget(self, session: str) -> None:
        del self.engine_of[session]
        self.owed = {key: kind for key, kind in self.owed.items() if key[0] != session}
        self.owner = {serial: who for serial, who in self.owner.items() if who != session}

    def send(self, session: str, message: wire.ClientMessage, *kinds: Any) -> None:
        request_id = getattr(message, "request_id", None)
        if request_id is not None:
            self.owed[session, request_id] = (*kinds, wire.Error)
        self.perform(self.core.handle(session, message, now=101.0))

    def session(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.engine_of)))

    def open_claim(self, engine: str) -> ExpectedRegistration | None:
        claims = [c for c in self.claims.values() if c.engine == engine]
        return next((c for c in claims if c.mapped and not c.leaving), None)

    # Clients

    @initialize()
    def begin(self) -> None:
        self.hello("a")

    @rule(engine=st.sampled_from("ab"))
    def open_sessions(self, engine: str) -> None:
        self.hello(engine)

    def hello(self, engine: str) -> None:
        name = next(self.names)
        (action,) = self.core.open_session(name, wire.Hello(1, 1, "client", engine))
        assert isinstance(action, SendMessage)
        if self.core.stopping:
            assert isinstance(action.message, wire.Error)
        else:
            assert isinstance(action.message, wire.Welcome)
            self.engine_of[name] = engine

    @precondition(lambda self: self.engine_of)
    @rule(
        data=st.data(),
        layout=st.sampled_from([LAYOUT, OTHER]),
        host_bytes=st.sampled_from([None, 1, 4096, 8192, POOL]),
        timeline=st.sampled_from([None, 3]),
        own=st.booleans(),
    )
    def register(
        self,
        data: st.DataObject,
        layout: KVLayout,
        host_bytes: int | None,
        timeline: int | None,
        own: bool,
    ) -> None:
        request_id, session = next(self.request_ids), self.session(data)
        if own:
            where = (memory.FdAllocation(1, 8192),), (memory.Location(0, data.draw(_OFFSETS)),)
            message: wire.ClientMessage = wire.RegisterKVCaches(
                request_id, layout, *where, host_bytes, timeline
            )
            self.send(session, message, wire.Registered)
        else:
            message = wire.AllocateKVCaches(request_id, layout, host_bytes, timeline)
            self.send(session, message, wire.Allocated)

    @precondition(lambda self: self.engine_of)
    @rule(
        data=st.data(),
        job_id=st.integers(0, 5),
        make=st.sampled_from([store, load]),
        blocks=st.lists(st.integers(0, 8), max_size=3),
        hosts=st.lists(st.integers(0, 2), max_size=3),
        wait_for=st.sampled_from([0, 0, 4]),
    )
    def submit(
        self,
        data: st.DataObject,
        job_id: int,
        make: Any,
        blocks: list[int],
        hosts: list[int],
        wait_for: int,
    ) -> None:
        session = self.session(data)
        engine = self.engine_of[session]
        claim = self.open_claim(engine)
        busy = [serial for serial, who in self.owner.items() if who == session]
        faults = {
            Code.SHUTTING_DOWN: self.core.stopping,
            Code.NOT_REGISTERED: claim is None,
            Code.DUPLICATE_JOB: (engine, job_id) in self.jobs.values(),
            Code.BUSY: len(busy) >= MAX_JOBS,
            Code.NO_TIMELINE: bool(wait_for) and claim is not None and not claim.timeline,
        }
        src, dst = make(*blocks, hosts=tuple(hosts))
        self.refusing = job_id
        before = {} if claim is None else dict(claim.plans)
        self.send(session, wire.Submit(job_id, src, dst, wait_for))
        self.refusing, refusals = None, self.refusals
        self.refusals = []
        if any(faults.values()):
            assert len(refusals) == 1
            assert faults.get(Code(refusals[0]))
        elif refusals:
            assert set(refusals) <= _SPEC_FAULTS | ({Code.STALE} if make is load else set())
            assert len(refusals) == 1
        else:
            assert claim is not None
            (serial,) = claim.plans.keys() - before.keys()
            self.jobs[serial], self.owner[serial] = (engine, job_id), session

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data(), job_ids=st.lists(st.integers(0, 6), max_size=4))
    def cancel(self, data: st.DataObject, job_ids: list[int]) -> None:
        session = self.session(data)
        wanted = {(self.engine_of[session], job_id) for job_id in job_ids}
        before = set(self.abandoned)
        self.send(session, wire.Cancel(tuple(job_ids)))
        assert self.abandoned == before | {s for s, job in self.jobs.items() if job in wanted}

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data(), job_ids=st.lists(st.integers(0, 6), max_size=4))
    def wait(self, data: st.DataObject, job_ids: list[int]) -> None:
        session, request_id = self.session(data), next(self.request_ids)
        wanted = {(self.engine_of[session], job_id) for job_id in job_ids}
        serials = {serial for serial, job in self.jobs.items() if job in wanted}
        self.send(session, wire.Wait(request_id, tuple(job_ids)), wire.Waited)
        if serials:
            assert (session, request_id) in self.owed
            self.waits[session, request_id] = serials
        else:
            assert (session, request_id) not in self.owed

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data())
    def status(self, data: st.DataObject) -> None:
        session, request_id = self.session(data), next(self.request_ids)
        self.send(session, wire.StatusRequest(request_id), wire.StatusReport)
        assert (session, request_id) not in self.owed

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data(), polite=st.booleans())
    def leave(self, data: st.DataObject, polite: bool) -> None:
        session = self.session(data)
        mine = {serial for serial, who in self.owner.items() if who == session}
        held = {c.number for c in self.claims.values() if c.session == session and not c.failed}
        if polite:
            first, *actions = self.core.handle(session, wire.Goodbye(), now=101.0)
            assert first == SendMessage(session, wire.Goodbye())
        else:
            actions = self.core.close_session(session)
        self.perform(actions)
        assert session not in self.engine_of
        assert mine <= self.abandoned
        assert all(self.claims[number].leaving for number in held)

    @rule(sure=st.integers(0, 7))
    def stop(self, sure: int) -> None:
        if not sure:
            self.core.stop()

    # The device worker

    @precondition(lambda self: any(not c.mapped for c in self.claims.values()))
    @rule(data=st.data(), works=st.sampled_from([True, True, False]))
    def worker_maps(self, data: st.DataObject, works: bool) -> None:
        claim = data.draw(st.sampled_from([c for c in self.claims.values() if not c.mapped]))
        claim.mapped, claim.failed = True, not works
        error = None if works else ErrorInfo(Code.MAP_FAILED, "no memory")
        self.perform(self.core.report(TensorsMapped(claim.number, claim.session, error)))
        if claim.failed and not claim.leaving:
            del self.claims[claim.number]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.FAILED]))
    def worker_ends(self, data: st.DataObject, outcome: Outcome) -> None:
        serial = data.draw(st.sampled_from(sorted(self.jobs)))
        self.end(serial, outcome)

    @precondition(lambda self: self.abandoned)
    @rule(data=st.data())
    def worker_cancels(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.abandoned))), Outcome.CANCELLED)

    @precondition(lambda self: any(c.mapped and c.leaving for c in self.claims.values()))
    @rule(data=st.data())
    def worker_unmaps(self, data: st.DataObject) -> None:
        leaving = [c for c in self.claims.values() if c.mapped and c.leaving]
        self.unmap(data.draw(st.sampled_from(leaving)))

    def end(self, serial: int, outcome: Outcome) -> None:
        (claim,) = [c for c in self.claims.values() if serial in c.plans]
        told: tuple[str, str | None] = (outcome, None)
        if outcome is Outcome.FAILED:
            told = outcome, FAULT.code
        elif outcome is Outcome.CANCELLED:
            told = ("failed", Code.ENGINE_GONE) if claim.leaving else (outcome, Code.CANCELLED)
        self.ending = serial, *told
        heard = serial in self.owner
        due = {key for key, serials in self.waits.items() if serials <= {serial}}
        for serials in self.waits.values():
            serials.discard(serial)
        error = FAULT if outcome is Outcome.FAILED else None
        ended = TransferCompleted(serial, outcome, 0.0, error)
        actions = self.core.report(ended)
        if heard:
            assert finished(actions[:1])  # Finished first, then Waited
        del claim.plans[serial]
        self.perform(actions)
        self.ending = None
        assert serial not in self.owner
        assert not due & self.owed.keys()
        del self.jobs[serial]
        self.abandoned.discard(serial)

    def unmap(self, claim: ExpectedRegistration) -> None:
        for serial in tuple(claim.plans):
            self.end(serial, Outcome.CANCELLED)
        del self.claims[claim.number]
        self.perform(self.core.report(TensorsUnmapped(claim.number)))

    # Always

    @invariant()
    def busy_while_anything_is_under_way(self) -> None:
        settled = all(c.mapped and not c.leaving for c in self.claims.values())
        assert self.core.busy == bool(self.jobs or not settled)

    @invariant()
    def sessions_are_those_that_came_and_did_not_go(self) -> None:
        assert set(self.core.sessions) == set(self.engine_of)

    @invariant()
    def jobs_are_those_that_were_accepted_and_did_not_end(self) -> None:
        status = self.core.status(now=101.0)
        assert sum(engine.jobs for engine in status.engines) == len(self.jobs)
        assert status.pool.reserved_bytes <= POOL

    def teardown(self) -> None:
        """Let the device worker do all that it was asked for: then nobody is owed anything."""
        while any(not c.mapped or c.leaving for c in self.claims.values()) or self.jobs:
            for claim in tuple(self.claims.values()):
                if not claim.mapped:
                    claim.mapped = True
                    self.perform(self.core.report(TensorsMapped(claim.number, claim.session)))
                elif claim.leaving:
                    self.unmap(claim)
                else:
                    for serial in tuple(claim.plans):
                        self.end(serial, Outcome.DONE)
        assert not self.owed
        assert not self.owner
        assert not self.core.busy


_OFFSETS = st.sampled_from([0, 0, 4096, 8192])
_SPEC_FAULTS = {Code.BLOCK_OUT_OF_RANGE, Code.SIZE_MISMATCH, Code.DUPLICATE_BLOCK}
"""Of a load also STALE, where its host blocks were never stored to."""


def test_every_reply_and_action_is_what_the_model_expects() -> None:
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(max_examples=200, stateful_step_count=40),
    )
