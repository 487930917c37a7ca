"""Calibration: the fragment size from which on copies are direct."""

from __future__ import annotations

import pytest

from kvferry.daemon.engine.cuda.calibration import SIZES, _threshold

LINK = 55e9
KIB = 1 << 10


def speeds(**slow: float) -> list[tuple[int, float, float]]:
    """The speed of the link at every size except some: k128=0.5 is half of it at 128 KiB."""
    shares = {int(name[1:]) * KIB: share for name, share in slow.items()}
    return [(size, shares.get(size, 1.0) * LINK, LINK) for size in SIZES]


@pytest.mark.parametrize(
    ("measured", "direct_from"),
    [
        (speeds(), 256 * KIB),
        (speeds(k256=0.98), 256 * KIB),
        (speeds(k256=0.96), 512 * KIB),
        (speeds(k1024=0.5), 2048 * KIB),
        (speeds(k64=2.0), 256 * KIB),
        (speeds(k2048=0.5), 4096 * KIB),
    ],
)
def test_copies_are_direct_from_the_size_on_that_nearly_reaches_the_link(
    measured: list[tuple[int, float, float]], direct_from: int
) -> None:
    assert _threshold(measured) == direct_from
