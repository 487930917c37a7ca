"""Ports: what the core asks of the parts around it, besides its actions. Event loop only."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.daemon.core.epochs import Epochs
from kvferry.daemon.core.siblings import NO_SIBLINGS, Siblings
from kvferry.daemon.core.tier_actions import TierDescription


@dataclass(frozen=True, slots=True)
class Ports:
    """epochs: of this host. tiers: those below the host pool, fastest first. siblings: their
    pools."""

    epochs: Epochs
    tiers: tuple[TierDescription, ...] = ()
    siblings: Siblings = NO_SIBLINGS
