"""Coming back: to the daemon that is there after one that went, without anybody waiting for it.

Whoever polls pushes it on: `go_on` does what can be done at once. An attempt is the verb `join`,
performed a bit at a time over a new socket; ZeroMQ connects it as soon as a daemon is there. Where
the daemon says no, or goes again, the next attempt is made after a pause: longer after each, and
as chance has it, so that clients do not all come at once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from kvferry.client.conversation import Conversation, Place, timed_out
from kvferry.client.descriptors import AT_ONCE, Visit
from kvferry.client.steps import Ask, Fetch, Leave, Step, Tell, Until, Verb
from kvferry.client.verbs import join
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, Failed, Gone, KVFerryError
from kvferry.proto.fd_passing import FetchFd, SendFds

log = logging.getLogger("kvferry")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts, at most."""
PATIENCE = 10.0
"""Seconds that an attempt may take."""
TICK = 0.02
"""Seconds after which who waits for a daemon pushes on."""

Pushed: TypeAlias = Generator[None, None, Any]
"""Goes as far as it can whenever it is pushed; its return value is the outcome."""


class Comeback:
    """reopen: makes a new socket. send: over that."""

    def __init__(
        self,
        talk: Conversation,
        directory: Path,
        reopen: Callable[[], None],
        send: Callable[[bytes], None],
    ) -> None:
        self._talk, self._directory = talk, directory
        self._reopen, self._send = reopen, send
        self._attempt: Pushed | None = None
        self._next = self._until = 0.0
        self._pause = FIRST_PAUSE
        self._said: object = None

    def go_on(self, now: float) -> None:
        """Do what can be done at once."""
        if self._attempt is None:
            self._say(self._talk.gone)
            if now < self._next:
                return
            self._attempt = self._begin(now)
        try:
            if self._talk.place is Place.AWAY:
                raise Gone(Code.DAEMON_GONE, "the daemon went again", str(self._directory))
            if now > self._until:
                raise timed_out("the daemon did not take us back", str(self._directory))
            next(self._attempt)
        except StopIteration:
            self._attempt, self._next, self._pause = None, 0.0, FIRST_PAUSE
            self._say(None)
        except KVFerryError as error:
            self._give_up(now, error)
        except Exception as error:
            self._give_up(now, Failed(Code.MAP_FAILED, f"tensors cannot be shared again: {error}"))
            raise

    def close(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def _begin(self, now: float) -> Pushed:
        self._reopen()
        self._talk.begin()
        self._until = now + PATIENCE
        return self._perform(join(self._talk))

    def _give_up(self, now: float, error: KVFerryError) -> None:
        """Until the next attempt the daemon has no session of ours."""
        self.close()
        self._talk.turned_away(error)
        self._reopen()
        if error.code != Code.TIMEOUT:  # of nobody heard, the next attempt may hear at once
            self._next = now + random.uniform(self._pause / 2, self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _say(self, gone: object) -> None:
        if gone is not self._said:
            self._said = gone
            who = f"{self._talk.client} of engine {self._talk.engine}"
            log.warning("kvferry: %s: %s", who, gone or "the daemon is there again")

    def _perform(self, verb: Verb[None]) -> Pushed:
        try:
            step = next(verb)
            while True:
                try:
                    outcome = yield from self._do(step)
                except KVFerryError as error:
                    step = verb.throw(error)
                else:
                    step = verb.send(outcome)
        except StopIteration:
            return
        finally:
            verb.close()

    def _do(self, step: Step) -> Pushed:
        match step:
            case Ask(request):
                with self._talk.asking(request):
                    self._send(encode(request))
                    return (yield from _until(lambda: self._talk.reply(request.request_id)))
            case Leave(descriptors):
                return (yield from self._deposit(descriptors))
            case Tell(message, until):
                self._send(encode(message))
                return (yield from _until(until))
            case Until(ready):
                return (yield from _until(ready))
            case Fetch(ticket):
                with Visit(self._directory, FetchFd(self._talk.session, ticket)) as visit:
                    return (yield from _until(visit.answer))[1][0]

    def _deposit(self, descriptors: Sequence[int]) -> Pushed:
        tickets: tuple[int, ...] = ()
        for start in range(0, len(descriptors), AT_ONCE):
            some = descriptors[start : start + AT_ONCE]
            with Visit(self._directory, SendFds(self._talk.session), some) as visit:
                tickets += (yield from _until(visit.answer))[0]
        return tickets


def _until(ready: Callable[[], object]) -> Pushed:
    while (answer := ready()) is None:
        yield
    return answer
