"""The client of a daemon, with messages of a hostile one: siblings are such daemons.

A message is handled, or raises a typed error. Jobs end at most once, and the mirror stays usable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from fuzz.case import Run, case_decoder
from fuzz.codec import golden
from kvferry.client.session import ClientSession
from kvferry.proto import messages as wire
from kvferry.proto.codec import encode
from kvferry.proto.errors import KVFerryError
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import EventKind
from kvferry.proto.lending import BorrowMemory
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction
from support.client_session import KEYED_LOAD, KEYED_STORE, LOAD, STORE, WELCOME, submit

KEYS = b"a", b"b", b"c"
OPENING = wire.OpenNamespace(1, Fingerprint("llama", 4096, key_bytes=1))
OPENED = wire.Opened(1, OPENING.fingerprint.name, 4, 4096, False, "lru", 1)
MAX_MESSAGES, PENDING = 64, range(1, 9)


class ReplyCase(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """in_namespace: whether the client has one; a sibling's has not."""

    in_namespace: bool
    messages: tuple[msgspec.Raw, ...]


decode_case = case_decoder(ReplyCase)


def seeds() -> list[bytes]:
    daemons = [msgspec.Raw(data) for name, data in golden().items() if name.startswith("daemon/")]
    done = [JobResult(n, Direction.STORE, Outcome.DONE, 4096, 0.5) for n in range(3)]
    honest: list[wire.DaemonMessage] = [
        wire.Snapshot(0, 0, False, KEYS[:1]),
        wire.Snapshot(0, 1, True, KEYS[1:], True),
        wire.KeyEvents(1, (wire.KeyEvent(EventKind.STORED, KEYS),)),
        wire.KeyEvents(3, (wire.KeyEvent(EventKind.REMOVED, KEYS[:1]),)),
        wire.KeyEvents(4, (wire.KeyEvent(EventKind.CLEARED, ()),), 7),
        wire.Finished((*done, done[0])),
        wire.TiersFound(2, 2, 1),
        wire.Done(3, 7),
        OPENED,
    ]
    cases = [ReplyCase(True, tuple(msgspec.Raw(encode(each)) for each in honest))]
    for at in range(0, len(daemons), 8):
        cases += [ReplyCase(inside, tuple(daemons[at : at + 8])) for inside in (False, True)]
    return [msgspec.msgpack.encode(case) for case in cases]


def check_replies(data: bytes) -> None:
    case = decode_case(data)
    session = ClientSession("engine", "client", reconnects=case.in_namespace)
    session.wire.socket_opened()
    session.receive_message(encode(WELCOME))
    session.mark_connected()
    if case.in_namespace:
        session.opened.daemon_opened(OPENING, OPENED)
        session.namespace.ensure_mirror()
        submit(session, 0, KEYED_STORE)
        submit(session, 1, KEYED_LOAD)
        with suppress(KVFerryError):
            session.opened.reset("weights")
    else:
        submit(session, 0, STORE)
        submit(session, 1, LOAD)
    with ExitStack() as waiting:
        for number in PENDING:
            request = BorrowMemory(number, "n", 1)
            waiting.enter_context(session.wire.pending.expect_reply(request))
        for raw in case.messages[:MAX_MESSAGES]:
            with suppress(KVFerryError):
                session.receive_message(bytes(raw))
            for key in KEYS if case.in_namespace else ():
                session.namespace.lookup(key, 1.0)
            for number in PENDING:
                with suppress(KVFerryError):
                    session.wire.pending.reply(number)
    ended = [result.job_id for result in session.jobs.take_results()]
    assert len(ended) == len({*ended}) <= 2


@contextmanager
def open_replies() -> Iterator[Run]:
    yield check_replies
