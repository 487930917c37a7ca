"""A core with one session, and the error that it sends."""

from __future__ import annotations

from typing import Any

from kvferry.daemon.core.actions import (
    SendMessage,
    StartTransfer,
    TensorsMapped,
    TransferCompleted,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from support.core_fixture import new_core

PAGE = 1024
LAYOUT = KVLayout((TensorLayout(8, PAGE, PAGE),), ((TensorRef(0, PAGE),),))
FINGERPRINT = Fingerprint("llama", PAGE, key_bytes=1)


class SingleCore:
    """A core with a session "s" of engine "engine"; its KV caches have 8 GPU and 4 host blocks."""

    def __init__(self, *, registered: bool = True, namespace: bool = False) -> None:
        self.core = new_core(64 * PAGE)
        self.core.open_session("s", make_hello("test", "engine"))
        if namespace:
            self.ask(wire.OpenNamespace(1, FINGERPRINT, 4 * PAGE))
        if registered:
            host_bytes = None if namespace else 4 * PAGE
            self.ask(wire.AllocateKVCaches(1, LAYOUT, host_bytes))
            self.core.report(TensorsMapped(1, "s"))

    def ask(self, message: wire.ClientMessage, session: str = "s") -> list[Any]:
        return self.core.handle(session, message, now=101.0)

    def submit(self, src: Any, dst: Any, job_id: int = 7, wait_for: int = 0) -> list[Any]:
        return self.ask(wire.Submit(job_id, src, dst, wait_for))

    def store(self, gpu: list[int], host: list[int], job_id: int = 7, wait_for: int = 0) -> Any:
        return self.submit(GPULoadStoreSpec(gpu), CPULoadStoreSpec(host), job_id, wait_for)

    def load(self, host: list[int], gpu: list[int], job_id: int = 8) -> list[Any]:
        return self.submit(CPULoadStoreSpec(host), GPULoadStoreSpec(gpu), job_id)

    def end(self, started: list[Any], outcome: Outcome = Outcome.DONE) -> list[Any]:
        (serial,) = [action.plan.serial for action in started if isinstance(action, StartTransfer)]
        return self.core.report(TransferCompleted(serial, outcome))


def sent_error(actions: list[Any]) -> ErrorInfo:
    """The only error that these actions send to a client."""
    found: list[ErrorInfo] = []
    for message in [action.message for action in actions if isinstance(action, SendMessage)]:
        if isinstance(message, wire.Error):
            found.append(message.error)
        if isinstance(message, wire.Finished):
            found += [result.error for result in message.results if result.error is not None]
    (error,) = found
    return error
