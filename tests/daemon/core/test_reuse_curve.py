"""ReuseCurve, and the lookups that NamespaceUse counts, against caches of each size."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import pytest

from kvferry.daemon.core import reuse_curve
from kvferry.daemon.core.namespace_use import NamespaceUse
from kvferry.daemon.core.reuse_curve import SAMPLED_KEYS, SIZES, ReuseCurve
from kvferry.proto.codec import encode
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.messages import NamespacesReport, Touch
from kvferry.proto.specs import MAX_COUNT, MAX_INT
from kvferry.proto.status import NamespaceStatus


def namespace_status(**fields: Any) -> NamespaceStatus:
    return NamespaceStatus("name", Fingerprint("model", 64), "lru", (), *(1,) * 8, **fields)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def conversations(rng: random.Random, turns: int, alive: int) -> Iterator[list[bytes]]:
    """The keys of prompts. Each continues a conversation, which begins with one of few system
    prompts; the more recent it is, the more likely it continues."""
    systems = [[key(place << 40 | n) for n in range(20)] for place in range(1, 6)]
    talks: list[list[bytes]] = []
    numbers = iter(range(1 << 39))
    for _ in range(turns):
        if talks and rng.random() < 0.7:
            talk = talks.pop(-min(len(talks), 1 + int(rng.expovariate(1 / alive))))
        else:
            talk = list(rng.choice(systems))
        talk += [key(next(numbers)) for _ in range(rng.randrange(1, 40))]
        talks.append(talk)
        yield list(talk)


class ExactCache:
    """An LRU cache. The first key of a prompt is the last to be evicted."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.hits = blocks, 0
        self.kept = OrderedDict[bytes, None]()

    def use(self, keys: Sequence[bytes]) -> None:
        self.hits += sum(each in self.kept for each in keys)
        for each in reversed(keys):
            self.kept[each] = None
            self.kept.move_to_end(each)
        while len(self.kept) > self.blocks:
            self.kept.popitem(last=False)


@pytest.mark.parametrize(("blocks", "samples", "turns"), [(100, 1, 500), (20_000, 5, 3_000)])
def test_the_curve_is_within_two_hundredths_of_caches_of_each_size(
    blocks: int, samples: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_curve, "HALF_LIFE", 1 << 30)
    rng = random.Random(blocks)
    # The median of several samples: one may be further away. Of few blocks the sample has all.
    curves = {bytes([number]): ReuseCurve(blocks) for number in range(samples)}
    caches = {name: ExactCache(int(size * blocks)) for name, size in SIZES.items()}
    asked = 0
    for keys in conversations(rng, turns, alive=blocks // 40):
        asked += len(keys)
        for salt, curve in curves.items():
            curve.use([salt + each for each in keys[::-1]])
        for cache in caches.values():
            cache.use(keys)
    found = [curve.hit_rates() for curve in curves.values()]
    for name, cache in caches.items():
        middle = median(each[name] for each in found)
        assert middle == pytest.approx(cache.hits / asked, abs=0.02), name


def test_old_work_is_forgotten() -> None:
    """At first each key is used twice, then never again."""
    curve, numbers = ReuseCurve(64), iter(range(1 << 30))
    for number in range(4_000):
        curve.use([key(number // 2)])
    assert curve.hit_rates()["hit_rate"] == pytest.approx(0.5, abs=0.01)
    for _ in range(12_000):
        curve.use([key(1 << 40 | next(numbers))])
    assert curve.hit_rates()["hit_rate"] < 0.05


def test_memory_is_bounded() -> None:
    curve = ReuseCurve(1 << 14)
    for start in range(0, 1 << 18, 1 << 10):
        curve.use([key(number) for number in range(start, start + (1 << 10))])
    assert len(curve._times) == len(curve._last_use) <= SAMPLED_KEYS


def test_nothing_is_known_at_first_and_after_a_reset_nothing_is_used_again() -> None:
    use = NamespaceUse(200)
    assert "hit_rate" not in use.fields()
    keys = tuple(map(key, range(200)))
    use.count(Touch(keys, hits=1, misses=2, saved_tokens=3, saved_seconds=0.5))
    use.forget_keys()
    use.count(Touch(keys, hits=10, misses=20, saved_tokens=30, saved_seconds=1.0))
    fields = use.fields()
    assert fields["hit_rate_quadruple"] == 0.0
    assert [fields[name] for name in ("hits", "misses", "saved_tokens", "saved_seconds")] == [
        11,
        22,
        33,
        1.5,
    ]


def test_numbers_of_a_hostile_engine_stay_encodable() -> None:
    use, most = NamespaceUse(100), MAX_COUNT - 1
    for by_prompt in [True] * 300 + [False] * (1 << 15):
        use.count(Touch((key(1),), most, most, most, most, 1e9, by_prompt=by_prompt))
    fields = use.fields()
    assert {fields[name] for name in ("hits", "misses", "saved_tokens")} == {MAX_INT}
    encode(NamespacesReport(1, (namespace_status(**fields),)))


def test_keys_without_a_lookup_do_not_count_as_asked() -> None:
    """Of a prompt of one key the engine generates another one; both are the next prompt's."""
    use = NamespaceUse(100)
    for number in range(300):
        both = key(2 * number), key(2 * number + 1)
        use.count(Touch(both, new=1))
        use.count(Touch(both))
    assert use.fields()["hit_rate"] == pytest.approx(2 / 3)


def test_keys_that_no_prompt_has_used_do_not_count() -> None:
    use = NamespaceUse(100)
    for number in range(300):
        use.count(Touch((key(number),)))
        use.count(Touch((key(number),), by_prompt=False))
    assert use.fields()["hit_rate"] == 0.0
