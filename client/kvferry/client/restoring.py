"""Opens a session at the daemon, and restores in it everything in the SessionState.

`connect` runs when a client is created, and in each attempt to connect again (link.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvferry.client.call import Call
from kvferry.client.endpoint import no_reply_error
from kvferry.client.namespace import ClientNamespace
from kvferry.client.session_state import RegistrationState
from kvferry.client.timeline import Timeline
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.messages import Pin, Registered, RegisterKVCaches, Subscribe


async def connect(call: Call) -> None:
    """Send Hello, and restore the session. Raises what the daemon refuses, or Gone (TIMEOUT)."""
    session = call.session
    try:
        await call.send_until(session.hello(), session.read_welcome)
    except Gone as error:
        if error.code == Code.TIMEOUT:
            raise no_reply_error(Path(error.value)) from None
        raise
    state = session.restore
    if state.opening is not None:
        again = msgspec.structs.replace(state.opening, request_id=session.next_request_id())
        session.namespace_opened(again, await call.ask(again))
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
        call.session.next_request_id(),
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
            await call.ask(call.session.reset(label))
        for request_id in pending:
            namespace.reset_ended(request_id)
    # Last, and without a pause, in which more keys may be pinned.
    for keys in namespace.pinned_batches():
        await call.send_until(Pin(keys), lambda: True)
