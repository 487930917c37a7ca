"""Epochs: the number that names the contents of a namespace, on this host and everywhere.

    0             never reset
    else          62 bits: microseconds since 1970, then some random ones

Only a reset draws an epoch, later than all that are known. So epochs are ordered and never
repeated. A block of another epoch than the current one is old, also if its epoch is larger. The
order is used between copies only: of a disk, of a shared store and of a kept pool.
"""

from __future__ import annotations

from typing import Protocol

NEVER_RESET = 0


class Epochs(Protocol):
    """The epochs of this host and user, which all of their daemons share. Event loop only."""

    @property
    def changes(self) -> int:
        """Another number whenever an epoch has changed."""

    def current(self, namespace: str) -> int:
        """The epoch of a namespace."""

    def draw(self, namespace: str, label: str = "", above: int = 0) -> int:
        """Reset a namespace: draw its next epoch, which all daemons see when this returns.

        label: a reset with the label of the last one is that reset, and draws nothing. above: the
        epoch is larger than this one, too; if it is damaged, nothing is drawn.
        """

    def raise_to(self, namespace: str, epoch: int) -> None:
        """Adopt the epoch of a copy if it is larger. A damaged one is ignored."""

    def is_unpublished(self, namespace: str) -> bool:
        """Whether the epoch was drawn on this host, and not published in a shared store yet."""

    def mark_published(self, namespace: str, epoch: int) -> None:
        """A shared store has this epoch."""
