"""A server and a device worker around the core that check each of its actions.

They keep the core's commands, end them in any order, and compare each reply with its request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvferry.daemon.core.actions import (
    Action,
    CancelTransfers,
    CloseSession,
    CopyPlan,
    MapTensors,
    SendMessage,
    SendStatus,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from support.core_fixture import FAULT, finished, new_core
from support.region_records_model import RegionRecordsModel


@dataclass
class ExpectedRegistration:
    """A registration as the device worker sees it.

    leaving: its tensors must be unmapped. factor: GPU blocks in a host block.
    """

    number: int
    engine: str
    session: str
    factor: int
    mapped: bool = False
    failed: bool = False
    leaving: bool = False
    timeline: bool = False
    plans: dict[int, CopyPlan] = field(default_factory=dict)


class CheckedCore:
    """The core, behind a server and a device worker that check each of its actions."""

    def __init__(self) -> None:
        self.core = new_core()
        self._region_records = RegionRecordsModel()
        self._names = (f"s{n}" for n in count())
        # The engine of each session.
        self.engine_of: dict[str, str] = {}
        self.registrations: dict[int, ExpectedRegistration] = {}
        # For each transfer that has not ended: its engine and job id; the session that receives its
        # result; whether it was cancelled.
        self.jobs: dict[int, tuple[str, int]] = {}
        self.owner: dict[int, str] = {}
        self.cancelled: set[int] = set()
        # The kinds of replies that are due, by session and request id.
        self.due: dict[tuple[str, int], tuple[type[wire.DaemonMessage], ...]] = {}
        # The transfers that each Wait waits for.
        self.waits: dict[tuple[str, int], set[int]] = {}
        # The transfer that ends now, with the outcome and error code of its result.
        self._ending: tuple[int, str, str | None] | None = None
        # The job that is submitted now, and the codes with which it was refused.
        self._submitted: int | None = None
        self._refusals: list[str] = []

    def perform(self, actions: list[Action]) -> None:
        """Check actions and perform them."""
        for action in self._region_records.observe(actions):
            match action:
                case SendMessage(session, message):
                    assert session in self.engine_of
                    self._check_message(session, message)
                case SendStatus(session, request_id):
                    assert wire.StatusReport in self.due.pop((session, request_id))
                case CloseSession(session):
                    self._forget_session(session)
                case MapTensors(number, session):
                    assert number not in self.registrations
                    engine = self.engine_of[session]
                    assert engine not in {
                        registration.engine for registration in self.registrations.values()
                    }
                    timeline = action.timeline is not None
                    self.registrations[number] = ExpectedRegistration(
                        number,
                        engine,
                        session,
                        action.layout.factor,
                        timeline=timeline,
                    )
                case UnmapTensors(number):
                    assert not self.registrations[number].leaving
                    self.registrations[number].leaving = True
                case StartTransfer(plan=plan):
                    registration = self.registrations[plan.registration]
                    assert registration.mapped
                    assert not registration.leaving
                    assert plan.serial not in self.jobs
                    assert plan.after < plan.serial
                    registration.plans[plan.serial] = plan
                case CancelTransfers(number, serials):
                    assert self.registrations[number].plans.keys() >= set(serials)
                    self.cancelled |= set(serials)

    def _check_message(self, session: str, message: wire.DaemonMessage) -> None:
        match message:
            case wire.Finished((result,)) if result.outcome is Outcome.REFUSED:
                assert result.job_id == self._submitted
                assert result.error is not None
                self._refusals.append(result.error.code)
            case wire.Finished((result,)):
                assert self._ending is not None
                serial, outcome, code = self._ending
                assert self.owner.pop(serial) == session  # once, and to the session of the job
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
                assert reply.request_id is not None  # else an Error without a request
                key = session, reply.request_id
                assert isinstance(reply, self.due.pop(key))
                if isinstance(reply, wire.Waited):
                    assert not self.waits.pop(key, set())  # all of them have ended

    def _forget_session(self, session: str) -> None:
        del self.engine_of[session]
        self.due = {key: kind for key, kind in self.due.items() if key[0] != session}
        self.owner = {serial: owner for serial, owner in self.owner.items() if owner != session}

    def send(self, session: str, message: wire.ClientMessage, *kinds: Any) -> None:
        """Have the core handle a message. kinds: the types of its reply, besides Error."""
        request_id = getattr(message, "request_id", None)
        if request_id is not None:
            self.due[session, request_id] = (*kinds, wire.Error)
        self.perform(self.core.handle(session, message, now=101.0))

    def submit(self, session: str, message: wire.Submit) -> list[str]:
        """Submit a job. Returns the codes with which it was refused."""
        self._submitted, self._refusals = message.job_id, []
        self.send(session, message)
        self._submitted = None
        return self._refusals

    def open_registration(self, engine: str) -> ExpectedRegistration | None:
        """The registration that an engine may use."""
        found = [each for each in self.registrations.values() if each.engine == engine]
        return next((each for each in found if each.mapped and not each.leaving), None)

    def open_session(self, engine: str) -> None:
        name = next(self._names)
        (action,) = self.core.open_session(name, make_hello("client", engine))
        assert isinstance(action, SendMessage)
        if self.core.stopping:
            assert isinstance(action.message, wire.Error)
        else:
            assert isinstance(action.message, wire.Welcome)
            self.engine_of[name] = engine

    def map(self, registration: ExpectedRegistration, works: bool = True) -> None:
        """Map tensors, or fail if `works` is false."""
        registration.mapped, registration.failed = True, not works
        error = None if works else ErrorInfo(Code.MAP_FAILED, "no memory")
        mapped = TensorsMapped(registration.number, registration.session, error)
        self.perform(self.core.report(mapped))
        if registration.failed and not registration.leaving:
            del self.registrations[registration.number]

    def end(self, serial: int, outcome: Outcome) -> None:
        """End a transfer with an outcome."""
        (registration,) = [each for each in self.registrations.values() if serial in each.plans]
        expected: tuple[str, str | None] = (outcome, None)
        if outcome is Outcome.FAILED:
            expected = outcome, FAULT.code
        elif outcome is Outcome.CANCELLED:
            engine_gone = "failed", Code.ENGINE_GONE
            expected = engine_gone if registration.leaving else (outcome, Code.CANCELLED)
        self._ending = serial, *expected
        has_owner = serial in self.owner
        answered = {key for key, serials in self.waits.items() if serials <= {serial}}
        for serials in self.waits.values():
            serials.discard(serial)
        error = FAULT if outcome is Outcome.FAILED else None
        actions = self.core.report(TransferCompleted(serial, outcome, 0.0, error))
        if has_owner:
            assert finished(actions[:1])  # Finished first, then Waited
        del registration.plans[serial]
        self.perform(actions)
        self._ending = None
        assert serial not in self.owner
        assert not answered & self.due.keys()
        del self.jobs[serial]
        self.cancelled.discard(serial)

    def unmap(self, registration: ExpectedRegistration) -> None:
        """Unmap tensors, after their transfers have ended."""
        for serial in tuple(registration.plans):
            self.end(serial, Outcome.CANCELLED)
        del self.registrations[registration.number]
        self.perform(self.core.report(TensorsUnmapped(registration.number)))

    def finish(self) -> None:
        """End all mappings and transfers. Then no reply is due."""
        while self.jobs or any(
            not each.mapped or each.leaving for each in self.registrations.values()
        ):
            plans = [serial for each in self.registrations.values() for serial in each.plans]
            assert self.jobs.keys() <= set(plans)  # after a failed step there may be others
            for registration in tuple(self.registrations.values()):
                if not registration.mapped:
                    self.map(registration)
                elif registration.leaving:
                    self.unmap(registration)
                else:
                    for serial in tuple(registration.plans):
                        self.end(serial, Outcome.DONE)
        assert not self.due
        assert not self.owner
        assert not self.core.busy
