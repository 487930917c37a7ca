"""What goes wrong between an engine and its daemon, looked for one thing at a time.

    for finding in examine():
        print(finding.verdict, finding.check, finding.found, finding.change)

A check is a function from what is known so far to its findings. The daemon is looked for first,
spoken to next, and asked last; what depends on something that failed says nothing, so that the
first failure is the one to mend. Run it where the engine runs: as its user, in its container, with
its environment.
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

    directory: the folder of a daemon's sockets, or where such folders are; by default where
        clients look. timeout: seconds that the daemon has for each answer.
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
