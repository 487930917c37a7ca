"""All namespaces: sessions in them, their pinned keys, and key events to mirrors.

A namespace is identified by its fingerprint: engines whose bytes are exchangeable share it, and it
outlives them. When its last session has ended, its region and its keys stay until another owner
needs the memory. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvferry.daemon.core.actions import (
    Action,
    BlocksCorrupted,
    BlocksVerified,
    Broadcast,
    FreeDeferred,
    PublishKVEvents,
    SendMessage,
    SendStream,
)
from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.cache.policy import POLICIES
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.records import RecoveredRegion, namespace_owner
from kvferry.daemon.core.regions import Regions
from kvferry.daemon.core.session_pins import SessionPins
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import Done, Opened, OpenNamespace, Pin, Reset, Subscribe, Touch, Unpin
from kvferry.proto.status import NamespaceStatus

# Encoded. The status of all namespaces must fit into one message.
MAX_FINGERPRINT_BYTES = 4096
# How many similar namespaces an Opened reply lists, and how many characters of each.
MOST_UNLIKE, UNLIKE_CHARACTERS = 16, 512


class Namespaces:
    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._all: dict[str, Namespace] = {}
        self._of_session: dict[str, Namespace] = {}
        # Namespaces whose region was freed; their followers are not notified yet.
        self._lost: list[Namespace] = []
        self._regions_seen = 0
        # Namespaces with unsent key events, oldest first.
        self._changed: dict[Namespace, None] = {}
        # Pinned keys of each session.
        self._pinned: dict[str, SessionPins] = {}

    def __iter__(self) -> Iterator[Namespace]:
        """Namespaces that still have their region."""
        self._look_for_lost()
        return iter(self._all.values())

    def open(self, session: str, engine: str, message: OpenNamespace) -> list[Action]:
        """Enter a namespace, creating it if needed. If it raises Refused, nothing has changed."""
        fingerprint = message.fingerprint
        if message.policy not in POLICIES:
            known = " or ".join(POLICIES)
            wrong = f"unknown eviction policy {message.policy!r}; use {known}"
            raise Refused(Code.BAD_SPEC, wrong, message.policy)
        if (nbytes := fingerprint.nbytes) > MAX_FINGERPRINT_BYTES:
            raise Refused(
                Code.BAD_SPEC,
                f"the fingerprint has {nbytes} bytes, more than {MAX_FINGERPRINT_BYTES}; put a "
                "hash of long values into `extra`",
                nbytes,
            )
        self._check_agrees(session, engine, message)
        region, reattached = self._regions.claim(
            namespace_owner(fingerprint.name), fingerprint, self._quota(message)
        )
        namespace = next((one for one in self if one.region is region), None)
        if namespace is None:
            namespace = Namespace(
                region, fingerprint, message.policy, message.store_threshold, self._note
            )
            self._all[namespace.name] = namespace
            self._regions.enter(namespace.deed)
        elif not namespace.used:
            namespace.configure(message.policy, message.store_threshold)
            self._regions.amend(namespace.deed)
        namespace.sessions[session] = engine
        self._of_session[session] = namespace
        self._pinned.setdefault(session, SessionPins(namespace.cache))
        reply = Opened(
            message.request_id,
            namespace.name,
            region.num_blocks,
            fingerprint.host_block_bytes,
            reattached,
            namespace.policy,
            namespace.threshold,
            self._unlike(namespace),
            namespace.generation,
        )
        return [SendMessage(session, reply)]

    def of(self, session: str) -> Namespace | None:
        """The namespace of a session, if any."""
        return self._of_session.get(session)

    def restore(self, found: RecoveredRegion) -> None:
        """Restore a namespace of an earlier daemon. Raises Refused if its record is wrong."""
        deed = found.deed
        fingerprint, policy = deed.fingerprint, deed.policy
        if fingerprint is None or fingerprint.name != deed.name or policy not in POLICIES:
            message = f"the record of namespace {deed.name!r} has a wrong fingerprint or policy"
            raise Refused(Code.BAD_SPEC, message, deed.name)
        if found.residents and deed.factor < 1:
            message = f"the record of namespace {deed.name!r} has no block_size_factor"
            raise Refused(Code.BAD_LAYOUT, message, deed.name)
        region = self._regions.restore(found)
        try:
            namespace = Namespace(region, fingerprint, policy, deed.threshold, self._note)
            namespace.restore(found)
        except ValueError as error:
            self._regions.free(region.owner)
            message = f"the block table of namespace {deed.name!r} is wrong: {error}"
            raise Refused(Code.BAD_SPEC, message, deed.name) from error
        self._all[namespace.name] = namespace

    def verified(self, report: BlocksVerified) -> None:
        """These keys match their checksums and are loadable from now on."""
        namespace = self._owner_of(report)
        if namespace is not None:
            namespace.cache.verify(zip(report.keys, report.blocks.tolist(), strict=True))

    def corrupted(self, report: BlocksCorrupted) -> None:
        """The bytes of these keys are lost: they are absent from now on."""
        namespace = self._owner_of(report)
        if namespace is not None:
            namespace.cache.discard(zip(report.keys, report.blocks.tolist(), strict=True))

    def _owner_of(self, report: BlocksVerified | BlocksCorrupted) -> Namespace | None:
        namespace = self._all.get(report.owner.name)
        owns = namespace is not None and namespace.region.owner == report.owner
        return namespace if owns else None

    def exit(self, namespace: Namespace, registration: int) -> None:
        namespace.registrations.remove(registration)
        self._desert_if_unused(namespace)

    def handle(
        self, session: str, message: Subscribe | Pin | Unpin | Touch | Reset
    ) -> list[Action]:
        """Handle a message about the keys of the session's namespace. Raises Refused."""
        namespace = self._of_session.get(session)
        if namespace is None:
            kind = type(message).__name__
            raise Refused(
                Code.UNKNOWN_NAMESPACE,
                f"{kind} needs a namespace, but this session is in none; open a namespace first",
                kind,
            )
        match message:
            case Subscribe():
                actions = self.news()
                namespace.followers.add(session)
                return [*actions, SendStream(session, namespace.snapshot())]
            case Pin(keys):
                namespace.check_keys(keys)
                self._pinned[session].pin(keys)
            case Unpin(keys):
                self._pinned[session].unpin(keys)
            case Touch(keys, hits, misses):
                namespace.check_keys(keys)
                namespace.cache.touch(keys)
                namespace.cache.count_lookups(hits, misses)
            case Reset(request_id):
                rubble = namespace.reset()
                self._regions.amend(namespace.deed, wipe=True)
                return [*self.news(), SendMessage(session, Done(request_id)), *_sweep(rubble)]
        return []

    def news(self) -> list[Action]:
        """Tell those who follow what happened since the last time."""
        self._look_for_lost()
        lost, self._lost = self._lost, []
        actions: list[Action] = [each for one in lost for each in _sweep(one.reset())]
        if not self._changed:
            return actions
        changed, self._changed = self._changed, {}
        for namespace in dict.fromkeys((*lost, *changed)):
            news = namespace.news()
            if news is not None:
                actions.append(
                    PublishKVEvents(namespace.name, namespace.fingerprint.block_size, news)
                )
                if namespace.followers:
                    actions.append(Broadcast(tuple(namespace.followers), news))
        return actions

    def _note(self, namespace: Namespace) -> None:
        self._changed[namespace] = None

    def _look_for_lost(self) -> None:
        """A deserted one may have given its room to somebody since the last look."""
        if self._regions_seen == self._regions.removals:
            return
        self._regions_seen = self._regions.removals
        lost = [one for one in self._all.values() if not self._regions.holds(one.region)]
        for namespace in lost:
            del self._all[namespace.name]
        self._lost += lost

    def leave(self, session: str) -> None:
        """A session went: what it pinned may go."""
        namespace = self._of_session.pop(session, None)
        if namespace is None:
            return
        self._pinned.pop(session).close()
        del namespace.sessions[session]
        namespace.followers.discard(session)
        self._desert_if_unused(namespace)

    def status(self) -> tuple[NamespaceStatus, ...]:
        return tuple(namespace.status() for namespace in self)

    def _check_agrees(self, session: str, engine: str, message: OpenNamespace) -> None:
        """Check that a session and all sessions of its engine are in one namespace."""
        for namespace in self._all.values():
            inside = engine in namespace.sessions.values() or session in namespace.sessions
            if inside and message.fingerprint != namespace.fingerprint:
                differences = ", ".join(message.fingerprint.differences(namespace.fingerprint))
                raise Refused(
                    Code.NAMESPACE_MISMATCH,
                    f"engine {engine!r} is in namespace {namespace.name} with another fingerprint "
                    f"({differences}); give engines that differ different names",
                    differences,
                )

    def _quota(self, message: OpenNamespace) -> int | None:
        """The requested quota; the current one if the namespace is in use."""
        namespace = self._all.get(message.fingerprint.name)
        if namespace is not None and namespace.used:
            return namespace.region.nbytes
        return message.quota_bytes

    def _unlike(self, namespace: Namespace) -> tuple[str, ...]:
        mine = namespace.fingerprint
        others = (
            f"{other.name}: {'; '.join(mine.differences(other.fingerprint))}"[:UNLIKE_CHARACTERS]
            for other in self
            if other is not namespace and other.fingerprint.model == mine.model
        )
        return tuple(islice(others, MOST_UNLIKE))

    def _desert_if_unused(self, namespace: Namespace) -> None:
        if not namespace.used:
            self._regions.desert(namespace.region.owner)


def _sweep(rubble: DeferredFree) -> list[Action]:
    return [FreeDeferred(rubble)] if rubble else []
