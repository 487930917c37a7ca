"""The core, with decoded messages of several hostile clients in any order.

Also hints, namespaces, resets and searches in tiers: everything a session may send. Between two
messages anything that the core has begun may end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fuzz.case import Run, no_log, steps_decoder
from fuzz.codec import golden
from fuzz.served_core import ServedCore
from kvferry.daemon.core.actions import BlocksCorrupted
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_client_message, encode
from kvferry.proto.errors import Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.hints import Release, ReleaseRetained, Retain
from kvferry.proto.lending import BorrowMemory, Uses
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)

SESSIONS = ENGINES = 3
MAX_STEPS = 64
OUTCOMES = Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED


class Received(msgspec.Struct, array_like=True, tag=0):
    """A session receives a message, and is opened before."""

    session: int
    data: msgspec.Raw


class Ended(msgspec.Struct, array_like=True, tag=1):
    """Something that the core has begun ends. kind: of ServedCore; at: which one; how: it ends."""

    kind: int
    at: int = 0
    how: int = 0


class Disconnected(msgspec.Struct, array_like=True, tag=2):
    session: int


class Advanced(msgspec.Struct, array_like=True, tag=3):
    """Time passes."""


class Corrupted(msgspec.Struct, array_like=True, tag=4):
    """A block of a region is corrupt."""

    region: int
    block: int


Step: TypeAlias = Received | Ended | Disconnected | Advanced | Corrupted
decode_steps = steps_decoder(Step)

PAGE = 1024
ROW = TensorLayout(16, PAGE, PAGE)
LAYOUT = KVLayout((ROW,), ((TensorRef(0, PAGE),),))
HYBRID = KVLayout((ROW, ROW), ((TensorRef(0, PAGE),), (TensorRef(1, PAGE // 2),)), 3)
FINGERPRINT = Fingerprint("llama", PAGE, key_bytes=1)
HYBRID_FINGERPRINT = Fingerprint("gemma", 3 * PAGE, key_bytes=1)
KEYS = tuple(bytes([number]) for number in b"abcdef")


def seeds() -> list[bytes]:
    gpu, cpu, by_key = GPULoadStoreSpec, CPULoadStoreSpec, KeyLoadStoreSpec
    raw: list[Any] = [
        wire.AllocateKVCaches(1, LAYOUT, 8 * PAGE, 7, True),
        Ended(0),
        wire.Submit(1, gpu([0, 1, 2]), cpu([3, 4, 5]), 5),
        wire.Submit(2, cpu([3, 4]), gpu([5, 6])),
        wire.Cancel((1,)),
        wire.Wait(2, (1, 2)),
        Ended(1),
        Ended(1, 0, 2),
        wire.StatusRequest(3),
        wire.NamespacesRequest(4),
        wire.ReleaseKVCaches(5, "e0", True),
    ]
    keyed: list[Any] = [
        wire.OpenNamespace(1, FINGERPRINT, 4 * PAGE, "arc", 2),
        wire.RegisterKVCaches(2, LAYOUT, (FdAllocation(1, 16 * PAGE),), (Location(0, 0),)),
        Ended(0),
        wire.Subscribe(),
        wire.Submit(1, gpu([0, 1, 2, 3]), by_key(KEYS[:4])),
        Ended(1),
        wire.Submit(2, by_key(KEYS[:2]), gpu([4, 5])),
        wire.Pin(KEYS[:2]),
        wire.Touch(KEYS, 1, 2, 3, 4, 0.5),
        wire.Unpin(KEYS[:1]),
        wire.Spare(KEYS[2:]),
        Retain(3, KEYS[:1], 5.0, "user"),
        wire.Submit(3, gpu([6, 7]), by_key(KEYS[4:], 0, KEYS[:1])),
        Release(KEYS, "user"),
        ReleaseRetained(4, FINGERPRINT.name),
        Corrupted(0, 1),
        wire.Reset(5, "weights"),
        BorrowMemory(6, FINGERPRINT.name, 1),
        Uses(FINGERPRINT.name, KEYS),
    ]
    tiered: list[Any] = [
        wire.OpenNamespace(1, HYBRID_FINGERPRINT, None, "s3fifo"),
        wire.AllocateKVCaches(2, HYBRID),
        Ended(0),
        wire.Submit(1, gpu([0, 1, 2, 3], (3, 1), (0, 2)), by_key(KEYS[:2])),
        Ended(1),
        Ended(6),
        Ended(7),
        wire.FindInTiers(3, KEYS, 0.5),
        Ended(3, 0, 1),
        Ended(4),
        Ended(5),
        wire.Subscribe(),
        wire.Reset(4),
        wire.Reset(14),
        wire.Reset(15),
        Ended(9),
        Ended(8),
        Advanced(),
        wire.FindInTiers(5, KEYS),
        Disconnected(0),
        Advanced(),
    ]
    cases = [_case(steps) for steps in (raw, keyed, tiered)]
    cases += [_case([*opening, *others]) for opening, others in _golden_sequences(keyed[:3])]
    return cases


def _golden_sequences(opened: Sequence[Any]) -> Iterator[tuple[Sequence[Any], list[Any]]]:
    """All golden messages of clients, in parts, without and with a namespace."""
    messages = [msgspec.Raw(data) for name, data in golden().items() if name.startswith("client/")]
    for at in range(0, len(messages), 12):
        yield [], messages[at : at + 12]
        yield opened, messages[at : at + 12]


def _case(steps: Sequence[Any]) -> bytes:
    """The messages of two sessions, one after the other."""
    case = list[Step]()
    for session in range(2):
        for step in steps:
            if isinstance(step, Step):
                case.append(step)
            else:
                is_raw = isinstance(step, msgspec.Raw)
                data = step if is_raw else msgspec.Raw(encode(step))
                case.append(Received(session, data))
    return msgspec.msgpack.encode(case[:MAX_STEPS])


def check_sequence(data: bytes) -> None:
    served = ServedCore()
    for step in decode_steps(data)[:MAX_STEPS]:
        match step:
            case Received(number, raw):
                session = f"s{number % SESSIONS}"
                served.connect(session, f"e{number % SESSIONS % (ENGINES - 1)}")
                try:
                    message = decode_client_message(bytes(raw))
                except Refused:
                    continue
                served.receive(session, message)
            case Ended(kind, at, how):
                _end(served, kind, at, how)
            case Disconnected(number):
                served.disconnect(f"s{number % SESSIONS}")
            case Advanced():
                served.advance()
            case Corrupted(number, block):
                regions = [region for _, region in served.records.regions.values()]
                if regions:
                    region = regions[number % len(regions)]
                    blocks = np.array([block % region.num_blocks])
                    served.report(BlocksCorrupted(region.owner, blocks))
    served.finish()


def _end(served: ServedCore, kind: int, at: int, how: int) -> None:
    begun: Any = (
        served.mapping,
        served.plans,
        served.unmapping,
        served.searches,
        served.fetches,
        served.held_fetches,
        [()],
        served.writes,
        [()],
        served.syncs,
    )[kind % 10]
    if not begun:
        return
    number, works = at % len(begun), how % 2 == 0
    match kind % 10:
        case 0:
            served.end_mapping(number, works=works)
        case 1:
            served.end_transfer(number, OUTCOMES[how % 3])
        case 2:
            served.end_unmapping(number)
        case 3:
            served.end_search(number, how)
        case 4:
            served.end_fetch(number, works=works)
        case 5:
            served.release_fetch(number)
        case 6:
            served.write_out(at)
        case 7:
            served.end_write(number, works=works)
        case 8:
            served.settle()
        case _:
            served.end_sync(number)


@contextmanager
def open_core() -> Iterator[Run]:
    with no_log():
        yield check_sequence
