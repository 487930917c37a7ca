"""From which fragment size on copies are direct, by what a calibration found."""

from __future__ import annotations

import pytest

from kvferry.daemon.engine.cuda.calibration import SIZES, _threshold

WHOLE = 55e9
KIB = 1 << 10


def seen(**slow: float) -> list[tuple[int, float, float]]:
    """Link speed at every size, but for some: k128=0.5 is half of it at 128 KiB."""
    parts = {int(name[1:]) * KIB: part for name, part in slow.items()}
    return [(size, parts.get(size, 1.0) * WHOLE, WHOLE) for size in SIZES]


@pytest.mark.parametrize(
    ("found", "direct_from"),
    [
        (seen(), 256 * KIB),
        (seen(k256=0.98), 256 * KIB),
        (seen(k256=0.96), 512 * KIB),
        (seen(k1024=0.5), 2048 * KIB),
        (seen(k64=2.0), 256 * KIB),
        (seen(k2048=0.5), 4096 * KIB),
    ],
)
def test_direct_is_what_reaches_nearly_the_link_with_far_places_and_all_larger(
    found: list[tuple[int, float, float]], direct_from: int
) -> None:
    assert _threshold(found) == direct_from
