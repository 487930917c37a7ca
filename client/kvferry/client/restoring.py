"""Opens a session at the daemon, and restores in it everything in the SessionState.

`connect` runs when a client is created; `restore_session`, which polls advance (link.py), whenever
it connects again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry.client.call import Call
from kvferry.client.endpoint import no_reply_error
from kvferry.client.link import ClientLink
from kvferry.client.namespace import ClientNamespace
from kvferry.client.session_state import RegistrationState
from kvferry.client.timeline import Timeline
from kvferry.client.wire import MAX_TIMEOUT
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.messages import (
    ClientMessage,
    Pin,
    Registered,
    RegisterKVCaches,
    Subscribe,
)

T = TypeVar("T")

# Seconds for which an attempt waits for one reply.
ATTEMPT_TIMEOUT = 10.0


async def restore_session(link: ClientLink, now: float) -> None:
    """One attempt of a link to connect again. now: time.monotonic() in seconds."""
    link.open_connection(link.locate())
    link.session.wire.socket_opened()
    await connect(AttemptCall(link, now))


async def connect(call: Call) -> None:
    """Send Hello, and restore the session. Raises what the daemon refuses, or Gone (TIMEOUT)."""
    session = call.session
    try:
        await call.send_until(session.wire.hello(), session.wire.read_welcome)
    except Gone as error:
        if error.code == Code.TIMEOUT:
            raise no_reply_error(Path(error.value)) from None
        raise
    state = session.restore
    if state.opening is not None:
        again = msgspec.structs.replace(state.opening, request_id=session.wire.next_request_id())
        session.opened.daemon_opened(again, await call.ask(again))
    if state.registration is not None:
        request = await registration_request(call, state.registration)
        reply: Registered = await call.ask(request)
        session.kv_caches_registered(state.registration, reply.region)
    if state.opening is not None:
        await _restore_namespace(call, session.namespace)
    session.mark_connected()


async def registration_request(call: Call, registration: RegistrationState) -> RegisterKVCaches:
    """Share tensors and timeline with the daemon; returns the request that registers them."""
    from kvferry.client.tensors.sharing import export_tensors

    shared = export_tensors(registration.kv_caches)
    handles = await call.pass_fds(shared.descriptors)
    timeline = await share_timeline(call, registration.timeline)
    return RegisterKVCaches(
        call.session.wire.next_request_id(),
        registration.kv_caches.layout,
        shared.with_handles(handles),
        shared.locations,
        registration.host_bytes,
        timeline,
    )


async def share_timeline(call: Call, timeline: Timeline | None) -> int | None:
    """Pass the timeline's page to the daemon, a new one if it was revoked; returns its handle."""
    if timeline is None:
        return None
    if timeline.revoked:
        timeline.renew()
    if timeline.descriptor < 0:
        raise Refused(Code.NO_TIMELINE, "the timeline is closed; register with another one")
    (handle,) = await call.pass_fds((timeline.descriptor,))
    return handle


async def _restore_namespace(call: Call, namespace: ClientNamespace) -> None:
    """Subscribe again, do pending resets, and pin keys again."""
    if namespace.has_mirror:
        await call.send_until(Subscribe(), lambda: namespace.mirror.complete or None)
    while pending := namespace.pending_resets():
        for label in dict.fromkeys(pending.values()):
            await call.ask(call.session.opened.reset(label))
        for request_id in pending:
            namespace.reset_ended(request_id)
    # Last, and without a pause, in which more keys may be pinned.
    for keys in namespace.pinned_batches():
        await call.send_until(Pin(keys), lambda: True)


@dataclass(frozen=True, slots=True)
class _NextPoll:
    """Returns to the poll that advances the attempt; the outcome is the time of the next poll."""

    seconds: float

    def __await__(self) -> Generator[float, float, float]:
        return (yield self.seconds)


class AttemptCall(Call):
    """The call that restores the session. Each wait in it has its own deadline, because it ends at
    a poll, and a client may poll every few seconds."""

    def __init__(self, link: ClientLink, now: float) -> None:
        super().__init__(link, ATTEMPT_TIMEOUT)
        self._now = now

    async def until(self, ready: Callable[[], T | None], seconds: float = MAX_TIMEOUT) -> T:
        self._deadline = self._now + ATTEMPT_TIMEOUT
        return await super().until(ready, seconds)

    def _seconds_left(self) -> float:
        return self._deadline - self._now

    async def _pause(self, seconds: float) -> None:
        self._now = await _NextPoll(seconds)

    def _send(self, message: ClientMessage) -> None:
        self.link.send(encode(message))
