"""Metrics of the tiers below the host pool.

`observe_promotion` is called on the event loop, `update` on the metrics thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge, Histogram

from kvferry.daemon.observability.followed_counter import FollowedCounter
from kvferry.proto.status import TierStatus

# Seconds: 1 ms to 5 s.
BUCKETS = tuple(scale * 10**power for power in range(-3, 1) for scale in (1, 2.5, 5))
# Metric, description and fields of TierStatus, by the value of the label `result` or `direction`.
_COUNTERS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "lookups",
        "Keys that engines looked for in a tier. skipped: found, but computing is faster.",
        "result",
        {"hit": "hits", "miss": "misses", "skipped": "skipped"},
    ),
    (
        "keys",
        "Keys moved. read: to the host pool; written: to the tier; dropped: evicted from the pool "
        "before they were written.",
        "result",
        {"read": "promoted", "written": "written", "dropped": "dropped_writes"},
    ),
    (
        "moved_bytes",
        "Bytes moved. read: to the host pool; written: to the tier.",
        "direction",
        {"read": "read_bytes", "written": "written_bytes"},
    ),
    (
        "failures",
        "Failures. checksum: a block that does not match its checksum; error: a read or write that "
        "failed; breaker: the tier was turned off; death: its process ended.",
        "kind",
        {
            "checksum": "checksum_failures",
            "error": "errors",
            "breaker": "openings",
            "death": "deaths",
        },
    ),
)


class TierMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, description: str, *labels: str) -> Gauge:
            return Gauge(f"kvferry_tier_{name}", description, ("tier", *labels), registry=registry)

        self._on = gauge("on", "Whether a request would be sent to the tier: 1 or 0.")
        self._capacity = gauge("capacity_bytes", "Bound of what the tier stores; 0: not known.")
        self._used = gauge("used_bytes", "Bytes used of the bound, with all overhead.")
        self._stored = gauge("stored_keys", "Keys in the tier.")
        self._queue = gauge(
            "queue_seconds", "Age of the oldest promotion or write that has not ended."
        )
        self._read_only = gauge("read_only", "Whether nothing can be written: 1 or 0.")
        self._evictions = FollowedCounter(
            "kvferry_tier_evictions", "Keys evicted from the tier.", ("tier",), registry
        )
        self._counters = [
            (
                FollowedCounter(f"kvferry_tier_{name}", text, ("tier", label), registry),
                fields,
            )
            for name, text, label, fields in _COUNTERS
        ]
        self._promotion = Histogram(
            "kvferry_tier_promotion_seconds",
            "Time from the start of a promotion until its blocks were in the host pool.",
            ("tier",),
            buckets=BUCKETS,
            registry=registry,
        )

    def observe_promotion(self, tier: str, seconds: float) -> None:
        """Count a promotion that has ended."""
        self._promotion.labels(tier).observe(seconds)

    def update(self, tiers: Sequence[TierStatus]) -> None:
        for tier in tiers:
            name = tier.name
            self._on.labels(name).set(tier.state == "on")
            self._capacity.labels(name).set(tier.capacity_bytes)
            self._used.labels(name).set(tier.used_bytes)
            self._stored.labels(name).set(tier.keys)
            self._queue.labels(name).set(tier.queue_seconds)
            self._read_only.labels(name).set(bool(tier.read_only))
            self._promotion.labels(name)
        self._evictions.set_totals({(tier.name,): tier.evictions for tier in tiers})
        for counter, fields in self._counters:
            counter.set_totals(
                {
                    (tier.name, value): getattr(tier, field)
                    for tier in tiers
                    for value, field in fields.items()
                }
            )
