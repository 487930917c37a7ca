"""The bytes of every message. A change of these bytes is a change of the protocol.

golden.json maps the names below to bytes (hex). To add a message, add an object here and run

    python tests/proto/test_golden.py --write

The command adds the bytes of new names. It never changes existing bytes: if they differ from the
encoded message, remove them from golden.json first. If a message only has a new field at its end,
add its name to EARLIER: the old bytes must still be decoded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from kvferry.proto import codec, fd_passing, memory
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.hints import Release, ReleaseRetained, Retain, Retained
from kvferry.proto.keys import EventKind
from kvferry.proto.lending import BorrowMemory, MemoryLent, Uses
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)

PATH = Path(__file__).with_name("golden.json")
UNIONS: dict[str, tuple[Any, codec.Decoder[Any]]] = {
    "client": (wire.ClientMessage, codec.decode_client_message),
    "daemon": (wire.DaemonMessage, codec.decode_daemon_message),
    "request": (fd_passing.FdRequest, codec.decode_descriptor_request),
    "reply": (fd_passing.FdReply, codec.decode_descriptor_reply),
}

INT32 = np.array([5, 0, 2_147_483_647], dtype=np.int32)
INT64 = np.array([1 << 40, 7], dtype=np.int64)
NONE = np.array([], dtype=np.int64)
ONE_TENSOR = KVLayout((TensorLayout(8, 4096, 4096),), ((TensorRef(0, 4096),),))
TWO_GROUPS = KVLayout(
    (TensorLayout(64, 4096, 8192), TensorLayout(1 << 20, 1000, 1024)),
    ((TensorRef(0, 4096), TensorRef(1, 1000)), (TensorRef(0, 4000),)),
    4,
)
SECTIONS = KVLayout(ONE_TENSOR.tensors * 2, ((TensorRef(0, 4096), TensorRef(1, 4096)),), sections=2)
HANDLE = bytes(range(64))
CUDA = memory.CudaAllocation("GPU-00000000-1111-2222-3333-444444444444", HANDLE, 1 << 34)
FD = memory.FdAllocation(7, 1 << 30)
LOCATIONS = (memory.Location(0, 0), memory.Location(1, 1 << 33))
REGION = memory.HostRegion(2048, 32768, False)
FAILURE = ErrorInfo(Code.COPY_FAILED, "the copy failed", "700")
CPU = proto_status.DeviceInfo("cpu", "cpu", "host memory")
GPU = proto_status.DeviceInfo("cuda", "GPU-00000000-1111-2222-3333-444444444444", "H200", 1 << 28)
COPYING = proto_status.CopyStatus(
    mode="auto",
    contiguous=proto_status.CalibrationPoint(1 << 26, 5.5e10, 5.25e10),
    direct=(
        proto_status.CalibrationPoint(4096, 1e10, 1.5e10),
        proto_status.CalibrationPoint(65536, 5e10, 4e10),
    ),
    direct_from_store=65536,
    direct_from_load=16384,
)
STATUS = proto_status.DaemonStatus(
    version="0.1.0",
    boot_id="0123456789abcdef",
    pid=4711,
    uptime_seconds=12.5,
    device=GPU,
    pool=proto_status.PoolStatus(1 << 30, 1 << 29, 1 << 28),
    sessions=2,
    engines=(
        proto_status.EngineStatus(
            "model-a", True, 2048, 32768, 3, (proto_status.GroupCopying("direct", "staged"),)
        ),
        proto_status.EngineStatus("model-b", False, 1, 4096, 0),
    ),
    totals=proto_status.Totals(5, 4, 1 << 35, 1 << 34, 1, 2),
    errors={"busy": 3, "bad_spec": 1},
    copying=COPYING,
)
NEW_STATUS = proto_status.DaemonStatus(
    "0.1.0", "b", 1, 0.0, CPU, proto_status.PoolStatus(0, 0, 0), 0, (), proto_status.Totals(), {}
)


def status_with(**changes: Any) -> wire.StatusReport:
    return wire.StatusReport(6, msgspec.structs.replace(NEW_STATUS, **changes))


UNHEALTHY = proto_status.HealthStatus(
    healthy=False,
    reasons=("the lane has not moved for 31.2 s",),
    probe_seconds=0.001953125,
    probe_age=42.5,
    oldest_job=33.25,
    held_job=300.0,
    loop_lag=0.0078125,
    worker_lag=31.25,
)
KEY, OTHER = bytes(range(32)) + bytes(4), bytes(range(32, 64)) + bytes(4)
FINGERPRINT = Fingerprint(
    model="model-a",
    host_block_bytes=32768,
    revision="main",
    dtype="bfloat16",
    kv_dtype="fp8",
    kv_layout="NHD",
    block_size=16,
    rank=1,
    world_size=2,
    hash_algorithm="sha256_cbor",
    hash_seed="0",
    key_bytes=36,
    extra=(("lora", "none"),),
)
NAMESPACE = proto_status.NamespaceStatus(
    name="0123456789abcdef",
    fingerprint=FINGERPRINT,
    policy="arc",
    engines=("model-a", "model-b"),
    blocks=1000,
    block_bytes=32768,
    free=1,
    pending=2,
    ready=990,
    unverified=3,
    orphaned=4,
    pinned=5,
    hits=6,
    misses=7,
    stored=8,
    stores_skipped=9,
    evictions=10,
    shortfall="in use",
    saved_tokens=11,
    saved_seconds=0.25,
    hit_rate_half=0.125,
    hit_rate=0.5,
    hit_rate_double=None,
    hit_rate_quadruple=1.0,
)
KEY_EVENTS = wire.KeyEvents(
    7,
    (
        wire.KeyEvent(EventKind.REMOVED, (OTHER,)),
        wire.KeyEvent(EventKind.PENDING, (KEY,)),
        wire.KeyEvent(EventKind.STORED, (KEY, OTHER)),
        wire.KeyEvent(EventKind.ABANDONED, (OTHER,)),
        wire.KeyEvent(EventKind.CLEARED, ()),
    ),
    2,
)

MESSAGES: dict[str, Any] = {
    "client/hello": wire.Hello(1, 1, "vllm worker 0", "model-a"),
    "client/register-fd": wire.RegisterKVCaches(1, TWO_GROUPS, (FD, FD), LOCATIONS, 1 << 30, 3),
    "client/register-sections": wire.RegisterKVCaches(2, SECTIONS, (FD,), LOCATIONS[:1]),
    "client/register-cuda": wire.RegisterKVCaches(2, TWO_GROUPS, (CUDA, CUDA), LOCATIONS),
    "client/allocate": wire.AllocateKVCaches(3, ONE_TENSOR),
    "client/allocate-bounded": wire.AllocateKVCaches(4, TWO_GROUPS, 1 << 40, 0),
    "client/allocate-kept": wire.AllocateKVCaches(5, ONE_TENSOR, 1 << 30, 3, True),
    "client/release": wire.ReleaseKVCaches(11, "model-a"),
    "client/release-host_memory": wire.ReleaseKVCaches(11, "model-a", True),
    "client/submit-store-int32": wire.Submit(
        17, GPULoadStoreSpec(INT32), CPULoadStoreSpec(INT32[:1])
    ),
    "client/submit-load-int64": wire.Submit(
        (1 << 63) - 1, CPULoadStoreSpec(INT64), GPULoadStoreSpec(INT64, (2, 0), (5, 0)), 99
    ),
    "client/submit-empty": wire.Submit(
        0, GPULoadStoreSpec(NONE, (0,), (0,)), CPULoadStoreSpec(NONE)
    ),
    "client/submit-keys": wire.Submit(
        18, GPULoadStoreSpec(INT64), KeyLoadStoreSpec((KEY, OTHER), 3), 5
    ),
    "client/submit-part": wire.Submit(
        20, GPULoadStoreSpec(INT64, (2,), (8,)), KeyLoadStoreSpec((KEY, OTHER), 3, (KEY,)), 5, 1
    ),
    "client/submit-load-section": wire.Submit(
        20, KeyLoadStoreSpec((KEY,)), GPULoadStoreSpec(INT32, (3,), (0,), 1)
    ),
    "client/submit-load-keys": wire.Submit(19, KeyLoadStoreSpec((KEY,)), GPULoadStoreSpec(INT32)),
    "client/open": wire.OpenNamespace(7, FINGERPRINT, 1 << 30, "arc", 2),
    "client/open-small": wire.OpenNamespace(8, Fingerprint("model-b", 4096)),
    "client/subscribe": wire.Subscribe(),
    "client/pin": wire.Pin((KEY, OTHER), 4),
    "client/unpin": wire.Unpin((KEY,)),
    "client/touch": wire.Touch((KEY,), 3, 4, 1, 512, 0.25),
    "client/touch-near-eviction": wire.Touch((KEY, OTHER), by_prompt=False),
    "client/spare": wire.Spare((KEY, OTHER)),
    "client/reset": wire.Reset(9, "weights 2"),
    "client/find_in_tiers": wire.FindInTiers(10, (KEY, OTHER), 0.0125),
    "client/retain": Retain(13, (KEY, OTHER), 300.5, "session-1"),
    "client/retain-engine": Retain(14, (KEY,), 3600.0),
    "client/release_keys": Release((KEY, OTHER), "session-1"),
    "client/release_retained": ReleaseRetained(15, "0123456789abcdef", "session-1"),
    "client/release_retained-all": ReleaseRetained(16, "0123456789abcdef"),
    "client/borrow_memory": BorrowMemory(11, "0123456789abcdef", (1 << 63) - 1),
    "client/borrow_memory-chunks": BorrowMemory(12, "0123456789abcdef", 1 << 62, 64),
    "client/uses": Uses("0123456789abcdef", (KEY, OTHER)),
    "client/namespaces": wire.NamespacesRequest(10),
    "client/cancel": wire.Cancel((1, 2, 1 << 62)),
    "client/cancel-nothing": wire.Cancel(()),
    "client/wait": wire.Wait(5, (17, 18)),
    "client/status": wire.StatusRequest(6),
    "client/goodbye": wire.Goodbye("client closes"),
    "daemon/welcome": wire.Welcome(
        1,
        "0123456789abcdef",
        "s1",
        "0.1.0",
        4711,
        CPU,
        proto_status.Limits(32 << 20, 1 << 20, 8192),
    ),
    "daemon/welcome-credits": wire.Welcome(
        1,
        "0123456789abcdef",
        "s1",
        "0.1.0",
        4711,
        CPU,
        proto_status.Limits(32 << 20, 1 << 20, 12288, 4096, 8192),
    ),
    "daemon/registered": wire.Registered(1, REGION),
    "daemon/registered-again": wire.Registered(1, memory.HostRegion(2048, 32768, True)),
    "daemon/allocated-fd": wire.Allocated(3, REGION, (FD,), LOCATIONS[:1]),
    "daemon/allocated-cuda": wire.Allocated(3, REGION, (CUDA, CUDA), LOCATIONS),
    "daemon/allocated-kept": wire.Allocated(5, REGION, (FD,), LOCATIONS[:1], True),
    "daemon/retained": Retained(13, 2, 1, 1 << 20),
    "daemon/released": wire.Released(11, 1 << 34),
    "daemon/finished": wire.Finished(
        (
            JobResult(17, Direction.STORE, Outcome.DONE, 1 << 32, 0.25),
            JobResult(18, Direction.LOAD, Outcome.FAILED, error=FAILURE),
            JobResult(19, Direction.LOAD, Outcome.CANCELLED),
            JobResult(20, Direction.STORE, Outcome.REFUSED, error=ErrorInfo("busy", "later")),
        )
    ),
    "daemon/finished-nothing": wire.Finished(()),
    "daemon/waited": wire.Waited(5),
    "daemon/status": wire.StatusReport(6, STATUS),
    "daemon/status-new": wire.StatusReport(6, NEW_STATUS),
    "daemon/status-kept": status_with(
        engines=(proto_status.EngineStatus("model-a", False, 1, 4096, 0, (), 1 << 34),),
    ),
    "daemon/status-starting": status_with(
        health=proto_status.HealthStatus(False, ("registering",), starting=True)
    ),
    "daemon/status-health": wire.StatusReport(6, msgspec.structs.replace(STATUS, health=UNHEALTHY)),
    "daemon/status-healthy": status_with(health=proto_status.HealthStatus(True)),
    "daemon/status-verification": status_with(
        verification=proto_status.VerificationStatus(1 << 36, 1 << 35)
    ),
    "daemon/status-tiers": status_with(
        tiers=(
            proto_status.TierStatus(
                "disk", "on", 1, 2, 3, 4, 5, 6, 7, 0.5, 9, 10, 11, 12, 13, 14, 15, 1.5, 2, 3
            ),
            proto_status.TierStatus("memory", "off", read_only="no space", failure="no access"),
        ),
    ),
    "daemon/opened": wire.Opened(
        7,
        "0123456789abcdef",
        1000,
        32768,
        True,
        "arc",
        2,
        ("fedc: kv_dtype: 'fp8' here",),
        3,
        ("disk",),
    ),
    "daemon/opened-stores_once": wire.Opened(
        7, "0123456789abcdef", 1000, 32768, True, "arc", 2, (), 3, ("siblings",), True
    ),
    "daemon/opened-shortfall": wire.Opened(
        7, "0123456789abcdef", 1000, 32768, True, "arc", 2, shortfall="in use"
    ),
    "daemon/done": wire.Done(9, (1 << 62) - 1, ("store",)),
    "daemon/tiers_found": wire.TiersFound(10, 2, 1),
    "daemon/pinned": wire.Pinned(4, 1),
    "daemon/memory_lent": MemoryLent(11),
    "daemon/memory_lent-chunks": MemoryLent(
        12, 1 << 40, 1 << 30, (64 << 30) + 4096, 64, 66, (7, 8), 9, 10, 1000, True, bytes(16)
    ),
    "daemon/status-siblings": status_with(
        siblings=(
            proto_status.SiblingStatus("/run/kvferry/GPU-1", "on", 1, 2, 3, 4),
            proto_status.SiblingStatus("/run/kvferry/GPU-2", "connecting"),
        ),
        lent=5,
    ),
    "daemon/snapshot": wire.Snapshot(6, 0, False, (KEY, OTHER)),
    "daemon/snapshot-last": wire.Snapshot(6, 1, True, (), True, 2),
    "daemon/key_events": KEY_EVENTS,
    "daemon/namespaces": wire.NamespacesReport(10, (NAMESPACE,)),
    "daemon/namespaces-hints": wire.NamespacesReport(
        10,
        (
            msgspec.structs.replace(
                NAMESPACE,
                retained=5,
                hints_accepted=9,
                hints_clipped=2,
                hints_missing=3,
                hints_refused=4,
            ),
        ),
    ),
    "daemon/error": wire.Error(5, FAILURE),
    "daemon/error-to-nothing": wire.Error(None, ErrorInfo("code_of_tomorrow", "what it means")),
    "daemon/goodbye": wire.Goodbye(),
    "request/send_fds": fd_passing.SendFds("s1"),
    "request/fetch_fd": fd_passing.FetchFd("s1", 7),
    "reply/fd_handles": fd_passing.FdHandles((7, 8, 1 << 62)),
    "reply/error": wire.Error(None, ErrorInfo(Code.UNKNOWN_HANDLE, "no such ticket", "9")),
}


# Messages whose bytes lack later fields. Decoding uses the defaults of these fields.
EARLIER_NAMES = {
    "client": """
        allocate allocate-bounded allocate-kept register-cuda register-fd submit-empty
        submit-keys submit-load-int64 submit-load-keys submit-part submit-store-int32
    """,
    "daemon": """
        allocated-cuda allocated-fd namespaces opened status status-health status-healthy
        status-kept status-new status-tiers status-verification welcome
    """,
}
EARLIER = {f"{union}/{name}" for union, names in EARLIER_NAMES.items() for name in names.split()}


def golden() -> dict[str, str]:
    decoded: dict[str, str] = json.loads(PATH.read_text())
    return decoded


def add_missing() -> list[str]:
    """Write the bytes of messages that have none. Returns their names."""
    known = golden()
    now = {name: encode(message).hex() for name, message in MESSAGES.items()}
    now |= {name: known[name] for name in EARLIER & known.keys()}
    changed = [name for name in known if now.get(name) != known[name]]
    if changed:
        raise SystemExit(f"golden bytes never change: see the head of this file ({changed})")
    PATH.write_text(json.dumps(now, indent=1) + "\n")
    return [name for name in now if name not in known]


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_encoded_to_and_decoded_from_golden_bytes(name: str) -> None:
    message, data = MESSAGES[name], bytes.fromhex(golden()[name])
    _, decode = UNIONS[name.partition("/")[0]]
    assert decode(data) == message
    if name not in EARLIER:
        assert encode(message) == data
        assert encode(decode(data)) == data  # also the width of block ids


@pytest.mark.parametrize("union", UNIONS)
def test_every_message_of_a_union_has_golden_bytes(union: str) -> None:
    covered = {type(m) for name, m in MESSAGES.items() if name.startswith(f"{union}/")}
    assert covered == set(get_args(UNIONS[union][0]))


def test_all_golden_bytes_belong_to_a_message() -> None:
    assert golden().keys() == MESSAGES.keys()


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    print("added:", *add_missing())
