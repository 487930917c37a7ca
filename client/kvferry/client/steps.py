"""What a verb may have done on its way; whoever performs it does each in turn (verbs.py)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from kvferry.client.answers import Request
from kvferry.proto.messages import (
    AllocateKVCaches,
    Goodbye,
    Hello,
    Pin,
    RegisterKVCaches,
    Subscribe,
)


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request; the outcome is its reply, or its error is thrown in."""

    request: Request


@dataclass(frozen=True, slots=True)
class Leave:
    """Deposit descriptors; the outcome is a tuple of tickets."""

    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Collect a descriptor; the outcome is the descriptor."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message that is no request; the outcome is what `until` answers, if not None."""

    message: Hello | Subscribe | Goodbye | Pin | RegisterKVCaches | AllocateKVCaches
    until: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Until:
    """Nothing to say; the outcome is what `ready` answers, if not None."""

    ready: Callable[[], object]


Step: TypeAlias = Ask | Leave | Fetch | Tell | Until
R = TypeVar("R")
Verb: TypeAlias = Generator[Step, Any, R]
