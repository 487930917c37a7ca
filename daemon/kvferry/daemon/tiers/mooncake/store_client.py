"""Calls of the Mooncake Store client library, with its codes and its limits on time.

The library blocks. Its limits are set by environment variables, which it reads when it connects;
an operator may set others. Any thread.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from kvferry.daemon.tiers.base import HostMemory
from kvferry.proto.errors import Code, Refused
from kvferry.proto.sizes import format_size
from kvferry.proto.version import installed_version

OLDEST = "0.3.13"
# Names under which the library is published, for different versions of CUDA and for none.
DISTRIBUTIONS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
# How to install the libraries of the system that it needs.
INSTALL_LIBRARIES = "on Debian or Ubuntu: apt-get install libcurl4 libibverbs1 libnuma1"
# Methods that older versions lack.
NEEDED = ("batch_get_into_multi_buffers", "batch_put_from_multi_buffers", "batch_remove")
# Codes of the library.
NO_SPACE, TOO_LARGE, NOT_FOUND, TRANSFER_FAILED = -200, -600, -704, -800
# The master is dead, or has not answered in time.
NO_ANSWER = frozenset({-900, -901})
# The object is being written, is being evicted, was evicted during the transfer, or has lost its
# replicas.
UNREADABLE = frozenset({-703, NOT_FOUND, -707, -710, -712})
# Seconds to connect to the master, and to set the client up.
CONNECT_SECONDS, SETUP_SECONDS = 2.0, 10.0
# Limits of the library. An RPC ends before the daemon kills the process because of a late lookup.
ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
}


class StoreError(OSError):
    """The store, or the way to it, has failed."""

    @classmethod
    def of_call(cls, what: str, code: int) -> StoreError:
        """what: could not be done. code: of the library."""
        return cls(f"{what}: {explain(code)}")


def explain(code: int) -> str:
    """Advice for an operator about a code of the library."""
    if code in NO_ANSWER:
        return "the master does not answer; check that mooncake_master runs"
    if code == NO_SPACE:
        return "the store has no room; start more store processes, or give them more memory"
    return f"error {code}; see the logs of mooncake_master and the stores"


class StoreClient:
    """A client of one store, to which memory is registered.

    Addresses given to `put` and `get` are in the host pool, or in memory that was registered. An
    object is made of the buffers given for it, one after the other.

    master, protocol, device, host: as in the configuration.
    """

    def __init__(
        self,
        memory: HostMemory,
        master: str,
        protocol: str = "tcp",
        device: str = "",
        host: str = "",
    ) -> None:
        """Raises Refused (BAD_CONFIG), and StoreError if the master cannot be reached."""
        # The library reads the level of its log when it is imported.
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        library = _import_library()
        host = host or _own_address(master)
        self._pinned = library.ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._store = library.MooncakeDistributedStore()
        self._set_up(host, master, protocol, device)
        self.register(memory.address, memory.nbytes)

    def register(self, address: int, nbytes: int) -> None:
        """Register memory that blocks are moved from and to. Raises StoreError."""
        code = self._store.register_buffer(address, nbytes)
        if code:
            message = f"{format_size(nbytes)} cannot be registered with the store: error {code}"
            raise StoreError(f"{message}; with RDMA, raise the limit of locked memory")

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which objects can be read. Raises StoreError."""
        codes = self._store.batch_is_exist(names)
        if (worst := min(codes, default=0)) < 0:
            raise StoreError.of_call("the store cannot be asked for keys", worst)
        return [code == 1 for code in codes]

    def put(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Put objects: 0, also if it exists, or a code for each."""
        codes: list[int] = self._store.batch_put_from_multi_buffers(names, addresses, sizes)
        return codes

    def put_pinned(self, name: str, address: int, nbytes: int) -> int:
        """Put an object that is not evicted: 0, also if it exists, or a code."""
        return int(self._store.batch_put_from([name], [address], [nbytes], self._pinned)[0])

    def get(
        self,
        names: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Get objects: the bytes that were read, or a code for each."""
        codes: list[int] = self._store.batch_get_into_multi_buffers(names, addresses, sizes)
        return codes

    def size(self, name: str) -> int:
        """The bytes of an object, or a code."""
        return int(self._store.get_size(name))

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those in use. Raises StoreError if one may still exist."""
        codes = self._store.batch_remove(names, True)
        failed = [code for code in codes if code not in (0, NOT_FOUND)]
        if failed:
            raise StoreError.of_call(f"{len(failed)} keys cannot be removed", failed[0])

    def remove_matching(self, pattern: str) -> int:
        """Remove the objects whose names match, also those in use; how many, or a code."""
        return int(self._store.remove_by_regex(pattern, True))

    def _set_up(self, host: str, master: str, protocol: str, device: str) -> None:
        """On a thread of its own: if the master does not answer, it takes for ever."""
        codes: list[int] = []

        def set_up() -> None:
            arguments = (host, "P2PHANDSHAKE", 0, 0, protocol, device, master)
            codes.append(self._store.setup(*arguments))

        thread = threading.Thread(target=set_up, daemon=True)
        thread.start()
        thread.join(SETUP_SECONDS)
        if codes != [0]:
            why = f"error {codes[0]}" if codes else f"no answer within {SETUP_SECONDS:.0f} s"
            raise StoreError(
                f"the Mooncake client cannot be set up ({why}) with master {master!r}, "
                f"protocol {protocol!r}, device {device!r} and host {host!r}; "
                "correct [tiers.mooncake], or start mooncake_master"
            )


def _import_library() -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        message = f"Mooncake cannot be imported: {error}; {_how_to_install()}"
        raise Refused(Code.BAD_CONFIG, message, str(error)) from error
    library: Any = store
    if not all(hasattr(library.MooncakeDistributedStore, name) for name in NEEDED) or not hasattr(
        library.ReplicateConfig, "with_hard_pin"
    ):
        version = _installed_version()
        message = f"mooncake-transfer-engine {version} is too old; install {OLDEST} or newer"
        raise Refused(Code.BAD_CONFIG, message, version)
    return library


def _how_to_install() -> str:
    match list(_installed()):
        case []:
            return "pip install '.[mooncake]' in a checkout of kvferry"
        case [name]:
            needed = f"install the libraries that {name} needs ({INSTALL_LIBRARIES})"
            return f"{needed}, or another build of it"
        case names:
            return f"uninstall {' and '.join(names)}, which share files, then install one of them"


def _installed_version() -> str:
    return next(iter(_installed().values()), "(unknown version)")


def _installed() -> dict[str, str]:
    """The builds that are installed, and their versions."""
    found = ((name, installed_version(name)) for name in DISTRIBUTIONS)
    return {name: version for name, version in found if version is not None}


def _own_address(master: str) -> str:
    """The address of this host from which the master is reached. Raises StoreError."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        message = f"tiers.mooncake.master is {master!r}; give HOST:PORT of mooncake_master"
        raise Refused(Code.BAD_CONFIG, message, master)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as peer:
            return str(peer.getsockname()[0])
    except OSError as error:
        raise StoreError(
            f"the Mooncake master {master} cannot be reached: {error}; start mooncake_master "
            "there, or correct tiers.mooncake.master"
        ) from error
