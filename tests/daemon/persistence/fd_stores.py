"""A stand-in for the descriptor store of a service manager."""

from __future__ import annotations

import os


class KeptFds:
    """Keeps copies of descriptors until they are removed."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def store_fd(self, name: str, descriptor: int) -> None:
        assert name not in self.kept
        self.kept[name] = os.dup(descriptor)

    def remove_fd(self, name: str) -> None:
        if name in self.kept:
            os.close(self.kept.pop(name))

    def copies(self) -> dict[str, int]:
        """As the next daemon receives them."""
        return {name: os.dup(descriptor) for name, descriptor in self.kept.items()}
