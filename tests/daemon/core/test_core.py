"""The core: sessions, stop, status."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.actions import (
    CancelTransfers,
    CloseSession,
    SendMessage,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.refused_engines import MOST_ENGINES, RefusedEngines
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.protocol import make_hello, protocol_number
from kvferry.proto.results import Outcome
from support.client_keys import FINGERPRINT
from support.core_fixture import DEVICE, LAYOUT, LIMITS, CoreFixture, new_core, store

# Sessions


@pytest.mark.parametrize(("low", "high", "fits"), [(0, 0, 1), (-1, 1, 1), (1, 2, 0), (-2, -1, 0)])
def test_a_session_opens_if_the_protocols_agree(low: int, high: int, fits: int) -> None:
    core, own = new_core(), protocol_number()
    (action,) = core.open_session("s", wire.Hello(own + low, own + high, "client", "a"))
    assert isinstance(action, SendMessage)
    if fits:
        welcome = wire.Welcome(own, "boot", "s", "0.1", 4711, DEVICE, LIMITS)
        assert (action.message, core.sessions) == (welcome, ("s",))
    else:
        assert isinstance(action.message, wire.Error)
        assert (action.message.error.code, core.sessions) == (Code.PROTOCOL_VERSION, ())
        assert f"this daemon (0.1, protocol {own:x})" in action.message.error.message


def test_a_second_hello_is_refused() -> None:
    assert CoreFixture("a").error("a", make_hello("client", "b")) == Code.BAD_MESSAGE


def test_goodbye_ends_the_session_with_a_reply() -> None:
    fixture = CoreFixture("a")
    plan = fixture.start("a", 7, store(0))
    assert fixture.send("a", wire.Goodbye("bye")) == [
        SendMessage("a", wire.Goodbye()),
        CloseSession("a"),
        CancelTransfers(plan.registration, (plan.serial,)),
        UnmapTensors(plan.registration),
    ]
    assert fixture.core.sessions == ()


# Stop, status


def test_a_stopping_daemon_refuses_new_jobs_and_cancels_the_others() -> None:
    fixture = CoreFixture("a", "b", registered=False)
    fixture.send("a", wire.AllocateKVCaches(1, LAYOUT, 4096))
    fixture.report(TensorsMapped(1, "a"))
    plan = fixture.start("a", 1, store(0))
    fixture.core.stop()
    assert fixture.refused("a", 2, store(1)) == Code.SHUTTING_DOWN
    assert fixture.error("b", wire.AllocateKVCaches(1, LAYOUT)) == Code.SHUTTING_DOWN
    (action,) = fixture.core.open_session("c", make_hello("client", "c"))
    assert isinstance(action, SendMessage)
    assert isinstance(action.message, wire.Error)
    assert (action.message.error.code, "c" in fixture.core.sessions) == (Code.SHUTTING_DOWN, False)
    assert fixture.send("a", wire.Wait(5, (1,))) == []
    assert fixture.core.cancel_all_transfers() == [CancelTransfers(1, (plan.serial,))]
    assert fixture.core.busy
    fixture.report(TransferCompleted(plan.serial, Outcome.CANCELLED))
    assert not fixture.core.busy


def test_a_stopping_daemon_refuses_a_waiting_successor() -> None:
    fixture = CoreFixture("a/old", "a/new")
    fixture.core.close_session("a/old")
    fixture.send("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096))
    fixture.core.stop()
    (action,) = fixture.report(TensorsUnmapped(1))
    assert isinstance(action.message, wire.Error)
    assert (action.session, action.message.request_id) == ("a/new", 5)
    assert action.message.error.code == Code.SHUTTING_DOWN
    assert not fixture.core.busy


# Engines that were refused


def test_the_last_refusal_of_an_engine_is_known_until_a_request_is_granted() -> None:
    fixture = CoreFixture("a", "b", registered=False)
    refused = fixture.core.refused_engines.errors
    for session in ("a", "b", "a"):
        assert fixture.error(session, wire.OpenNamespace(1, FINGERPRINT, 1 << 40)) == Code.POOL_FULL
    assert list(refused) == ["b", "a"], "the latest is last"
    fixture.send("a", wire.OpenNamespace(2, FINGERPRINT, FINGERPRINT.host_block_bytes))
    assert list(refused) == ["b"]
    fixture.error("a", wire.Unpin((b"xxxx",)))
    assert list(refused) == ["b"], "only requests for memory count"


def test_a_bounded_number_of_refused_engines_is_known() -> None:
    refused = RefusedEngines()
    for number in range(MOST_ENGINES + 1):
        refused.add(f"engine {number}", ErrorInfo("pool_full", "no room"))
    assert len(refused.errors) == MOST_ENGINES
    assert "engine 0" not in refused.errors
