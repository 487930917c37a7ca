"""The client for schedulers and workers that do not run on asyncio.

Submitting and polling never wait and need no thread. Calls that wait take a timeout. A client is
used by one thread at a time, in the process that created it; a forked child creates its own.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from kvferry.client import operations, registering
from kvferry.client.link import ClientLink
from kvferry.client.nonblocking import ClientOptions, DaemonDirectory, NonBlockingClient

P = ParamSpec("P")
R = TypeVar("R")


def blocking(
    operation: Callable[Concatenate[NonBlockingClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[NonBlockingClient, P], R]:
    """The operation as a method that waits. It never suspends, because ClientLink.pause blocks."""

    @wraps(operation)
    def run(self: NonBlockingClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            operation(self, *args, **kwargs).send(None)
        except StopIteration as end:
            result: R = end.value
            return result
        raise AssertionError(f"{operation.__name__} suspended in a client that blocks")

    return run


class OffloadClient(NonBlockingClient):
    """A session with the daemon in `directory` (default: the only daemon of this machine).

    directory: the runtime directory of the daemon, or a directory that contains only that; also a
        function that returns it, which is called at each attempt to connect.
    options: ClientOptions (engine, client, timeout, reconnect, state).
    While the client reconnects, every call that polls advances that; only calls that need a reply
    wait for it, within their timeout.
    Raises Gone (TIMEOUT, DAEMON_GONE) if no daemon replies, Refused (BAD_CONFIG) if there cannot be
    one, and the error with which the daemon refuses.
    """

    def __init__(self, directory: DaemonDirectory = None, **options: Unpack[ClientOptions]) -> None:
        super().__init__(ClientLink, directory, **options)
        if options.get("state") is None:
            self._connect()

    _connect = blocking(operations.connect_first)
    wait_connected = blocking(operations.wait_connected)
    open_namespace = blocking(operations.open_namespace)
    reset = blocking(operations.reset)
    hold = blocking(operations.hold)
    register_kv_caches = blocking(registering.register_kv_caches)
    allocate_kv_caches = blocking(registering.allocate_kv_caches)
    release_kv_caches = blocking(operations.release_kv_caches)
    release_retained = blocking(operations.release_retained)
    wait = blocking(operations.wait)
    status = blocking(operations.status)
    namespaces = blocking(operations.namespaces)
    close = blocking(operations.close)

    def __enter__(self) -> OffloadClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
