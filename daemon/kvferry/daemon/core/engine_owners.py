"""Which engine each session belongs to, and which user owns which engine name.

An engine's name belongs to the user (uid, as the kernel reports it) of its first live session until
its last session ends. Other processes of that user may use the name. Root and the daemon's user
have no exception: both can become any user. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvferry.daemon.core.registration import OWN, OWN_SESSION
from kvferry.proto.errors import Code, Refused


class EngineOwners:
    """The engine of each live session, and the user of each engine. Iteration: the sessions of
    clients, without the daemon's own."""

    def __init__(self) -> None:
        self._engines: dict[str, str] = {OWN_SESSION: OWN}
        # None for the daemon's own engine.
        self._uids: dict[str, int | None] = {}
        self._sessions = Counter[str]()

    def __iter__(self) -> Iterator[str]:
        return (session for session, engine in self._engines.items() if engine != OWN)

    def add_session(self, session: str, engine: str, uid: int | None) -> None:
        """A session begins. Raises Refused (FORBIDDEN) if the engine's name is another user's."""
        owner = self._uids.setdefault(engine, uid)
        if owner != uid:
            message = (
                f"engine name {engine!r} is in use by user {owner}, and you are user {uid}; give "
                "your engine another name, or run both as one user"
            )
            raise Refused(Code.FORBIDDEN, message, engine)
        self._sessions[engine] += 1
        self._engines[session] = engine

    def remove_session(self, session: str) -> None:
        engine = self._engines.pop(session)
        self._sessions[engine] -= 1
        if self._sessions[engine] <= 0:
            del self._sessions[engine]
            self._uids.pop(engine, None)

    def engine_of(self, session: str) -> str:
        """The engine of a live session."""
        return self._engines[session]

    def is_own(self, session: str) -> bool:
        """Whether this is the daemon's own session."""
        return self._engines.get(session) == OWN

    def uid_of(self, engine: str) -> int | None:
        return self._uids.get(engine)
