"""Hints: what applications know of the keys of their namespace (kvferry.proto.hints).

    Retain             -> Retained    the blocks are held for a time, within shares (retention.py)
    Release                           they are held no longer, and evicted first
    ReleaseRetained    -> Released    an operator ends all of a namespace, or of a label

Called by the core, on the event loop.
"""

from __future__ import annotations

from kvferry.daemon.core.actions import Action, SendMessage
from kvferry.daemon.core.dispatch import MessageTable
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.retention import Owner
from kvferry.proto.errors import Code, Refused
from kvferry.proto.hints import Release, ReleaseRetained, Retain, Retained
from kvferry.proto.messages import Released


class PrefixHints:
    """The hints of all namespaces."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces

    @property
    def messages(self) -> MessageTable:
        return {
            Retain: self.retain,
            Release: self.release,
            ReleaseRetained: self.release_retained,
        }

    @property
    def deadline(self) -> float | None:
        """The time of the next `expire`, if any."""
        due = (namespace.retained.deadline for namespace in self._namespaces)
        return min((each for each in due if each is not None), default=None)

    def expire(self, now: float) -> None:
        """End what was retained until now."""
        for namespace in self._namespaces:
            namespace.retained.expire(now)

    def retain(self, session: str, message: Retain, now: float) -> list[Action]:
        """Raises Refused (UNKNOWN_NAMESPACE, BAD_KEY)."""
        namespace, owner = self._owner(session, message)
        counts = namespace.retained.retain(owner, message.keys, message.seconds, now)
        return [SendMessage(session, Retained(message.request_id, *counts))]

    def release(self, session: str, message: Release, _now: float) -> list[Action]:
        """Raises Refused (UNKNOWN_NAMESPACE, BAD_KEY)."""
        namespace, owner = self._owner(session, message)
        namespace.retained.release(owner, message.keys)
        is_alone = len(namespace.engines) == 1
        if is_alone:
            namespace.cache.spare(message.keys)
        result = "hints_accepted" if is_alone else "hints_refused"
        namespace.retained.counts[result] += len(message.keys)
        return []

    def release_retained(self, session: str, message: ReleaseRetained, _now: float) -> list[Action]:
        """Raises Refused (UNKNOWN_NAMESPACE)."""
        namespace = self._namespaces.find_namespace(message.namespace)
        if namespace is None:
            text = (
                f"no namespace {message.namespace!r}; `kvferry status` shows the names of all "
                "namespaces"
            )
            raise Refused(Code.UNKNOWN_NAMESPACE, text, message.namespace)
        label = message.label
        blocks = namespace.retained.end(lambda owner: label in (None, owner.label))
        nbytes = blocks * namespace.region.block_bytes
        return [SendMessage(session, Released(message.request_id, nbytes))]

    def _owner(self, session: str, message: Retain | Release) -> tuple[Namespace, Owner]:
        namespace = self._namespaces.require_namespace(session, message)
        try:
            namespace.check_keys(message.keys)
        except Refused:
            namespace.retained.counts["hints_refused"] += len(message.keys)
            raise
        return namespace, Owner(namespace.sessions[session], session, message.label)
