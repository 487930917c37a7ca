"""The daemon's answers, from when something is asked until they are taken.

Most requests may be asked again as often as one likes: an answer that nobody waits for any more is
dropped. KV caches are registered once. Who asks for that and times out, is cancelled or interrupted
leaves a claim: the daemon may have registered them, or will. It is settled by who claims next: he
takes it up where he wants the same, and has it given back else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    Done,
    NamespacesReport,
    NamespacesRequest,
    Opened,
    OpenNamespace,
    Registered,
    RegisterKVCaches,
    Released,
    ReleaseKVCaches,
    Reset,
    StatusReport,
    StatusRequest,
    Wait,
    Waited,
)

Request: TypeAlias = (
    ReleaseKVCaches | Wait | OpenNamespace | Reset | StatusRequest | NamespacesRequest
)
Reply: TypeAlias = (
    Registered | Allocated | Released | Waited | Opened | Done | StatusReport | NamespacesReport
)


@dataclass(slots=True, eq=False)
class Claim:
    """what: equal to another's where the same is wanted; () where it cannot be taken up.
    memory: what the daemon may map of ours, kept alive. left: nobody waits for it."""

    request: RegisterKVCaches | AllocateKVCaches
    what: tuple[object, ...]
    memory: object
    answer: Reply | KVFerryError | None = None
    left: bool = False

    def answered(self) -> Reply | None:
        """The answer, once it is here. Raises what it says."""
        if isinstance(self.answer, KVFerryError):
            raise self.answer
        return self.answer

    def settled(self) -> bool | None:
        """Whether there is nothing to wait for any more; None where there is."""
        return self.answer is not None or not self.left or None


class Answers:
    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._answers: dict[int, Reply | KVFerryError] = {}
        self._claims: dict[int, Claim] = {}
        """What the daemon may have given, and we do not have."""

    @contextlib.contextmanager
    def asking(self, message: Request) -> Iterator[None]:
        """The answer to a request is kept while this lasts, and dropped after."""
        self._asked.add(message.request_id)
        try:
            yield
        finally:
            self._asked.discard(message.request_id)
            self._answers.pop(message.request_id, None)

    @contextlib.contextmanager
    def claiming(self, claim: Claim) -> Iterator[None]:
        """What is claimed is had when this ends well; else it is left, if it may be given."""
        request_id = claim.request.request_id
        self._claims[request_id], claim.left = claim, False
        try:
            yield
        except BaseException as error:
            claim.left = True
            timed_out = isinstance(error, Gone) and error.code == Code.TIMEOUT
            if claim.answer is None and isinstance(error, KVFerryError) and not timed_out:
                self._claims.pop(request_id, None)  # it did not go out
            raise
        self._claims.pop(request_id, None)

    def left(self) -> Claim | None:
        """The oldest claim that was left."""
        return next((claim for claim in self._claims.values() if claim.left), None)

    def hear(self, request_id: int, answer: Reply | KVFerryError) -> bool:
        """Whether anybody asks."""
        if (claim := self._claims.get(request_id)) is not None:
            claim.answer = answer
            if isinstance(answer, KVFerryError):
                del self._claims[request_id]
        elif request_id in self._asked:
            self._answers[request_id] = answer
        else:
            return False
        return True

    def awaited(self, request_id: int) -> bool:
        return request_id in self._asked

    def take(self, request_id: int) -> Reply | None:
        """The answer to a request, once. Raises what it says."""
        answer = self._answers.pop(request_id, None)
        if isinstance(answer, KVFerryError):
            raise answer
        return answer

    def lose(self, error: Gone) -> None:
        """The daemon went, and what it gave with it: who asks is told."""
        for request_id in self._asked:
            self._answers.setdefault(request_id, error)
        for claim in self._claims.values():
            claim.answer = claim.answer or error
        self._claims.clear()
