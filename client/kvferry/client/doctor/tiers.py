"""Checks of the tiers below the host pool: whether they are on, and why blocks are not written."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.client.doctor.check import CheckContext, Finding, ok, warn
from kvferry.proto.status import TierStatus

_SEE_SIBLINGS = "see Siblings in deploy/README.md"
_SEE_LOG = "see the messages of this tier in the daemon's log"


def tiers(context: CheckContext) -> Iterator[Finding]:
    """Yields nothing if the daemon has no tier."""
    for tier in context.status.tiers if context.status is not None else ():
        yield from _check_tier(f"tier {tier.name}", tier)


def siblings(context: CheckContext) -> Iterator[Finding]:
    """Yields nothing if the daemon has found no sibling."""
    for sibling in context.status.siblings if context.status is not None else ():
        check = f"sibling {sibling.directory}"
        if sibling.is_on:
            yield ok(check, f"on, {sibling.keys:,} keys")
        else:
            reason, _, change = sibling.state.partition("; ")
            yield warn(check, f"its blocks are not loaded: {reason}", change or _SEE_SIBLINGS)


def _check_tier(check: str, tier: TierStatus) -> Iterator[Finding]:
    dropped = f"{tier.dropped_writes:,} blocks left the pool before they were written"
    if tier.state == "off" or tier.failure:
        reason, _, change = (tier.failure or "too many errors or late answers").partition("; ")
        yield warn(check, f"{tier.state}: {reason}", change or _SEE_LOG)
    elif tier.read_only:
        reason, _, change = tier.read_only.partition("; ")
        lost = f"; {dropped}" if tier.dropped_writes else ""
        yield warn(check, f"nothing can be written: {reason}{lost}", change or _SEE_LOG)
    elif tier.dropped_writes:
        why = f"the tier was full, slower than the stores, or off ({tier.openings:,} times)"
        change = f"if it happens again: a faster device, or a higher tiers.{tier.name}.rate"
        yield warn(check, f"{tier.state}; {dropped}: {why}", change)
    else:
        used = f", {tier.used_bytes >> 20} MiB used" if tier.used_bytes else ""
        yield ok(check, f"{tier.state}{used}")
