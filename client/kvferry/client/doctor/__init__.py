"""Checks of what an engine needs from its daemon, one after another.

    for finding in run_checks():
        print(finding.verdict, finding.check, finding.found, finding.change)

A check is a function from a CheckContext to its findings. The checks find the daemon, connect to
it, and request its status. A check that depends on a failed one yields nothing, so the first
failure is the one to fix. Run them as the engine's user, in its container, with its environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvferry.client.doctor import daemon, environment
from kvferry.client.doctor.check import Check, CheckContext, Finding, Verdict
from kvferry.client.doctor.tiers import siblings, tiers
from kvferry.client.endpoint import find_daemons, runtime_directories
from kvferry.client.wire import MAX_TIMEOUT
from kvferry.proto.errors import KVFerryError

CHECKS: tuple[Check, ...] = (
    environment.packages,
    daemon.directory,
    daemon.sockets,
    environment.kernel,
    daemon.connection,
    daemon.version,
    daemon.status,
    daemon.refused,
    daemon.processes,
    daemon.device,
    daemon.pool,
    daemon.corrupt_blocks,
    daemon.unpackable_blocks,
    tiers,
    siblings,
    environment.shared_memory,
    environment.allocator,
    environment.vllm,
    environment.sglang,
    daemon.round_trip,
)

# Those of the engine's environment, which are made once for all daemons.
OF_ENGINE = (
    environment.packages,
    environment.kernel,
    environment.allocator,
    environment.vllm,
    environment.sglang,
)


def run_checks(directory: Path | None = None, timeout: float = 5.0) -> list[Finding]:
    """Run all checks; returns their findings in order, of one daemon after the other.

    directory: a runtime directory, or a parent of some; default: those that clients search.
    timeout: seconds to wait for each reply.
    """
    searched = runtime_directories() if directory is None else [directory]
    found, _ = find_daemons(searched)
    first, *others = found if len(found) > 1 else [directory]
    findings = _run(CHECKS, first, timeout)
    for other in others:
        findings += _run([each for each in CHECKS if each not in OF_ENGINE], other, timeout)
    return findings


def _run(checks: Iterable[Check], directory: Path | None, timeout: float) -> list[Finding]:
    context = CheckContext(directory, min(MAX_TIMEOUT, timeout))
    try:
        return [finding for check in checks for finding in _findings(check, context)]
    finally:
        context.close()


def _findings(check: Check, context: CheckContext) -> Iterator[Finding]:
    try:
        yield from check(context)
    except (KVFerryError, OSError) as error:
        yield Finding(check.__name__.replace("_", " "), Verdict.FAIL, str(error))


__all__ = ["CHECKS", "CheckContext", "Finding", "Verdict", "run_checks"]
