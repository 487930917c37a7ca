"""The core with random legal steps in any order. checked_core.py checks its actions."""

from __future__ import annotations

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
    SendMessage,
)
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction, KVLayout
from support.checked_core import CheckedCore
from support.core_fixture import (
    LAYOUT,
    MAX_GPU_BLOCKS,
    MAX_JOBS,
    OTHER,
    POOL,
    load,
    store,
)


class CoreMachine(RuleBasedStateMachine):
    """Clients and the device worker, with steps in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.server = CheckedCore()
        self.request_ids = count(1)
        self.gpu_blocks: dict[int, int] = {}

    def session(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.server.engine_of)))

    # Clients

    @initialize(timeline=st.sampled_from([None, 3]))
    def begin(self, timeline: int | None) -> None:
        """Open a session with tensors, because most steps need one."""
        self.server.open_session("a")
        (session,) = self.server.engine_of
        message = wire.AllocateKVCaches(next(self.request_ids), LAYOUT, 8192, timeline)
        self.server.send(session, message, wire.Allocated)
        (registration,) = self.server.registrations.values()
        self.server.map(registration)

    @rule(engine=st.sampled_from("ab"))
    def open_sessions(self, engine: str) -> None:
        self.server.open_session(engine)

    @precondition(lambda self: self.server.engine_of)
    @rule(
        data=st.data(),
        layout=st.sampled_from([LAYOUT, OTHER]),
        host_bytes=st.sampled_from([None, 1, 4096, 8192, POOL]),
        timeline=st.sampled_from([None, 3]),
        own_tensors=st.booleans(),
    )
    def register(
        self,
        data: st.DataObject,
        layout: KVLayout,
        host_bytes: int | None,
        timeline: int | None,
        own_tensors: bool,
    ) -> None:
        request_id, session = next(self.request_ids), self.session(data)
        if own_tensors:
            memories = (memory.FdAllocation(1, 8192),), (memory.Location(0, data.draw(_OFFSETS)),)
            message: wire.ClientMessage = wire.RegisterKVCaches(
                request_id, layout, *memories, host_bytes, timeline
            )
            self.server.send(session, message, wire.Registered)
        else:
            message = wire.AllocateKVCaches(request_id, layout, host_bytes, timeline)
            self.server.send(session, message, wire.Allocated)

    @precondition(lambda self: self.server.engine_of)
    @rule(
        data=st.data(),
        job_id=st.integers(0, 5),
        make_spec=st.sampled_from([store, store, load]),
        fits=st.sampled_from([True, True, True, False]),
        wait_for=st.sampled_from([0, 0, 0, 4]),
    )
    def submit(
        self,
        data: st.DataObject,
        job_id: int,
        make_spec: Any,
        fits: bool,
        wait_for: int,
    ) -> None:
        """fits: valid host blocks, and the number of GPU blocks that fill them."""
        session = self.session(data)
        engine = self.server.engine_of[session]
        registration = self.server.open_registration(engine)
        direction = Direction.STORE if make_spec is store else Direction.LOAD
        plans = () if registration is None else tuple(registration.plans.values())
        own_plans = [plan for plan in plans if self.server.owner.get(plan.serial) == session]
        busy = [plan for plan in own_plans if plan.direction is direction]
        if fits and registration is not None:
            hosts = data.draw(st.sampled_from([(0,), (1,), (0, 1)]))
            blocks = data.draw(st.permutations(range(8)))[: registration.factor * len(hosts)]
        else:
            hosts = tuple(data.draw(st.lists(st.integers(0, 2), max_size=3)))
            blocks = data.draw(st.lists(st.integers(0, 8), max_size=3))
        used = len(blocks) + sum(self.gpu_blocks[plan.serial] for plan in own_plans)
        faults = {
            Code.SHUTTING_DOWN: self.server.core.stopping,
            Code.NOT_REGISTERED: registration is None,
            Code.DUPLICATE_JOB: (engine, job_id) in self.server.jobs.values(),
            Code.BUSY: len(busy) >= MAX_JOBS or used > MAX_GPU_BLOCKS,
            Code.NO_TIMELINE: bool(wait_for)
            and registration is not None
            and not registration.timeline,
        }
        src, dst = make_spec(*blocks, hosts=hosts)
        refusals = self.server.submit(session, wire.Submit(job_id, src, dst, wait_for))
        if any(faults.values()):
            assert len(refusals) == 1
            assert faults.get(Code(refusals[0]))
        elif refusals:
            assert set(refusals) <= _SPEC_FAULTS | ({Code.STALE} if make_spec is load else set())
            assert len(refusals) == 1
        else:
            assert registration is not None
            (serial,) = registration.plans.keys() - {plan.serial for plan in plans}
            self.gpu_blocks[serial] = len(blocks)
            self.server.jobs[serial], self.server.owner[serial] = (engine, job_id), session

    @precondition(lambda self: self.server.engine_of)
    @rule(data=st.data(), job_ids=st.lists(st.integers(0, 6), max_size=4))
    def cancel(self, data: st.DataObject, job_ids: list[int]) -> None:
        session = self.session(data)
        jobs = {(self.server.engine_of[session], job_id) for job_id in job_ids}
        before = set(self.server.cancelled)
        self.server.send(session, wire.Cancel(tuple(job_ids)))
        assert self.server.cancelled == before | {
            s for s, job in self.server.jobs.items() if job in jobs
        }

    @precondition(lambda self: self.server.engine_of)
    @rule(data=st.data(), job_ids=st.lists(st.integers(0, 6), max_size=4))
    def wait(self, data: st.DataObject, job_ids: list[int]) -> None:
        session, request_id = self.session(data), next(self.request_ids)
        jobs = {(self.server.engine_of[session], job_id) for job_id in job_ids}
        serials = {serial for serial, job in self.server.jobs.items() if job in jobs}
        self.server.send(session, wire.Wait(request_id, tuple(job_ids)), wire.Waited)
        if serials:
            assert (session, request_id) in self.server.due
            self.server.waits[session, request_id] = serials
        else:
            assert (session, request_id) not in self.server.due

    @precondition(lambda self: self.server.engine_of)
    @rule(data=st.data())
    def status(self, data: st.DataObject) -> None:
        session, request_id = self.session(data), next(self.request_ids)
        self.server.send(session, wire.StatusRequest(request_id), wire.StatusReport)
        assert (session, request_id) not in self.server.due

    @precondition(lambda self: len(self.server.engine_of) > 1)
    @rule(data=st.data(), goodbye=st.booleans())
    def disconnect(self, data: st.DataObject, goodbye: bool) -> None:
        session = self.session(data)
        serials = {s for s, owner in self.server.owner.items() if owner == session}
        registered = {
            c.number
            for c in self.server.registrations.values()
            if c.session == session and not c.failed
        }
        if goodbye:
            first, *actions = self.server.core.handle(session, wire.Goodbye(), now=101.0)
            assert first == SendMessage(session, wire.Goodbye())
        else:
            actions = self.server.core.close_session(session)
        self.server.perform(actions)
        assert session not in self.server.engine_of
        assert serials <= self.server.cancelled
        assert all(self.server.registrations[number].leaving for number in registered)

    @rule(stops=st.sampled_from([False] * 15 + [True]))
    def stop(self, stops: bool) -> None:
        """Rare, because all later requests are refused."""
        if stops:
            self.server.core.stop()

    # The device worker

    @precondition(lambda self: any(not c.mapped for c in self.server.registrations.values()))
    @rule(data=st.data(), works=st.sampled_from([True, True, False]))
    def worker_maps(self, data: st.DataObject, works: bool) -> None:
        registration = data.draw(
            st.sampled_from([c for c in self.server.registrations.values() if not c.mapped])
        )
        self.server.map(registration, works)

    @precondition(lambda self: self.server.jobs)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.FAILED]))
    def worker_ends(self, data: st.DataObject, outcome: Outcome) -> None:
        serial = data.draw(st.sampled_from(sorted(self.server.jobs)))
        self.server.end(serial, outcome)

    @precondition(lambda self: self.server.cancelled)
    @rule(data=st.data())
    def worker_cancels(self, data: st.DataObject) -> None:
        self.server.end(
            data.draw(st.sampled_from(sorted(self.server.cancelled))), Outcome.CANCELLED
        )

    @precondition(
        lambda self: any(c.mapped and c.leaving for c in self.server.registrations.values())
    )
    @rule(data=st.data())
    def worker_unmaps(self, data: st.DataObject) -> None:
        leaving = [c for c in self.server.registrations.values() if c.mapped and c.leaving]
        self.server.unmap(data.draw(st.sampled_from(leaving)))

    # Invariants

    @invariant()
    def the_core_is_busy_while_jobs_or_mappings_are_in_flight(self) -> None:
        settled = all(c.mapped and not c.leaving for c in self.server.registrations.values())
        assert self.server.core.busy == bool(self.server.jobs or not settled)

    @invariant()
    def sessions_are_those_that_are_connected(self) -> None:
        assert set(self.server.core.sessions) == set(self.server.engine_of)

    @invariant()
    def jobs_are_those_that_were_accepted_and_have_not_ended(self) -> None:
        core = self.server.core
        assert sum(engine.jobs for engine in core.engines()) == len(self.server.jobs)
        assert core.reserved_bytes <= POOL

    def teardown(self) -> None:
        self.server.finish()


_OFFSETS = st.sampled_from([0, 0, 4096, 8192])
# A load may also be STALE, if its host blocks were not stored.
_SPEC_FAULTS = {Code.BLOCK_OUT_OF_RANGE, Code.SIZE_MISMATCH, Code.DUPLICATE_BLOCK}


def test_every_reply_and_action_equals_that_of_the_model() -> None:
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(max_examples=250, stateful_step_count=60),
    )
