"""The name of a store: the blocks of a namespace in a tier.

Blocks that are composed otherwise, or that are of another epoch, are in another store.
"""

from __future__ import annotations

from typing import NamedTuple

# Of an epoch, which has 62 bits.
MAX_DIGITS = 19


class StoreName(NamedTuple):
    """As a text: "NAMESPACE-COMPOSITION", and "-EPOCH" unless the epoch is 0."""

    namespace: str
    composition: str
    epoch: int = 0

    def __str__(self) -> str:
        if self.epoch:
            return f"{self.namespace}-{self.composition}-{self.epoch}"
        return f"{self.namespace}-{self.composition}" if self.composition else self.namespace

    @classmethod
    def parse(cls, text: str) -> StoreName:
        """The parts of a name. Any text is a name."""
        namespace, _, rest = text.partition("-")
        composition, _, epoch = rest.partition("-")
        is_epoch = epoch.isascii() and epoch.isdecimal() and len(epoch) <= MAX_DIGITS
        return cls(namespace, composition, int(epoch) if is_epoch else 0)
