"""Findings of checks, and the context that the checks share."""

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
    """WARN: it works, but something should be changed."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """The result of a check. change: what to change; empty if nothing."""

    check: str
    verdict: Verdict
    found: str
    change: str = ""


@dataclass(slots=True)
class CheckContext:
    """Results of earlier checks; the last three fields are None until a check sets them.

    search_in: the directory that the user gave.
    """

    search_in: Path | None
    timeout: float
    directory: Path | None = None
    client: OffloadClient | None = None
    status: DaemonStatus | None = None

    def close(self) -> None:
        """Close the client, if a check has connected one."""
        if self.client is not None:
            self.client.close()


Check: TypeAlias = Callable[[CheckContext], Iterator[Finding]]


def ok(check: str, found: str) -> Finding:
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, change: str) -> Finding:
    return Finding(check, Verdict.WARN, found, change)


def fail(check: str, found: str, change: str) -> Finding:
    return Finding(check, Verdict.FAIL, found, change)
