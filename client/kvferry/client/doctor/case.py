"""State that the checks share, and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

import msgspec

from kvferry.client.blocking import OffloadClient
from kvferry.proto.status import DaemonStatus


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """The result of a check. change: what to do; empty if nothing."""

    check: str
    verdict: Verdict
    found: str
    change: str = ""


@dataclass(slots=True)
class Case:
    """What is known so far. The last three fields are None until a check has set them."""

    asked: Path | None
    timeout: float
    directory: Path | None = None
    client: OffloadClient | None = None
    status: DaemonStatus | None = None

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


Check: TypeAlias = Callable[[Case], Iterator[Finding]]


def ok(check: str, found: str) -> Finding:
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, change: str) -> Finding:
    return Finding(check, Verdict.WARN, found, change)


def fail(check: str, found: str, change: str) -> Finding:
    return Finding(check, Verdict.FAIL, found, change)
