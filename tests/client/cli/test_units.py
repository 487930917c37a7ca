"""How commands print numbers."""

from __future__ import annotations

from kvferry.client.cli import units


def test_units() -> None:
    assert [units.size(n) for n in (0, 4096, 1536, 5 << 40)] == [
        "0 B",
        "4 KiB",
        "1.50 KiB",
        "5 TiB",
    ]
    assert [units.duration(s) for s in (3.2, 61, 11520)] == ["3 s", "1 min 1 s", "3 h 12 min"]
