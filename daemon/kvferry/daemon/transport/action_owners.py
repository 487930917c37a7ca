"""The parts of the daemon that perform actions of the core, besides transport itself.

The server passes actions and ended reports here. Event loop only; nothing here blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.daemon.core.actions import (
    FreeDeferred,
    KeepTensors,
    OwnersAction,
    PublishKVEvents,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
    ReleaseTensors,
    Report,
    SendMessage,
    StartTransfer,
    TransferCompleted,
)
from kvferry.daemon.core.cache.deferred_free import FreedInSteps
from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    DropStore,
    FetchBlocks,
    FindKeys,
    SettleEpochs,
    SyncEpochs,
)
from kvferry.daemon.device.device_worker import Command, DeviceWorker
from kvferry.daemon.persistence.epoch_page import EpochSync
from kvferry.daemon.persistence.kept_tensor_store import KeptTensorStore
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.siblings.peers import SiblingPeers
from kvferry.daemon.tiers.tiering import Tiering
from kvferry.proto.messages import DaemonMessage


@dataclass(frozen=True, slots=True)
class Persistence:
    """What outlives the daemon."""

    regions: RegionStore
    tensors: KeptTensorStore
    epochs: EpochSync


class ActionOwners:
    """The device worker, persistence, the tiers and observability.

    publish: publishes KV events to subscribers outside of the daemon. receive_own: gets the
    messages to the daemon's own session. peers: None without siblings.
    """

    def __init__(
        self,
        worker: DeviceWorker,
        persistence: Persistence,
        tiering: Tiering,
        publish: Callable[[PublishKVEvents], None],
        receive_own: Callable[[DaemonMessage], None],
        peers: SiblingPeers | None = None,
    ) -> None:
        self._worker, self._persistence, self._tiering = worker, persistence, tiering
        self._publish, self._receive_own, self._peers = publish, receive_own, peers

    @property
    def busy(self) -> bool:
        """Whether a completed store is not committed yet."""
        return self._persistence.regions.busy

    def perform(self, action: OwnersAction) -> None:
        match action:  # the most frequent first
            case StartTransfer():
                self._worker.post_command(action)
            case PublishKVEvents():
                self._publish(action)
            case SendMessage(_, message):
                self._receive_own(message)
            case RegionCreated() | RegionUpdated() | RegionFreed():
                self._persistence.regions.apply_change(action)
                if self._peers is not None:
                    self._peers.ask_soon()
            case KeepTensors():
                self._persistence.tensors.store_tensors(action)
            case ReleaseTensors(number):
                self._persistence.tensors.remove_tensors(number)
                self._worker.post_command(action)
            case SyncEpochs():
                self._persistence.epochs.start()
            case FindKeys() | FetchBlocks() | DropStore() | SettleEpochs():
                self._tiering.perform(action)
            case FreeDeferred(deferred):
                self._free_in_steps(deferred)
            case command:
                self._worker.post_command(command)

    def _free_in_steps(self, deferred: FreedInSteps) -> None:
        """Free some entries now and the rest in later turns of the loop, between other work."""
        if deferred.free_some():
            asyncio.get_running_loop().call_soon(self._free_in_steps, deferred)

    def post_command(self, command: Command) -> None:
        """Pass a command to the device worker."""
        self._worker.post_command(command)

    def wake_up(self, reports: list[Report]) -> None:
        """These reports were handled: there may be blocks to commit, or to write into tiers."""
        if any(isinstance(report, TransferCompleted | BlocksFetched) for report in reports):
            self._persistence.regions.wake_up()
        self._tiering.wake_up()

    def stop(self) -> None:
        """Write nothing more into the tiers: the sessions end next."""
        self._tiering.stop()
