"""Every error code, provoked once: its message states the value and ends with what to change."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.client.cli import status as cli_status
from kvferry.client.tensors import device
from kvferry.cuda.driver import Driver
from kvferry.cuda.virtual_memory import VirtualMemory
from kvferry.daemon import config_reader
from kvferry.daemon.access.admission import Admission, Credentials
from kvferry.daemon.access.runtime_directory import Endpoint
from kvferry.daemon.core.actions import (
    BlocksCorrupted,
)
from kvferry.daemon.core.records import engine_owner
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.observability.probe import Probe
from kvferry.proto import messages as wire
from kvferry.proto.codec import MAX_MESSAGE_BYTES, decode_client_message
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError, error_of
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.memory import FdAllocation, HostRegion, Location
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorRef,
)
from kvferry.shm.memfd import check_sealed
from support.core_fixture import MAX_JOBS
from support.raw_client import RawClient
from support.single_core import LAYOUT, PAGE, SingleCore, sent_error

# The last clause of a message: what to do, in the imperative.
ADVICE = re.compile(
    r"; (add|check|complete|connect|correct|create|export|give|install|load|look|make|name|open|"
    r"pass|poll|raise|register|remove|request|run|seal|see|send|set|split|start|stop|store|submit|"
    r"treat|try|unpin|use|wait|write)\b[^;]+$"
)


def bad_message(_: pytest.FixtureRequest) -> ErrorInfo:
    return raised(lambda: decode_client_message(b"\xc1\x00"))


def message_too_large(_: pytest.FixtureRequest) -> ErrorInfo:
    return raised(lambda: decode_client_message(bytes(MAX_MESSAGE_BYTES + 1)))


def protocol_version(_: pytest.FixtureRequest) -> ErrorInfo:
    hello = wire.Hello(77, 99, "test", "engine")
    return sent_error(SingleCore().core.open_session("t", hello))


def no_session(request: pytest.FixtureRequest) -> ErrorInfo:
    with RawClient(request.getfixturevalue("kvferryd").directory) as raw:
        return raw.ask(wire.StatusRequest(1), wire.Error).error


def unknown_handle(request: pytest.FixtureRequest) -> ErrorInfo:
    with RawClient(request.getfixturevalue("kvferryd").directory, "engine") as raw:
        memory = (FdAllocation(17, 8 * PAGE),), (Location(0, 0),)
        return raw.ask(wire.RegisterKVCaches(1, LAYOUT, *memory, PAGE), wire.Error).error


def not_registered(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore(registered=False).store([0], [0]))


def already_registered(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore().ask(wire.AllocateKVCaches(2, LAYOUT, PAGE)))


def bad_layout(_: pytest.FixtureRequest) -> ErrorInfo:
    memory = (FdAllocation(1, 4096),), (Location(0, 0),)
    message = wire.RegisterKVCaches(1, LAYOUT, *memory, PAGE)
    return sent_error(SingleCore(registered=False).ask(message))


def unknown_tensor(_: pytest.FixtureRequest) -> ErrorInfo:
    layout = KVLayout(LAYOUT.tensors, ((TensorRef(5, PAGE),),))
    message = wire.AllocateKVCaches(1, layout, PAGE)
    return sent_error(SingleCore(registered=False).ask(message))


def unknown_group(_: pytest.FixtureRequest) -> ErrorInfo:
    gpu = GPULoadStoreSpec([0, 1], (1, 1), (0, 0))
    return sent_error(SingleCore().submit(gpu, CPULoadStoreSpec([0, 1])))


def bad_spec(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore().submit(GPULoadStoreSpec([0]), GPULoadStoreSpec([1])))


def size_mismatch(_: pytest.FixtureRequest) -> ErrorInfo:
    gpu = GPULoadStoreSpec([0, 1, 2], (2,), (0,))
    return sent_error(SingleCore().submit(gpu, CPULoadStoreSpec([0, 1])))


def block_out_of_range(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore().store([0], [99]))


def duplicate_block(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore().store([0, 1], [3, 3]))


def duplicate_job(_: pytest.FixtureRequest) -> ErrorInfo:
    fixture = SingleCore()
    fixture.store([0], [0])
    return sent_error(fixture.store([1], [1]))


def no_timeline(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore().store([0], [0], wait_for=12))


def not_shareable(_: pytest.FixtureRequest) -> ErrorInfo:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        return raised(lambda: check_sealed(descriptor, "the timeline page"))
    finally:
        os.close(descriptor)


def device_mismatch(request: pytest.FixtureRequest) -> ErrorInfo:
    driver = SimpleNamespace(device_count=lambda: 1, device_uuid=lambda _: "GPU-here")
    request.getfixturevalue("monkeypatch").setattr(device, "driver", lambda: driver)
    return raised(lambda: device.device_ordinal("GPU-there"))


def pool_full(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore(registered=False).ask(wire.AllocateKVCaches(1, LAYOUT, 1 << 20)))


def unknown_namespace(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore().ask(wire.Touch((b"a",))))


def namespace_mismatch(_: pytest.FixtureRequest) -> ErrorInfo:
    other = Fingerprint("qwen", PAGE, key_bytes=1)
    return sent_error(SingleCore(namespace=True).ask(wire.OpenNamespace(2, other, PAGE)))


def bad_key(_: pytest.FixtureRequest) -> ErrorInfo:
    host = KeyLoadStoreSpec((b"long",))
    return sent_error(SingleCore(namespace=True).submit(GPULoadStoreSpec([0]), host))


def key_absent(_: pytest.FixtureRequest) -> ErrorInfo:
    host = KeyLoadStoreSpec((b"a",))
    return sent_error(SingleCore(namespace=True).submit(host, GPULoadStoreSpec([0])))


def not_pinned(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore(namespace=True).ask(wire.Unpin((b"a",))))


def cache_full(_: pytest.FixtureRequest) -> ErrorInfo:
    host = KeyLoadStoreSpec((b"a", b"b", b"c", b"d", b"e"))
    return sent_error(SingleCore(namespace=True).submit(GPULoadStoreSpec(range(5)), host))


def stale(_: pytest.FixtureRequest) -> ErrorInfo:
    return sent_error(SingleCore().load([2], [0]))


def busy(_: pytest.FixtureRequest) -> ErrorInfo:
    fixture = SingleCore()
    for job_id in range(MAX_JOBS):
        fixture.store([job_id], [job_id], job_id)
    return sent_error(fixture.store([3], [3], MAX_JOBS))


def forbidden(_: pytest.FixtureRequest) -> ErrorInfo:
    return raised(lambda: Admission("").check_process(Credentials(61001, 61001, 4711)))


def several_daemons(request: pytest.FixtureRequest) -> ErrorInfo:
    parent: Path = request.getfixturevalue("short_path")
    with ExitStack() as bound:
        for name in ("GPU-1", "GPU-2"):
            (parent / name).mkdir()
            socket_ = bound.enter_context(socket.socket(socket.AF_UNIX))
            socket_.bind(str(parent / name / "kvferry.sock"))
        return raised(lambda: cli_status.locate_daemon(parent))


def bad_config(_: pytest.FixtureRequest) -> ErrorInfo:
    return raised(lambda: config_reader.read(["--copy-staging", "much"]))


def no_device(request: pytest.FixtureRequest) -> ErrorInfo:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    request.getfixturevalue("monkeypatch").setattr(ctypes, "CDLL", missing)
    return raised(Driver)


def endpoint_in_use(request: pytest.FixtureRequest) -> ErrorInfo:
    directory: Path = request.getfixturevalue("short_path") / "cpu"
    with closing(Endpoint(directory, Admission())):
        return raised(lambda: Endpoint(directory, Admission()))


def pool_too_large(_: pytest.FixtureRequest) -> ErrorInfo:
    return raised(lambda: HostPool(1 << 50, 1 << 30))


def copy_failed(_: pytest.FixtureRequest) -> ErrorInfo:
    """A device that reports completed copies and copies nothing."""
    memory = ctypes.create_string_buffer(8192)

    def reply(message: wire.ClientMessage) -> None:
        match message:
            case wire.AllocateKVCaches():
                probe.receive_reply(wire.Allocated(0, HostRegion(2, 4096, False), (), ()))
            case wire.Submit(job_id):
                result = JobResult(job_id, Direction.LOAD, Outcome.DONE, 4096)
                probe.receive_reply(wire.Finished((result,)))

    async def round_trip() -> None:
        await probe.run_round()

    probe = Probe(reply, ctypes.addressof(memory))
    return raised(lambda: asyncio.run(round_trip()))


def failing_driver(request: pytest.FixtureRequest, failing: str) -> Driver:
    """A driver of which one function returns 2, and the others succeed."""

    class Library:
        def __getattr__(self, name: str) -> Callable[..., int]:
            def function(*arguments: Any) -> int:
                if name == "cuGetErrorString":
                    arguments[1]._obj.value = b"out of memory"
                if name == "cuMemGetAllocationPropertiesFromHandle":
                    arguments[0]._obj.location.type = 1
                return 2 if name == failing else 0

            return function

    for loader in ("CDLL", "PyDLL"):
        request.getfixturevalue("monkeypatch").setattr(ctypes, loader, lambda _: Library())
    return Driver()


def map_failed(request: pytest.FixtureRequest) -> ErrorInfo:
    memory = VirtualMemory(failing_driver(request, "cuMemMap"), 0)
    return raised(lambda: memory.import_memory(0, 1 << 21))


def driver_(request: pytest.FixtureRequest) -> ErrorInfo:
    driver = failing_driver(request, "cuMemAlloc_v2")
    return raised(lambda: driver.allocate(4096))


def corrupt_block(_: pytest.FixtureRequest) -> ErrorInfo:
    fixture = SingleCore()
    fixture.end(fixture.store([0], [3]))
    started = fixture.load([3], [1])
    fixture.core.report(BlocksCorrupted(engine_owner("engine"), np.array([3])))
    return sent_error(fixture.end(started))


def cancelled(_: pytest.FixtureRequest) -> ErrorInfo:
    fixture = SingleCore()
    return sent_error(fixture.end(fixture.store([0], [0], job_id=41), Outcome.CANCELLED))


def timeout(request: pytest.FixtureRequest) -> ErrorInfo:
    """A process that listens and never replies."""
    directory: Path = request.getfixturevalue("short_path")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(directory / "kvferry.sock"))
        listening.listen()
        return raised(lambda: cli_status.fetch_status(directory, timeout=0.1))


def engine_gone(_: pytest.FixtureRequest) -> ErrorInfo:
    """The scheduler's job, when the worker that registered the tensors disconnects."""
    fixture = SingleCore()
    fixture.core.open_session("t", make_hello("test", "engine"))
    spec = GPULoadStoreSpec([0]), CPULoadStoreSpec([0])
    started = fixture.ask(wire.Submit(1, *spec), "t")
    fixture.core.close_session("s")
    return sent_error(fixture.end(started, Outcome.CANCELLED))


