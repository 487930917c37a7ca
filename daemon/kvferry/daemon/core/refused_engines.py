"""Engines whose last request for memory was refused, for the status and `kvferry doctor`.

Such an engine runs without offloading, and only its own log says why. Event loop only.
"""

from __future__ import annotations

from kvferry.proto.errors import ErrorInfo

# Engines that are remembered; beyond that, the oldest refusal is forgotten.
MOST_ENGINES = 16


class RefusedEngines:
    """The last refusal of each engine, until a request of it is granted."""

    def __init__(self) -> None:
        self.errors: dict[str, ErrorInfo] = {}

    def add(self, engine: str, error: ErrorInfo) -> None:
        self.errors.pop(engine, None)
        self.errors[engine] = error
        if len(self.errors) > MOST_ENGINES:
            del self.errors[next(iter(self.errors))]

    def remove(self, engine: str) -> None:
        self.errors.pop(engine, None)
