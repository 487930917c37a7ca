"""What a client knows, without a socket: the same for the blocking and the asyncio client.

`Conversation` makes the messages to send and is fed those that arrive. It keeps the jobs under
way, their results until they are fetched, replies until they are asked for, and what it knows of
the namespace that it opened. It never waits, and knows no clock.

A conversation outlives the daemon that it began with. It stands in one of four places:

    COMING  --joined-->  HERE  --lose-->  AWAY  --begin-->  COMING ...
       \\______________________lose________/         leave: OVER, from wherever the daemon is not

COMING it says Hello and asks for all again that was had before, as verbs.join has it. `gone` says
why nothing can be asked; it is None HERE, and while it is COMING for the first time. Whoever was
waiting for an answer when the daemon went is told at once; jobs under way end as lost, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from enum import Enum
from itertools import count

from kvferry.client.answers import Answers, Reply, Request
from kvferry.client.jobs import Jobs, checked_id, checked_ids, direction_of
from kvferry.client.lost_stores import LostStores
from kvferry.client.namespace import Namespace
from kvferry.client.standing import Registration, Standing
from kvferry.proto.codec import decode_daemon_message, encode
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused, error_of
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import (
    PROTOCOL,
    Cancel,
    ClientMessage,
    Done,
    Error,
    Finished,
    Goodbye,
    Hello,
    KeyEvents,
    Opened,
    OpenNamespace,
    Outcome,
    Reset,
    Snapshot,
    Submit,
    Subscribe,
    Wait,
    Welcome,
)
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    TransferSpec,
)
from kvferry.proto.status import Fingerprint

# Seconds, 11 days, that anything is waited for at most: a timer takes no math.inf, which a caller
# may give to wait for as long as it takes.
LONGEST = 1e6

_SIDES = frozenset({GPULoadStoreSpec, CPULoadStoreSpec, KeyLoadStoreSpec})


class Place(Enum):
    COMING = "coming"
    HERE = "here"
    AWAY = "away"
    OVER = "over"


class Conversation:
    def __init__(self, engine: str, client: str, *, lasting: bool = False) -> None:
        self.engine = engine
        self.client = client
        self.lasting = lasting
        """Whether it goes on with the daemon that comes after one that went."""
        self.place = Place.COMING
        self.welcome: Welcome | None = None
        self.gone: Gone | None = None
        self.refused: KVFerryError | None = None
        """Why the daemon that is there does not take us back."""
        self.incarnation = 0
        """How many sessions there were: one more whenever all was had again."""
        self.standing = Standing()
        self.jobs = Jobs()
        self._lost_stores = LostStores()
        self.answers = Answers()
        self._greeting: Welcome | KVFerryError | None = None
        self._request_ids = count(1)
        self._namespace: Namespace | None = None
        self._astray = False

    # Messages to send

    def hello(self) -> Hello:
        return Hello(PROTOCOL, PROTOCOL, self.client, self.engine)

    def request(self, message: ClientMessage) -> bytes:
        """The bytes of a message; Gone where there is nobody to hear it."""
        if self.gone is not None:
            raise self.gone.with_traceback(None)  # raised often: else it grows
        return encode(message)

    def asking(self, message: Request) -> AbstractContextManager[None]:
        """The reply to a request is kept while this lasts, and dropped after."""
        return self.answers.asking(message)

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(self, job_id: int, spec: TransferSpec, wait_for: int) -> bytes:
        """The message that starts a job; `submitted` says that it went out.

        Raises Refused (DUPLICATE_JOB, BUSY, STALE, MESSAGE_TOO_LARGE) or Gone, and nothing changed.
        """
        job_id, wait_for = checked_id("a job id", job_id), checked_id("wait_for", wait_for)
        src, dst = self._checked_sides(spec)
        if job_id in self.jobs:
            raise Refused(Code.DUPLICATE_JOB, "a job with this id is under way", job_id)
        direction = direction_of(spec)
        of_it = self.jobs.count(direction)
        if self.welcome is not None and of_it >= self.welcome.limits.most(direction):
            raise Refused(Code.BUSY, f"too many {direction}s are under way: poll first", of_it)
        self._lost_stores.check(spec)
        return self.request(Submit(job_id, src, dst, wait_for))

    def submitted(self, job_id: int, spec: TransferSpec) -> None:
        self.jobs.add(job_id, direction_of(spec))
        self._lost_stores.submitted(job_id, spec)

    def cancel(self, job_ids: Iterable[int]) -> bytes:
        return self.request(Cancel(checked_ids(job_ids)))

    def wait(self, job_ids: Iterable[int]) -> Wait:
        """The request to be told when these jobs have ended; Refused where none can read it."""
        return Wait(self.next_request_id(), checked_ids(job_ids))

    def reset(self) -> Reset:
        """The request to forget all keys; everything is absent here until it is done.

        Raises Refused (UNKNOWN_NAMESPACE).
        """
        message = Reset(self.next_request_id())
        self.namespace.reset(message.request_id)
        return message

    def astray(self) -> bytes | None:
        """What to send where the mirror was found astray, once."""
        astray, self._astray = self._astray, False
        return encode(Subscribe()) if astray and self.linked else None

    # The namespace

    @property
    def namespace(self) -> Namespace:
        """Raises Refused (UNKNOWN_NAMESPACE) where none was opened."""
        if self._namespace is None:
            message = "this client is in no namespace: open_namespace first"
            raise Refused(Code.UNKNOWN_NAMESPACE, message, self.client)
        return self._namespace

    def entered(self, fingerprint: Fingerprint) -> Opened | None:
        """What was opened before; Refused (NAMESPACE_MISMATCH) where it was of another."""
        if self._namespace is None:
            return None
        self._namespace.check_is(fingerprint)
        return self._namespace.opened

    def enter(self, opening: OpenNamespace, opened: Opened) -> None:
        """A namespace was opened as asked; again, where it is opened again."""
        if self._namespace is None:
            self._namespace = Namespace(opening.fingerprint, opened)
            self.standing.opening = opening
        else:
            self._namespace.reenter(opened)

    def mirrored(self) -> bool:
        """Whether the mirror is whole; raises why the daemon is gone, if it is."""
        if self.gone is not None:
            raise self.gone.with_traceback(None)
        return self.namespace.mirror.whole

    def check_region(self, host_bytes: int | None) -> None:
        """Raise Refused (BAD_LAYOUT) where a namespace was opened, and a region is wanted too."""
        if self._namespace is not None and host_bytes is not None:
            message = (
                "an engine in a namespace has no host region of its own: leave host_bytes out, "
                "and give open_namespace cpu_bytes_to_use"
            )
            raise Refused(Code.BAD_LAYOUT, message, host_bytes)

    # Coming, going, coming back

    @property
    def session(self) -> str:
        """What the daemon calls this session."""
        return "" if self.welcome is None else self.welcome.session_id

    @property
    def linked(self) -> bool:
        """Whether the daemon's end of the socket is there, as far as is known."""
        return self.place in (Place.COMING, Place.HERE)

    @property
    def for_good(self) -> bool:
        """Whether nothing will come of it any more."""
        return self.place is Place.OVER

    def present(self) -> bool | None:
        """Whether the daemon is there; None while it may come yet. Raises why it will not do."""
        if self.gone is None:
            return True
        if self.for_good or self.refused is not None:
            raise self.gone.with_traceback(None)
        return None

    def begin(self) -> None:
        """A socket was opened anew: who is there?"""
        self.place, self._greeting, self._astray = Place.COMING, None, False

    def joined(self) -> None:
        """Greeted, and all is had again."""
        assert self.welcome is not None
        self.place, self.gone, self.refused = Place.HERE, None, None
        self.incarnation += 1
        if self._namespace is not None:
            self._namespace.show()

    def registered(self, registration: Registration, region: HostRegion) -> None:
        self.standing.registration, self.standing.region = registration, region

    def lose(self, error: Gone) -> None:
        """The daemon is gone: all jobs in flight end as lost, and waiting requests fail."""
        if not self.linked:
            return
        self.place = Place.AWAY if self.lasting else Place.OVER
        self.gone = self.gone or self._reason(error)
        self.jobs.lose(error)
        self._lost_stores.lose()
        self.answers.lose(error)
        if self._namespace is not None:
            self._namespace.lose()

    def not_admitted(self, error: Refused) -> None:
        """The daemon does not let this user connect."""
        if self._greeting is None:
            self._greeting = error

    def turned_away(self, error: KVFerryError) -> None:
        """The daemon that is there does not take us back."""
        self.lose(Gone(Code.DAEMON_GONE, "the daemon did not take us back"))
        if not isinstance(error, Gone) and error.code != Code.NO_SESSION:
            message = f"the daemon that came back does not take us back: {error}"
            self.refused, self.gone = error, Gone(Code.DAEMON_GONE, message)
            self.gone.__cause__ = error

    def leave(self) -> None:
        """We go: nothing comes after this daemon, and the tensors are not ours to keep alive."""
        self.lasting, self.standing.registration = False, None
        if self.gone is not None:
            self.place = Place.OVER

    def end(self, error: Gone) -> None:
        """We went: from now on this is why nothing can be asked."""
        self.lose(error)
        self.place, self.gone = Place.OVER, error

    def _reason(self, error: Gone) -> Gone:
        if not self.lasting:
            return error
        return Gone(error.code, f"{error.message}; connecting again", error.value)

    # What arrived

    def feed(self, data: bytes) -> None:
        """Take a message of the daemon's in."""
        match decode_daemon_message(data):
            case Finished(results):
                for result in results:
                    self.jobs.take(result)
                    done = result.outcome is Outcome.DONE
                    self._lost_stores.ended(result.job_id, done=done)
            case Snapshot() | KeyEvents() as told:
                if self._namespace is not None and self._namespace.feed(told):
                    self._astray = True
            case Welcome() as welcome:
                self.welcome = self._greeting = welcome
            case Error(request_id, info, _):
                self._take_error(request_id, error_of(info))
            case Goodbye(reason):
                why = f": {reason}" if reason else ""
                self.lose(Gone(Code.DAEMON_GONE, f"the daemon said goodbye{why}"))
            case Done(request_id) as done:
                if self._resetting(request_id):
                    self.namespace.done(request_id)
                self.answers.hear(request_id, done)
            case reply:
                self.answers.hear(reply.request_id, reply)

    def greeted(self) -> Welcome | None:
        """The daemon's Welcome, once it is here; raises what it said instead."""
        if isinstance(self._greeting, KVFerryError):
            raise self._greeting
        return self._greeting

    def reply(self, request_id: int) -> Reply | None:
        """The reply to a request, once; None while there is none. Raises what it says."""
        reply = self.answers.take(request_id)
        if reply is None and self.gone is not None and not self.answers.awaited(request_id):
            raise self.gone.with_traceback(None)
        return reply

    def under_way(self, job_ids: Iterable[int]) -> list[int]:
        return [job_id for job_id in job_ids if job_id in self.jobs]

    def _checked_sides(self, spec: TransferSpec) -> TransferSpec:
        """A pair of specs that a daemon can read; whether they fit together it says itself."""
        if len(spec) != 2 or type(spec[0]) not in _SIDES or type(spec[1]) not in _SIDES:
            message = "a transfer is a pair of a GPULoadStoreSpec and one of the host side"
            raise Refused(Code.BAD_SPEC, message, spec)
        for side in spec:
            if isinstance(side, KeyLoadStoreSpec) and self._namespace is not None:
                self._namespace.checked(side.keys)
            else:
                side.check()
        return spec

    def _resetting(self, request_id: int) -> bool:
        return self._namespace is not None and self._namespace.resetting(request_id)

    def _take_error(self, request_id: int | None, error: KVFerryError) -> None:
        if request_id is not None:
            if not self.answers.hear(request_id, error) and self._resetting(request_id):
                raise error
        elif self._greeting is None:
            self._greeting = error
        elif error.code == Code.NO_SESSION:
            self.lose(Gone(Code.DAEMON_GONE, "the daemon was restarted, or has let us go"))
        else:
            raise error


def timed_out(what: str, value: object) -> Gone:
    return Gone(Code.TIMEOUT, f"{what} in time", value)
