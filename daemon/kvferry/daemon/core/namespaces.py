"""All namespaces: sessions in them, their pinned keys, and key events to mirrors.

A namespace is identified by its fingerprint: engines whose bytes are exchangeable share it, and it
outlives them. When its last session has ended, its region and its keys stay until another owner
needs the memory. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
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
from kvferry.daemon.core.cache.policies import POLICIES
from kvferry.daemon.core.dispatch import MessageTable
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.ports import Ports
from kvferry.daemon.core.records import RecoveredRegion, namespace_owner
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.regions import Regions
from kvferry.daemon.core.session_pins import SessionPins
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.core.tier_actions import DropStore
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import Lookup
from kvferry.proto.messages import (
    SIBLINGS,
    ClientMessage,
    Opened,
    OpenNamespace,
    Pin,
    Pinned,
    Spare,
    Subscribe,
    Touch,
    Unpin,
)
from kvferry.proto.opening import check_opening, policy_name
from kvferry.proto.sizes import format_size
from kvferry.proto.status import NamespaceStatus

# How many similar namespaces an Opened reply lists, and how many characters of each.
MOST_UNLIKE, UNLIKE_CHARACTERS = 16, 512
# Seconds between two looks for epochs that other daemons have drawn, for mirrors whose engines send
# nothing meanwhile.
LOOK_EVERY = 0.25
# Seconds from an adoption of an epoch to the next one: it takes up to 20 ms of the event loop.
ADOPT_EVERY = 0.05
# How many characters of a reason for less host memory the status has.
SHORTFALL_CHARACTERS = 1024


class Namespaces:
    """All namespaces, and which session is in which."""

    def __init__(self, regions: Regions, ports: Ports) -> None:
        self._regions, self._ports, self._epochs = regions, ports, ports.epochs
        tiers = ports.tiers
        # `changes` of the epochs at the last look, its time, and that of the last adoption.
        self._seen_changes, self._looked, self._expired = self._epochs.changes, 0.0, 0.0
        self._adopted = float("-inf")
        # How often epochs were adopted.
        self.adoptions = 0
        # Namespaces that have another epoch than the host.
        self._behind: dict[Namespace, None] = {}
        # Blocks of freed namespaces that were evicted before they were written into each tier.
        self._unwritten = [0] * len(tiers)
        self._by_name: dict[str, Namespace] = {}
        self._by_session: dict[str, Namespace] = {}
        # Namespaces whose region was freed; their subscribers are not notified yet.
        self._freed: list[Namespace] = []
        regions.on_freed = self._remove_freed
        # Namespaces with unsent key events, oldest first.
        self._changed: dict[Namespace, None] = {}
        # Whether a request waits for a region: tiers then take no blocks of a namespace without
        # users, so that its region can be freed.
        self.region_wanted = False
        # Pinned keys of each session.
        self._session_pins: dict[str, SessionPins] = {}

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_name.values())

    @property
    def messages(self) -> MessageTable:
        return dict.fromkeys((Subscribe, Pin, Unpin, Touch, Spare), self.handle_message)

    def has(self, namespace: Namespace) -> bool:
        """Whether a namespace still has its region."""
        return self._by_name.get(namespace.name) is namespace

    @property
    def deadline(self) -> float | None:
        """The time of the next `adopt_epochs`, if any."""
        if self._behind:
            return self._adopted + ADOPT_EVERY
        return self._looked + LOOK_EVERY if self._by_session else None

    def adopt_epochs(self, now: float) -> list[Action]:
        """Empty the namespaces whose epoch has changed on this host, some perhaps later: until then
        nothing in them is valid. Also forget borrowed keys that are gone. Called for every message,
        before anything else."""
        self._looked = now
        is_due = now >= self._expired + LOOK_EVERY
        if is_due:
            self._expired = now
            for one in self:
                one.borrowed.expire(now)
        # A writer that is killed may have changed an epoch, but not `changes`.
        if (changes := self._epochs.changes) != self._seen_changes or is_due:
            self._seen_changes = changes
            for one in self:
                if self._epochs.current(one.name) != one.epoch:
                    one.is_behind = True
                    self._behind[one] = None
        if not self._behind or now < self._adopted + ADOPT_EVERY:
            return []
        self._adopted, self.adoptions = now, self.adoptions + 1
        behind, self._behind = self._behind, {}
        return [action for one in behind if self.has(one) for action in self._adopt(one)]

    def _adopt(self, namespace: Namespace) -> list[Action]:
        old = namespace.store_name
        deferred = namespace.begin_epoch(self._epochs.current(namespace.name))
        self._regions.record_updated(namespace.record)
        dropped: list[Action] = [] if old is None or not self._ports.tiers else [DropStore(old)]
        return [*_free_later(deferred), *dropped]

    @property
    def any_held_by_tiers(self) -> bool:
        """Whether tiers alone keep the region of a namespace from being freed."""
        return any(one.in_use and not one.has_users for one in self)

    def open_namespace(self, session: str, engine: str, message: OpenNamespace) -> list[Action]:
        """Enter a namespace, creating it if needed. If it raises Refused, nothing has changed."""
        fingerprint = message.fingerprint
        check_opening(message)
        policy = policy_name(message.policy)
        self._check_fingerprint(session, engine, message)
        in_use = self._in_use(message)
        region, reattached = self._regions.assign_region(
            namespace_owner(fingerprint.name),
            fingerprint,
            message.quota_bytes if in_use is None else in_use.region.nbytes,
        )
        namespace = next((one for one in self if one.region is region), None)
        if namespace is None:
            namespace = self._make_namespace(region, fingerprint, policy, message.store_threshold)
            self._by_name[namespace.name] = namespace
            self._regions.record_created(namespace.record)
        elif not namespace.has_users:
            namespace.configure(policy, message.store_threshold)
            self._regions.record_updated(namespace.record)
        namespace.shortfall = self._shortfall(namespace, message.quota_bytes, in_use is not None)
        namespace.change_sessions(session, engine)
        self._by_session[session] = namespace
        self._session_pins.setdefault(session, SessionPins(namespace.cache))
        reply = Opened(
            message.request_id,
            namespace.name,
            region.num_blocks,
            fingerprint.host_block_bytes,
            reattached,
            namespace.policy,
            namespace.threshold,
            self._similar_namespaces(namespace),
            namespace.epoch,
            self._searched_names(),
            self._ports.siblings.stores_once,
            namespace.shortfall,
        )
        return [SendMessage(session, reply)]

    def find_namespace(self, name: str) -> Namespace | None:
        """The namespace with this name that has a region, if any."""
        return self._by_name.get(name)

    def namespace_of(self, session: str) -> Namespace | None:
        """The namespace of a session, if any."""
        return self._by_session.get(session)

    def restore_namespace(self, found: RecoveredRegion) -> Region:
        """Restore a namespace of an earlier daemon. Raises Refused if its record is wrong."""
        record = found.record
        fingerprint, policy = record.fingerprint, record.policy
        if fingerprint is None or fingerprint.name != record.name or policy not in POLICIES:
            message = f"the record of namespace {record.name!r} has a wrong fingerprint or policy"
            raise Refused(Code.BAD_SPEC, message, record.name)
        region = self._regions.restore_region(found)
        try:
            self._epochs.raise_to(fingerprint.name, record.epoch)
            namespace = self._make_namespace(region, fingerprint, policy, record.threshold)
            namespace.restore_keys(record)
        except ValueError as error:
            self._regions.free_region(region.owner)
            message = f"the block table of namespace {record.name!r} is wrong: {error}"
            raise Refused(Code.BAD_LAYOUT, message, record.name) from error
        self._by_name[namespace.name] = namespace
        return region

    def mark_verified(self, report: BlocksVerified) -> None:
        """The keys in these blocks are loadable from now on."""
        if (namespace := self._by_name.get(report.owner.name)) is not None:
            namespace.cache.mark_verified(report.blocks)

    def mark_corrupted(self, report: BlocksCorrupted) -> None:
        """The bytes of these blocks are lost: their keys are absent from now on."""
        if (namespace := self._by_name.get(report.owner.name)) is not None:
            namespace.cache.discard_blocks(report.blocks)

    def remove_registration(self, namespace: Namespace, registration: int) -> None:
        namespace.registrations.remove(registration)
        self.mark_deserted_if_unused(namespace)

    def handle_message(
        self, session: str, message: Subscribe | Pin | Unpin | Touch | Spare, _now: float
    ) -> list[Action]:
        """Handle a message about the keys of the session's namespace. Raises Refused."""
        namespace = self.require_namespace(session, message)
        match message:
            case Subscribe():
                actions = self.take_key_events()
                namespace.subscribers.add(session)
                return [*actions, SendStream(session, namespace.snapshot())]
            case Pin(keys, request_id):
                namespace.check_keys(keys)
                self._session_pins[session].pin_keys(keys)
                if request_id is not None:
                    held = namespace.count_prefix(keys, (Lookup.HIT,))
                    return [SendMessage(session, Pinned(request_id, held))]
            case Unpin(keys):
                self._session_pins[session].unpin_keys(keys)
            case Touch():
                namespace.check_keys(message.keys)
                namespace.cache.touch(message.keys)
                namespace.use.count(message)
            case Spare(keys):
                namespace.check_keys(keys)
                if len(namespace.engines) == 1:
                    namespace.cache.spare(keys)
        return []

    def require_namespace(self, session: str, message: ClientMessage) -> Namespace:
        """The namespace of a session that sent a message about keys. Raises Refused."""
        namespace = self._by_session.get(session)
        if namespace is None:
            kind = type(message).__name__
            raise Refused(
                Code.UNKNOWN_NAMESPACE,
                f"{kind} needs a namespace, but this session is in none; open a namespace first",
                kind,
            )
        return namespace

    def take_key_events(self) -> list[Action]:
        """Key events since the last call: actions for subscribers, mirrors and deferred freeing."""
        lost, self._freed = self._freed, []
        actions = [each for one in lost for each in _free_later(one.begin_epoch(one.epoch))]
        if not self._changed:
            return actions
        changed, self._changed = self._changed, {}
        for namespace in dict.fromkeys((*lost, *changed)):
            key_events = namespace.take_key_events()
            if key_events is not None:
                actions.append(
                    PublishKVEvents(namespace.name, namespace.fingerprint.block_size, key_events)
                )
                if namespace.subscribers:
                    actions.append(Broadcast(tuple(namespace.subscribers), key_events))
        for namespace in lost:
            namespace.cache.events.end()
        return actions

    def _make_namespace(
        self, region: Region, fingerprint: Fingerprint, policy: str, threshold: int
    ) -> Namespace:
        made = Namespace(region, fingerprint, policy, threshold, self._note_changed, self._ports)
        made.start_epoch(self._epochs.current(made.name))
        return made

    def _searched_names(self) -> tuple[str, ...]:
        """The names of the siblings and of the tiers, in the order in which they are searched."""
        siblings = [SIBLINGS] if self._ports.siblings.is_enabled else []
        return *siblings, *(tier.name for tier in self._ports.tiers)

    def _note_changed(self, namespace: Namespace) -> None:
        self._changed[namespace] = None

    def _remove_freed(self, region: Region) -> None:
        """A region was freed: remove its namespace."""
        namespace = self._by_name.get(region.owner.name)
        if namespace is not None and namespace.region is region:
            del self._by_name[namespace.name]
            namespace.cache.tier_access.count_loss()
            self._unwritten = _sums(self._unwritten, namespace.cache.tier_access.unwritten)
            self._freed.append(namespace)

    def close_session(self, session: str) -> list[Action]:
        """Remove a closed session and release its pins, many of them later."""
        namespace = self._by_session.pop(session, None)
        if namespace is None:
            return []
        namespace.retained.end(lambda owner: owner.session == session)
        pins = self._session_pins.pop(session)
        actions: list[Action] = [FreeDeferred(pins)] if pins.free_some() else []
        namespace.change_sessions(session, None)
        namespace.subscribers.discard(session)
        self.mark_deserted_if_unused(namespace)
        return actions

    def status(self) -> tuple[NamespaceStatus, ...]:
        return tuple(namespace.status() for namespace in self)

    def used_contents(self) -> list[NamespaceContents]:
        """The contents of each namespace in use in which an engine has registered."""
        return [one.contents for one in self if one.has_users and one.contents is not None]

    def unwritten(self) -> list[int]:
        """For each tier, the blocks that were evicted before they were written into it."""
        counts = (namespace.cache.tier_access.unwritten for namespace in self)
        return reduce(_sums, counts, self._unwritten)

    def _check_fingerprint(self, session: str, engine: str, message: OpenNamespace) -> None:
        """Check that a session and all sessions of its engine are in one namespace."""
        for namespace in self._by_name.values():
            inside = engine in namespace.sessions.values() or session in namespace.sessions
            if inside and message.fingerprint != namespace.fingerprint:
                differences = ", ".join(message.fingerprint.differences(namespace.fingerprint))
                raise Refused(
                    Code.NAMESPACE_MISMATCH,
                    f"engine {engine!r} is in namespace {namespace.name} with another fingerprint "
                    f"({differences}); give engines that differ different names",
                    differences,
                )

    def _in_use(self, message: OpenNamespace) -> Namespace | None:
        """The namespace that is opened, if it is in use."""
        namespace = self._by_name.get(message.fingerprint.name)
        return namespace if namespace is not None and namespace.in_use else None

    def _shortfall(self, namespace: Namespace, quota: int | None, in_use: bool) -> str:
        """Why a namespace has less host memory than its quota, or than the pool without one."""
        if quota is None:
            known = namespace.shortfall if in_use else ""
            return (known or self._regions.shortfall(namespace.region))[:SHORTFALL_CHARACTERS]
        if quota // namespace.region.block_bytes <= namespace.region.num_blocks:
            return ""
        asked, had = format_size(quota), format_size(namespace.region.nbytes)
        return (
            f"{asked} were asked for, but the namespace is in use with {had}; another size applies "
            "when all of its engines have stopped"
        )

    def _similar_namespaces(self, namespace: Namespace) -> tuple[str, ...]:
        mine = namespace.fingerprint
        others = (
            f"{other.name}: {'; '.join(mine.differences(other.fingerprint))}"[:UNLIKE_CHARACTERS]
            for other in self
            if other is not namespace and other.fingerprint.model == mine.model
        )
        return tuple(islice(others, MOST_UNLIKE))

    def mark_present(self, namespace: Namespace) -> None:
        """A namespace is in use, also without a session."""
        self._regions.mark_present(namespace.region.owner)

    def mark_deserted_if_unused(self, namespace: Namespace) -> None:
        if not namespace.in_use:
            self._regions.mark_deserted(namespace.region.owner)


def _free_later(deferred: DeferredFree) -> list[Action]:
    return [FreeDeferred(deferred)] if deferred else []


def _sums(first: list[int], second: list[int]) -> list[int]:
    return [one + other for one, other in zip(first, second, strict=True)]
