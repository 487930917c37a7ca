"""A Prometheus counter of something that is counted elsewhere. Used by the metrics thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter


class FollowedCounter:
    """A Counter that follows totals which are counted elsewhere."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._counter = Counter(name, documentation, labels, registry=registry)
        self._seen: dict[tuple[str, ...], int] = {}

    def set_totals(self, totals: Mapping[tuple[str, ...], int]) -> None:
        """Set all totals, by label values.

        A total that is missing is removed. A total that is smaller than before starts again.
        """
        for labels, before in self._seen.items():
            if totals.get(labels, -1) < before:
                self._counter.remove(*labels)
        for labels, total in totals.items():
            before = self._seen.get(labels, 0)
            self._counter.labels(*labels).inc(total - before if total >= before else total)
        self._seen = dict(totals)
