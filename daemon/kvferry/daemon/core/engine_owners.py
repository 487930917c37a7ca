"""Which user owns which engine name.

An engine's name belongs to the user (uid, as the kernel reports it) of its first live session until
its last session ends. Other processes of that user may use the name. Root and the daemon's user
have no exception: both can become any user. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections import Counter

from kvferry.proto.errors import Code, Refused


class EngineOwners:
    """Live sessions and user of each engine. The uid is None for the daemon's own engine."""

    def __init__(self) -> None:
        self._uids: dict[str, int | None] = {}
        self._sessions = Counter[str]()

    def add_session(self, engine: str, uid: int | None) -> None:
        """A session begins. Raises Refused (FORBIDDEN) if the name is another user's."""
        owner = self._uids.setdefault(engine, uid)
        if owner != uid:
            message = (
                f"engine name {engine!r} is in use by user {owner}, and you are user {uid}; give "
                "your engine another name, or run both as one user"
            )
            raise Refused(Code.FORBIDDEN, message, engine)
        self._sessions[engine] += 1

    def remove_session(self, engine: str) -> None:
        self._sessions[engine] -= 1
        if self._sessions[engine] <= 0:
            del self._sessions[engine]
            self._uids.pop(engine, None)

    def uid_of(self, engine: str) -> int | None:
        return self._uids.get(engine)
