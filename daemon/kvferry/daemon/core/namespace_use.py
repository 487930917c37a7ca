"""What engines report of their use of a namespace: lookups, what loads saved, and the keys used.

It says nothing about blocks. Event loop only.
"""

from __future__ import annotations

from typing import Any

from kvferry.daemon.core.reuse_curve import ReuseCurve
from kvferry.proto.messages import Touch
from kvferry.proto.specs import MAX_INT


class NamespaceUse:
    """The use of a namespace with so many blocks, since it was created."""

    def __init__(self, blocks: int) -> None:
        self._curve = ReuseCurve(blocks)
        self._hits = self._misses = self._saved_tokens = 0
        self._saved_seconds = 0.0

    def count(self, report: Touch) -> None:
        """An engine has used keys. Its numbers are not checked, so sums stay encodable."""
        self._hits = min(MAX_INT, self._hits + report.hits)
        self._misses = min(MAX_INT, self._misses + report.misses)
        self._saved_tokens = min(MAX_INT, self._saved_tokens + report.saved_tokens)
        self._saved_seconds += report.saved_seconds
        if report.by_prompt:
            self._curve.use(report.keys[::-1], report.new)

    def forget_keys(self) -> None:
        """No key has a block now."""
        self._curve.forget_keys()

    def fields(self) -> dict[str, Any]:
        """Of NamespaceStatus."""
        return {
            "hits": self._hits,
            "misses": self._misses,
            "saved_tokens": self._saved_tokens,
            "saved_seconds": self._saved_seconds,
            **self._curve.hit_rates(),
        }
