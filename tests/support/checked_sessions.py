"""A core with namespaces, and a model that checks every answer: sessions and registrations.

Each method sends a message of an engine, or a report of a device worker, and updates the model.
Transfers and keys are in checked_namespaces.py.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, count
from typing import Any, TypeAlias

from kvferry.daemon.core.actions import (
    Action,
    Broadcast,
    FreeDeferred,
    MapTensors,
    PublishKVEvents,
    Report,
    SendMessage,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.core import Core, PoolBounds
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.ports import Ports
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import EventKind
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
)
from kvferry.proto.status import Limits
from support.key_requests import PLAIN
from support.mirror_model import MirrorModel
from support.namespaces_fixture import DEVICE, copies
from support.namespaces_model import (
    POOL,
    REGION,
    KeyedRegistration,
    KeyedTransfer,
    NamespaceModel,
    PoolModel,
)
from support.own_epochs import OwnEpochs, with_syncs
from support.region_records_model import RegionRecordsModel

# An engine with a region of its own, in no namespace.
NEWCOMER = "newcomer"
# A request that would be refused with one of these waits while a registration closes.
MAY_WAIT = Code.POOL_FULL, Code.ALREADY_REGISTERED
NamespaceRequest: TypeAlias = wire.OpenNamespace | wire.AllocateKVCaches


def new_core(boot_id: str = "boot") -> Core:
    limits = Limits(1 << 20, 1 << 10, 1000)
    return Core(
        DaemonIdentity("0.1", boot_id, 4711, DEVICE, limits, 100.0),
        PoolBounds(POOL),
        Ports(OwnEpochs()),
    )


class CheckedSessions:
    """Sessions, registrations, and regions of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.records = new_core(), RegionRecordsModel()
        self.pool = PoolModel()
        self.namespaces: dict[str, NamespaceModel] = {}
        # Of each namespace, the number of its resets, which is its epoch.
        self.epochs = Counter[str]()
        # Each message comes a second later, so that epochs are adopted with it.
        self.now = 101.0
        # The engine of each session.
        self.sessions: dict[str, str] = {}
        # For each session, the request that is answered when a registration has closed.
        self.waiting: dict[str, NamespaceRequest] = {}
        # The registration of the newcomer, while it is connected.
        self.newcomer: int | None = None
        self.numbers = count(1)

    # State of the model

    def namespace_of(self, session: str) -> NamespaceModel | None:
        return next((n for n in self.namespaces.values() if session in n.sessions), None)

    def in_namespaces(self) -> list[str]:
        return [session for session in self.sessions if self.namespace_of(session)]

    def registrations(self) -> dict[str, KeyedRegistration]:
        """The registration of each engine."""
        return {r.engine: r for n in self.namespaces.values() for r in n.registrations}

    def closing(self) -> list[KeyedRegistration]:
        return [r for r in self.registrations().values() if r.closing]

    def transfers(self) -> list[KeyedTransfer]:
        return [t for n in self.namespaces.values() for t in n.transfers.values()]

    def mirrors(self) -> list[MirrorModel]:
        return list(chain(*(n.subscribers.values() for n in self.namespaces.values())))

    def cache(self, namespace: NamespaceModel) -> Cache:
        return self.core._namespaces._by_name[namespace.name].cache

    def bytes_not_in_use(self) -> int:
        """They are contiguous: the pool has room for two regions."""
        used = sum(n.nbytes for n in self.namespaces.values() if n.in_use)
        return POOL - used - (REGION if self.newcomer is not None else 0)

    def pool_is_full(self) -> bool:
        return self.bytes_not_in_use() < REGION

    # Answers of the core

    def send(self, session: str, message: wire.ClientMessage) -> list[Any]:
        self.now += 1.0
        actions = self.core.handle(session, message, self.now)
        return self._observe(with_syncs(self.core, actions, self.now))

    def report(self, report: Report) -> list[Any]:
        return self._observe(self.core.report(report))

    def _observe(self, actions: list[Action]) -> list[Any]:
        """Apply records and key events. Returns all other actions."""
        others = list[Any]()
        actions = self.records.observe(actions)
        subscribed: tuple[wire.KeyEvents, NamespaceModel] | None = None
        for action in actions:
            match action:
                case PublishKVEvents(name, _, events):
                    assert subscribed is None
                    namespace = self.namespaces[name]
                    namespace.published.receive(events)
                    assert events.epoch == namespace.epoch
                    cleared = events.events == (wire.KeyEvent(EventKind.CLEARED, ()),)
                    if cleared and not namespace.in_use:  # its region was freed
                        del self.namespaces[name]
                    else:
                        subscribed = (events, namespace) if namespace.subscribers else None
                case Broadcast(sessions, message):
                    assert subscribed is not None
                    events, namespace = subscribed
                    assert (message, {*sessions}) == (events, {*namespace.subscribers})
                    for mirror in namespace.subscribers.values():
                        mirror.receive(events)
                    subscribed = None
                case FreeDeferred():
                    pass
                case _:
                    others.append(action)
        assert subscribed is None
        return others

    def check_refused(self, actions: list[Any], session: str, code: Code) -> None:
        (action,) = actions
        assert action.session == session
        match action.message:
            case wire.Finished((result,)):
                assert result.outcome is Outcome.REFUSED
                assert result.error is not None
                assert result.error.code == code
            case wire.Error(error=error):
                assert error.code == code
            case other:
                raise AssertionError(other)

    # Sessions

    def connect(self, engine: str) -> str:
        session = f"s{next(self.numbers)}"
        self.core.open_session(session, make_hello("client", engine))
        self.sessions[session] = engine
        return session

    def open_namespace(
        self, session: str, fingerprint: Fingerprint, policy: str, quota: int | None = REGION
    ) -> None:
        self._request(session, wire.OpenNamespace(next(self.numbers), fingerprint, quota, policy))

    def register(self, session: str, layout: KVLayout) -> None:
        self._request(session, wire.AllocateKVCaches(next(self.numbers), layout))

    def _request(self, session: str, message: NamespaceRequest) -> None:
        assert session not in self.waiting
        waits = self.closing() and self._may_wait(session, message)
        expected = self._expected_bytes(message)
        actions = self.send(session, message)
        if waits:
            assert actions == []
            self.waiting[session] = message
        else:
            self._check_answer(session, message, expected, *actions)

    def _may_wait(self, session: str, message: NamespaceRequest) -> bool:
        """Whether a request waits while a registration closes."""
        wants_all_free = (
            isinstance(message, wire.OpenNamespace)
            and message.quota_bytes is None
            and message.fingerprint.name not in self.namespaces
        )
        return wants_all_free or self._refusal(session, message) in MAY_WAIT

    def _expected_bytes(self, message: NamespaceRequest) -> int:
        """The size of the region of a namespace that is opened now."""
        if not isinstance(message, wire.OpenNamespace):
            return 0
        namespace = self.namespaces.get(message.fingerprint.name)
        if namespace is not None and (namespace.in_use or message.quota_bytes is None):
            return namespace.nbytes
        return message.quota_bytes or self.bytes_not_in_use()

    def _refusal(self, session: str, message: NamespaceRequest) -> Code | None:
        """The code with which a request is refused now, if any."""
        engine = self.sessions[session]
        if isinstance(message, wire.OpenNamespace):
            name = message.fingerprint.name
            others = [n for n in self.namespaces.values() if n.name != name]
            if any(engine in other.sessions.values() for other in others):
                return Code.NAMESPACE_MISMATCH
            exists = name in self.namespaces
            return None if exists or not self.pool_is_full() else Code.POOL_FULL
        namespace = self.namespace_of(session)
        assert namespace is not None
        if engine in self.registrations():
            return Code.ALREADY_REGISTERED
        too_large = message.layout.host_block_bytes > namespace.fingerprint.host_block_bytes
        differs = namespace.layout_is_fixed and namespace.layout != message.layout
        return Code.NAMESPACE_MISMATCH if too_large or differs else None

    def _check_answer(
        self, session: str, message: NamespaceRequest, expected: int, action: Any
    ) -> None:
        """expected: bytes of the region."""
        refusal = self._refusal(session, message)
        if refusal is not None:
            self.check_refused([action], session, refusal)
        elif isinstance(message, wire.OpenNamespace):
            self._check_opened(session, message, expected, action)
        else:
            self._check_registered(session, message, action)

    def _check_opened(
        self, session: str, message: wire.OpenNamespace, expected: int, action: Any
    ) -> None:
        assert isinstance(action, SendMessage)
        opened = action.message
        assert isinstance(opened, wire.Opened)
        fingerprint = message.fingerprint
        assert opened.reattached == (fingerprint.name in self.namespaces)
        region = self.core._namespaces._by_name[fingerprint.name].region
        namespace = self.namespaces.setdefault(
            fingerprint.name,
            NamespaceModel(fingerprint, region.start, region.nbytes, self.epochs[fingerprint.name]),
        )
        assert (region.start, region.nbytes) == (namespace.start, expected)
        falls_short = expected < (message.quota_bytes or POOL)
        assert bool(opened.shortfall) == falls_short
        namespace.sessions[session] = self.sessions[session]
        namespace.pins.setdefault(session, {})
        reply = opened.name, opened.num_blocks, opened.epoch
        assert reply == (namespace.name, namespace.capacity, namespace.epoch)
        assert (action.session, opened.request_id) == (session, message.request_id)

    def _check_registered(self, session: str, message: wire.AllocateKVCaches, action: Any) -> None:
        assert isinstance(action, MapTensors)
        assert action.session == session
        namespace = self.namespace_of(session)
        assert namespace is not None
        namespace.layout = message.layout
        namespace.registrations.append(
            KeyedRegistration(
                action.registration, self.sessions[session], session, namespace, message.layout
            )
        )

    def disconnect(self, session: str) -> None:
        engine, namespace = self.sessions.pop(session), self.namespace_of(session)
        self.waiting.pop(session, None)
        if namespace is not None:
            del namespace.sessions[session], namespace.pins[session]
            for who in [who for who in namespace.retained if who[0] == session]:
                del namespace.retained[who]
            namespace.subscribers.pop(session, None)
        unmaps = [a for a in self.core.close_session(session) if isinstance(a, UnmapTensors)]
        registration = self.registrations().get(engine)
        if registration is None or registration.session != session:
            assert unmaps == []
        else:
            assert unmaps == [UnmapTensors(registration.number)]
            registration.closing = True

    # Registrations

    def map_tensors(self, registration: KeyedRegistration, works: bool = True) -> None:
        registration.mapped = True
        session, namespace = registration.session, registration.namespace
        error = None if works else ErrorInfo(Code.MAP_FAILED, "no memory")
        actions = self.report(TensorsMapped(registration.number, session, error))
        if registration.closing:
            assert actions == []
        elif works:
            (action,) = actions
            nbytes = namespace.fingerprint.host_block_bytes
            region = memory.HostRegion(namespace.capacity, nbytes, False)
            assert (action.session, action.message.region) == (session, region)
        else:
            self.check_refused(actions, session, Code.MAP_FAILED)
            namespace.registrations.remove(registration)

    def unmap_tensors(self, registration: KeyedRegistration, outcome: Outcome) -> None:
        """End the transfers of a closing registration. Then requests that waited are answered."""
        if not registration.mapped:
            self.map_tensors(registration)
        transfers = registration.namespace.transfers.values()
        for transfer in [t for t in transfers if t.registration is registration]:
            self.end_transfer(transfer, outcome)
        registration.namespace.registrations.remove(registration)
        self._answer_waiting(self.report(TensorsUnmapped(registration.number)))

    def _answer_waiting(self, actions: list[Any]) -> None:
        for action in actions:
            message = self.waiting.pop(action.session)
            self._check_answer(action.session, message, self._expected_bytes(message), action)
        for session, message in self.waiting.items():
            assert self.closing()
            assert self._may_wait(session, message)

    def end_transfer(self, transfer: KeyedTransfer, outcome: Outcome) -> None:
        raise NotImplementedError

    # A region outside namespaces

    def connect_newcomer(self) -> None:
        """Connect the newcomer. If it gets a region, it stores into each of its blocks."""
        self.core.open_session(NEWCOMER, make_hello("client", NEWCOMER))
        full, closing = self.pool_is_full(), self.closing()
        actions = self.send(NEWCOMER, wire.AllocateKVCaches(1, PLAIN, REGION))
        if full:
            if closing:
                assert actions == []
            else:
                self.check_refused(actions, NEWCOMER, Code.POOL_FULL)
            self.core.close_session(NEWCOMER)
            return
        self.newcomer = actions[0].registration
        self.report(TensorsMapped(self.newcomer, NEWCOMER))
        spec = GPULoadStoreSpec(range(4)), CPULoadStoreSpec(range(4))
        (start,) = self.send(NEWCOMER, wire.Submit(1, *spec))
        self.report(TransferCompleted(start.plan.serial, Outcome.DONE))
        for _, _, offset in copies(start.plan):
            self.pool.write(offset, 1024, (start.plan.serial, b"", 0))

    def disconnect_newcomer(self) -> None:
        assert self.newcomer is not None
        number, self.newcomer = self.newcomer, None
        self.core.close_session(NEWCOMER)
        self._answer_waiting(self.report(TensorsUnmapped(number)))
