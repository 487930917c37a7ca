"""Checks of what an engine needs from its daemon, one after another.

    for finding in examine():
        print(finding.verdict, finding.check, finding.found, finding.change)

A check is a function from what is known so far (a Case) to its findings. First the daemon is
located, then connected to, then asked. A check that depends on a failed one yields nothing, so the
first failure is the one to fix. Run it as the engine's user, in its container, with its
environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvferry.client.doctor import daemon, environment
from kvferry.client.doctor.case import Case, Check, Finding, Verdict
from kvferry.client.session import LONGEST
from kvferry.proto.errors import KVFerryError

CHECKS: tuple[Check, ...] = (
    environment.packages,
    daemon.folder,
    daemon.listening,
    daemon.greeting,
    daemon.version,
    daemon.answering,
    daemon.processes,
    daemon.device,
    daemon.pool,
    environment.shared_memory,
    environment.allocator,
    environment.vllm,
    daemon.round_trip,
)


def examine(directory: Path | None = None, timeout: float = 5.0) -> list[Finding]:
    """All findings, in the order of the checks.

    directory: that of a daemon's sockets, or a parent of such directories; default: where clients
        search. timeout: seconds to wait for each reply.
    """
    case = Case(directory, min(LONGEST, timeout))
    try:
        return [finding for check in CHECKS for finding in _findings(check, case)]
    finally:
        case.close()


def _findings(check: Check, case: Case) -> Iterator[Finding]:
    try:
        yield from check(case)
    except (KVFerryError, OSError) as error:
        yield Finding(check.__name__.replace("_", " "), Verdict.FAIL, str(error))


__all__ = ["CHECKS", "Case", "Finding", "Verdict", "examine"]
