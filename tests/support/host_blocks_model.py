"""A model of an engine's own host blocks, derived from the transfers that it submitted."""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.block_marks import Label
from support.traffic_statistics import TrafficOptions

# Stand for a label. UNKNOWN: the bytes depend on what this model cannot know (an earlier engine of
# this name used the block, or the result of a store was lost). UNDEFINED: the last store of the
# block did not complete, so no load of it may succeed.
UNKNOWN, UNDEFINED = 0, -1


class HostBlocksModel:
    """The contents of an engine's own host blocks, by sub-block.

    A sub-block holds the label of its last store if that completed. It is undefined if that store
    failed, and unknown if its result was lost with the daemon or the session.
    """

    def __init__(self, options: TrafficOptions, rng: random.Random) -> None:
        self._options, self._rng = options, rng
        self._labels: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._complete: set[int] = set()
        # Whether an earlier engine of this name used these host blocks.
        self._inherited = False
        # Random, so that an earlier engine of this name has used other versions.
        self._version = rng.randrange(1 << 22)

    def clear(self) -> None:
        """The engine got new host blocks."""
        self._labels.clear()
        self._complete.clear()
        self._inherited = False

    def reattach(self) -> None:
        """The engine got the host blocks of an earlier session, or of an earlier daemon."""
        self._inherited |= not self._labels
        self._complete.clear()

    def choose_blocks(self, count: int) -> tuple[list[int], int, list[int]]:
        """Random host blocks for `count` GPU blocks: ids, the first's skip, and all sub-blocks."""
        factor = self._options.factor
        skip = self._rng.randrange(factor)
        hosts = self._rng.sample(range(self._options.host_blocks), -(-(count + skip) // factor))
        subs = [hosts[at // factor] * factor + at % factor for at in range(skip, skip + count)]
        return hosts, skip, subs

    def new_labels(self, subs: Sequence[int]) -> list[int]:
        """Labels for a store of these sub-blocks, with a version of their own."""
        self._version += 1
        return [Label(self._options.owner, sub, self._version).number for sub in subs]

    def expected(self, subs: Sequence[int]) -> tuple[list[int], list[int]]:
        """The labels of these sub-blocks, and the job ids of the stores that wrote them."""
        other = UNKNOWN if self._inherited else UNDEFINED
        return (
            [self._labels.get(sub, other) for sub in subs],
            [self._writers.get(sub, 0) for sub in subs],
        )

    def all_complete(self, subs: Sequence[int]) -> bool:
        """Whether the last store of each completed, under the present daemon."""
        return self._complete.issuperset(subs)

    def submit_store(self, job_id: int, subs: Sequence[int], labels: Sequence[int]) -> None:
        """From now on, loads find its labels."""
        self._complete.difference_update(subs)
        for sub, label in zip(subs, labels, strict=True):
            self._labels[sub], self._writers[sub] = label, job_id

    def complete_store(self, job_id: int, subs: Sequence[int]) -> None:
        self._complete.update(self._last_written(job_id, subs))

    def fail_store(self, job_id: int, subs: Sequence[int]) -> None:
        self._labels.update(dict.fromkeys(self._last_written(job_id, subs), UNDEFINED))

    def lose_store(self, job_id: int, subs: Sequence[int]) -> None:
        """The result is lost: each sub-block holds the new bytes or the ones before."""
        self._labels.update(dict.fromkeys(self._last_written(job_id, subs), UNKNOWN))

    def _last_written(self, job_id: int, subs: Sequence[int]) -> list[int]:
        """The sub-blocks that no later store has overwritten."""
        return [sub for sub in subs if self._writers.get(sub) == job_id]