def daemon_gone(request: pytest.FixtureRequest) -> ErrorInfo:
    return raised(lambda: cli_status.locate_daemon(request.getfixturevalue("tmp_path")))


def shutting_down(_: pytest.FixtureRequest) -> ErrorInfo:
    fixture = SingleCore()
    fixture.core.stop()
    return sent_error(fixture.store([0], [0]))


def raised(provoke: Callable[[], object]) -> ErrorInfo:
    with pytest.raises(KVFerryError) as caught:
        provoke()
    return caught.value.info


CASES = {
    Code.BAD_MESSAGE: bad_message,
    Code.MESSAGE_TOO_LARGE: message_too_large,
    Code.PROTOCOL_VERSION: protocol_version,
    Code.NO_SESSION: no_session,
    Code.NOT_REGISTERED: not_registered,
    Code.ALREADY_REGISTERED: already_registered,
    Code.BAD_LAYOUT: bad_layout,
    Code.UNKNOWN_TENSOR: unknown_tensor,
    Code.UNKNOWN_GROUP: unknown_group,
    Code.UNKNOWN_HANDLE: unknown_handle,
    Code.BAD_SPEC: bad_spec,
    Code.SIZE_MISMATCH: size_mismatch,
    Code.BLOCK_OUT_OF_RANGE: block_out_of_range,
    Code.DUPLICATE_BLOCK: duplicate_block,
    Code.DUPLICATE_JOB: duplicate_job,
    Code.NO_TIMELINE: no_timeline,
    Code.NOT_SHAREABLE: not_shareable,
    Code.DEVICE_MISMATCH: device_mismatch,
    Code.POOL_FULL: pool_full,
    Code.UNKNOWN_NAMESPACE: unknown_namespace,
    Code.NAMESPACE_MISMATCH: namespace_mismatch,
    Code.BAD_KEY: bad_key,
    Code.KEY_ABSENT: key_absent,
    Code.NOT_PINNED: not_pinned,
    Code.CACHE_FULL: cache_full,
    Code.STALE: stale,
    Code.BUSY: busy,
    Code.FORBIDDEN: forbidden,
    Code.SEVERAL_DAEMONS: several_daemons,
    Code.BAD_CONFIG: bad_config,
    Code.NO_DEVICE: no_device,
    Code.ENDPOINT_IN_USE: endpoint_in_use,
    Code.POOL_TOO_LARGE: pool_too_large,
    Code.COPY_FAILED: copy_failed,
    Code.MAP_FAILED: map_failed,
    Code.DRIVER: driver_,
    Code.CORRUPT_BLOCK: corrupt_block,
    Code.CANCELLED: cancelled,
    Code.TIMEOUT: timeout,
    Code.ENGINE_GONE: engine_gone,
    Code.DAEMON_GONE: daemon_gone,
    Code.SHUTTING_DOWN: shutting_down,
}


@pytest.mark.parametrize("code", Code)
def test_an_error_states_its_value_and_ends_with_advice(
    code: Code, request: pytest.FixtureRequest
) -> None:
    error = CASES[code](request)
    assert error.code == code
    assert error.value, error.message
    assert error.value in error.message
    assert ADVICE.search(error.message), error.message
    assert str(error_of(error)) == f"[{code}] {error.message}"
