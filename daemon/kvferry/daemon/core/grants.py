"""Requests for memory: namespaces and registrations, granted now or when something is free.

A request waits if what it needs may soon be free: held by a closing registration, or by tiers in a
namespace that nobody uses. Called by the core, on the event loop.
"""

from __future__ import annotations

from typing import TypeAlias

from kvferry.daemon.core.actions import Action
from kvferry.daemon.core.dispatch import MessageTable
from kvferry.daemon.core.engine_owners import EngineOwners
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.refused_engines import RefusedEngines
from kvferry.daemon.core.registrations import Registrations
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, Refused

RegionRequest: TypeAlias = wire.OpenNamespace | wire.RegisterKVCaches | wire.AllocateKVCaches
_RETRYABLE = Code.POOL_FULL, Code.ALREADY_REGISTERED


class Grants:
    """Requests for memory, of each session at most one that waits.

    refused: engines whose last request was refused.
    """

    def __init__(
        self, namespaces: Namespaces, registrations: Registrations, owners: EngineOwners
    ) -> None:
        self.refused = RefusedEngines()
        self._namespaces, self._registrations, self._owners = namespaces, registrations, owners
        # By session, in order of arrival.
        self._waiting: dict[str, RegionRequest] = {}

    @property
    def messages(self) -> MessageTable:
        kinds = wire.OpenNamespace, wire.RegisterKVCaches, wire.AllocateKVCaches
        return dict.fromkeys(kinds, self.grant)

    def close_session(self, session: str) -> None:
        self._waiting.pop(session, None)
        self._namespaces.region_wanted = bool(self._waiting)

    def take_waiting(self) -> dict[str, RegionRequest]:
        """The requests that wait, to be tried again in this order: something may be free."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._namespaces.region_wanted = False
        return waiting

    def note_refused(self, session: str, error: Refused) -> None:
        """A request of a session was refused."""
        self.refused.add(self._owners.engine_of(session), error.info)

    def grant(self, session: str, message: RegionRequest, now: float) -> list[Action]:
        """Grant a request, or keep it waiting. A new region that is all that is free always waits
        for what may soon be free. Raises Refused."""
        engine = self._owners.engine_of(session)
        if session in self._waiting:
            waiting = type(self._waiting[session]).__name__
            error = f"{waiting} of engine {engine!r} has no reply yet; wait for it, then try again"
            raise Refused(Code.BUSY, error, waiting)
        held = self._namespaces.any_held_by_tiers or self._registrations.is_closing
        if held and self._registrations.wants_all_free(session, engine, message):
            return self._keep_waiting(session, message)
        try:
            if isinstance(message, wire.OpenNamespace):
                opened = self._namespaces.open_namespace(session, engine, message)
                granted = self._registrations.release_orphaned() + opened
            else:
                granted = self._registrations.register_tensors(session, engine, message)
            self.refused.remove(engine)
            return granted
        except Refused as refused:
            held = refused.code == Code.POOL_FULL and self._namespaces.any_held_by_tiers
            closing = refused.code in _RETRYABLE and self._registrations.is_closing
            if not (held or closing):
                raise
            return self._keep_waiting(session, message)

    def _keep_waiting(self, session: str, message: RegionRequest) -> list[Action]:
        self._waiting[session] = message
        self._namespaces.region_wanted = True
        return []
