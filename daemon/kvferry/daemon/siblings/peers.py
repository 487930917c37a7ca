"""SiblingPeers: finds the siblings of this daemon, and keeps a session and the windows of each.

    connecting --Welcome--> asking every second --> on, or why nothing is loaded
        ^______ session lost ______|

A sibling is asked for the region of each namespace in use here. If it is another one than the
mapped one, its descriptors are fetched and mapped. A sibling that is stopped lends on: its memory
and its tables stay as they are. When a session ends, the windows are unmapped; if the sibling's
pool is kept over a restart, only after KEPT_SECONDS, because the next daemon has the same memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
import zmq

from kvferry.client.endpoint import find_daemons
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.siblings.peer_client import PeerClient
from kvferry.daemon.siblings.windows import LentMemory, MappedWindows
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused
from kvferry.proto.lending import MemoryLent
from kvferry.proto.status import SiblingStatus

# Seconds between two questions to a sibling, two attempts to connect, and two searches for daemons.
ASK_EVERY = 1.0
# Seconds for a sibling with a kept pool to restart. Meanwhile its memory stays mapped.
KEPT_SECONDS = 30.0
# Seconds between two messages with uses.
USES_EVERY = 0.1
# Seconds without an answer after which a sibling gets no uses: they would queue up here.
PROMPT_SECONDS = 2.0
# Chunks of a pool: each takes a descriptor while it is mapped.
MAX_CHUNKS = 1 << 14
# Characters of a reason, which may be the sibling's.
MAX_STATE = 512
ON = "on"

# Returns the contents of each namespace in use.
UsedContents = Callable[[], Sequence[NamespaceContents]]
log = structlog.get_logger()


class SiblingPeer:
    """One sibling. used: see UsedContents. page_identity: of the own page of epochs.

    state: ON, or why its blocks are not loaded. keys: that it has, of the namespaces in use here.
    """

    def __init__(
        self, directory: Path, windows: MappedWindows, used: UsedContents, page_identity: bytes
    ) -> None:
        self.directory, self._windows, self._used = directory, windows, used
        self._name, self._page_identity = str(directory), page_identity
        self.state, self.keys = "connecting", 0
        self._client: PeerClient | None = None
        self._asked = asyncio.Event()
        self._answered = 0.0
        # Whether the sibling's memory stays the same over a restart; the end of that time.
        self._is_kept = False
        self._expiry: asyncio.TimerHandle | None = None
        # Why regions cannot be mapped. They are tried again in the next session.
        self._refused: dict[int, str] = {}

    @property
    def is_lending(self) -> bool:
        """Whether memory of it is mapped."""
        return bool(self._windows.namespaces_of(self._name))

    async def run(self) -> None:
        """Keep a session, until cancelled."""
        try:
            while True:
                try:
                    await self._keep_session()
                except Exception as error:  # a sibling must not end this daemon
                    self._lose(error)
                await asyncio.sleep(ASK_EVERY)
        finally:
            self._expire()
            for _ in self._windows.take_uses(self._name):  # nobody is told of them any more
                pass

    def ask_soon(self) -> None:
        """A namespace may have been opened here."""
        self._asked.set()

    def send_uses(self) -> None:
        """Tell the sibling which blocks were used, if it answers."""
        client, is_prompt = self._client, time.monotonic() - self._answered < PROMPT_SECONDS
        for uses in self._windows.take_uses(self._name):
            if client is not None and is_prompt:
                with suppress(KVFerryError):
                    client.send_uses(uses)

    def status(self) -> SiblingStatus:
        windows, name = self._windows, self._name
        return SiblingStatus(
            name,
            self.state,
            self.keys,
            windows.loaded[name],
            windows.loaded_bytes[name],
            windows.mapped_bytes(name),
        )

    # The session

    async def _keep_session(self) -> None:
        check_alive(self.directory)
        self._client = client = await PeerClient.open(self.directory)
        try:
            while True:
                self._asked.clear()
                try:
                    await self._ask(client)
                except Gone as error:
                    if error.code != Code.TIMEOUT or not client.connected:
                        raise
                    if not self.is_lending:
                        self.state = "it does not answer; it may be stopped"
                await self._pause(client)
        finally:
            self._client = None
            client.disconnect()

    async def _ask(self, client: PeerClient) -> None:
        """Update the windows of all namespaces in use."""
        used, states, keys = self._used(), list[str](), 0
        for contents in used:
            lent = await client.borrow_memory(contents)
            self._answered = time.monotonic()
            keys += lent.keys
            states.append(await self._update_window(client, contents, lent))
        unused = {*self._windows.namespaces_of(self._name)} - {each.namespace for each in used}
        self._windows.close(self._name, *unused)
        self.keys, self.state = keys, next((state for state in states if state != ON), ON)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    async def _pause(self, client: PeerClient) -> None:
        """Wait until the sibling must be asked again. Raises Gone if the connection is lost."""
        end = time.monotonic() + ASK_EVERY
        while not self._asked.is_set() and (left := end - time.monotonic()) > 0:
            waits = [
                asyncio.ensure_future(client.wait_changed(left)),
                asyncio.ensure_future(self._asked.wait()),
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            if waits[0].done() and not waits[0].cancelled():
                waits[0].result()

    async def _update_window(
        self, client: PeerClient, contents: NamespaceContents, lent: MemoryLent
    ) -> str:
        """Map the memory of a namespace, if it is not mapped. Returns the state."""
        windows, state = self._windows, ON
        if lent.region and lent.page_identity != self._page_identity:
            state = "its epochs are on another page; set the same state directory for both daemons"
        if state == ON and windows.has(self._name, contents, lent.region):
            self._is_kept = lent.is_kept
            return ON
        windows.close(self._name, contents.namespace)
        if state != ON or not lent.region:  # it serves other models, which is no fault
            return state
        if lent.region in self._refused:
            return self._refused[lent.region]
        if not windows.is_ready:
            return "the own pool is being registered"
        try:
            windows.check_chunks(lent.chunk_bytes)
            self.state = "its memory is being registered"
            memory = await self._fetch(client, contents, lent)
            if memory is None:
                return "its region has changed"
            await windows.map(memory)
        except Gone:
            raise
        except (KVFerryError, OSError) as error:
            if isinstance(error, KVFerryError) and error.code == Code.BUSY:
                return str(error)
            self._refused[lent.region] = str(error)[:MAX_STATE]
            log.warning("blocks of a sibling are not used", sibling=self._name, reason=str(error))
            return self._refused[lent.region]
        self._is_kept = lent.is_kept
        return ON

    async def _fetch(
        self, client: PeerClient, contents: NamespaceContents, lent: MemoryLent
    ) -> LentMemory | None:
        """Fetch the descriptors of a region. None if it has become another one."""
        held, chunks = list[int](), list[int]()
        table = page = -1
        try:
            while (at := lent.first + len(chunks)) < min(lent.end, lent.first + MAX_CHUNKS):
                part = await client.borrow_memory(contents, at)
                if part.region != lent.region or not part.handles:
                    break
                for handle in part.handles:
                    held.append(await client.receive_fd(handle))
                    chunks.append(held[-1])
                if table < 0 and part.table is not None and part.page is not None:
                    held += [table := await client.receive_fd(part.table)]
                    held += [page := await client.receive_fd(part.page)]
            else:
                if table >= 0:
                    place = lent.region, lent.chunk_bytes, lent.start, lent.first
                    memory = LentMemory(self._name, contents, *place, chunks, table, page)
                    held = []
                    return memory
            return None
        finally:
            for descriptor in held:
                os.close(descriptor)

    # The end of a session

    def _lose(self, error: Exception) -> None:
        """The session has ended, or there is none. `run` connects again."""
        if not isinstance(error, KVFerryError):
            if not isinstance(error, OSError | zmq.ZMQError):
                reason = "".join(traceback.format_exception(error, limit=-4))
                log.error("sibling disconnected", sibling=self._name, reason=reason)
            error = Gone(Code.DAEMON_GONE, f"the session with the sibling failed: {error!r}")
        self.state = str(error)[:MAX_STATE]
        self._refused.clear()
        if not self._is_kept or isinstance(error, Refused):
            self._expire()
        elif self._expiry is None and self.is_lending:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(KEPT_SECONDS, self._expire)

    def _expire(self) -> None:
        self._windows.close(self._name, *self._windows.namespaces_of(self._name))
        self.keys = 0
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


class SiblingPeers:
    """All siblings. own: directory of this daemon. directories: in which siblings are searched.
    windows, used, page_identity: see SiblingPeer."""

    def __init__(
        self,
        own: Path,
        directories: Sequence[Path],
        windows: MappedWindows,
        used: UsedContents,
        page_identity: bytes,
    ) -> None:
        self._own, self._directories = own, directories
        self._windows, self._used, self._page_identity = windows, used, page_identity
        self._peers: dict[Path, SiblingPeer] = {}
        self._tasks: dict[Path, asyncio.Task[None]] = {}
        # Why daemons are not used at all.
        self._unusable: dict[Path, str] = {}
        self._sends_uses = False
        windows.uses_noted = self._send_uses_soon

    async def run(self) -> None:
        """Find siblings that have started or ended, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    while True:
                        found, self._unusable = await asyncio.to_thread(self._find)
                        self._update(found, tasks)
                        await asyncio.sleep(ASK_EVERY)
                finally:
                    self._windows.stop_mapping()
        finally:
            await self._windows.wait_unmapped()

    def ask_soon(self) -> None:
        """A namespace may have been opened here."""
        for peer in self._peers.values():
            peer.ask_soon()

    def status(self) -> tuple[SiblingStatus, ...]:
        peers = (peer.status() for peer in self._peers.values())
        unusable = (SiblingStatus(str(path), why) for path, why in self._unusable.items())
        return tuple(sorted((*peers, *unusable), key=lambda each: each.directory))

    def _update(self, found: set[Path], tasks: asyncio.TaskGroup) -> None:
        """Have a peer for each of these daemons, and for each whose memory is still mapped."""
        for path in self._peers.keys() - found:
            if path in self._unusable or not self._peers[path].is_lending:
                del self._peers[path]
                self._tasks.pop(path).cancel()
        for path in sorted(found - self._peers.keys()):
            peer = SiblingPeer(path, self._windows, self._used, self._page_identity)
            self._peers[path] = peer
            self._tasks[path] = tasks.create_task(peer.run())

    def _send_uses_soon(self) -> None:
        if not self._sends_uses:
            self._sends_uses = True
            asyncio.get_running_loop().call_later(USES_EVERY, self._send_uses)

    def _send_uses(self) -> None:
        self._sends_uses = False
        for peer in self._peers.values():
            peer.send_uses()

    def _find(self) -> tuple[set[Path], dict[Path, str]]:
        """The directories of siblings, and why others are not used. Any thread."""
        found, inaccessible = find_daemons(self._directories)
        unusable = dict.fromkeys(inaccessible, "this user may not read its directory")
        siblings = set[Path]()
        for path in {path.resolve() for path in found} - {self._own.resolve()}:
            with suppress(OSError):
                if (owner := path.stat().st_uid) == os.geteuid():
                    siblings.add(path)
                else:
                    unusable[path] = f"it runs as user {owner}, and this daemon as {os.geteuid()}"
        return siblings, unusable


def check_alive(directory: Path) -> None:
    """Raise Gone if no process listens: ZeroMQ would wait for one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(directory / "fds.sock"))
        except BlockingIOError:  # many others connect
            pass
        except OSError as error:
            text = f"no daemon runs there ({error.strerror})"
            raise Gone(Code.DAEMON_GONE, text, str(directory)) from error
