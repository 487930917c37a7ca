"""Numbers and names as commands print them.

Sizes are in powers of 1024, rates in powers of 1000.
"""

from __future__ import annotations

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_SPANS = (("d", 86400), ("h", 3600), ("min", 60))


def plain(name: str) -> str:
    """A foreign name without control characters that a terminal would interpret."""
    return name if name.isprintable() else repr(name)[1:-1]


def size(nbytes: float) -> str:
    """4096 -> "4 KiB", with three digits where it does not come out even."""
    power = 0
    while nbytes >= 1024 and power < len(_SIZES) - 1:
        nbytes, power = nbytes / 1024, power + 1
    digits = 0 if nbytes == int(nbytes) else 1 if nbytes >= 100 else 2
    return f"{nbytes:.{digits}f} {_SIZES[power]}"


def span(seconds: float) -> str:
    """11520.7 -> "3 h 12 min": the two largest units."""
    parts: list[str] = []
    left = int(seconds)
    for name, length in _SPANS:
        if left >= length or parts:
            parts.append(f"{left // length} {name}")
            left %= length
    return " ".join([*parts, f"{left} s"][:2])


def brief(seconds: float) -> str:
    """0.000204 -> "204 us", 31.25 -> "31.2 s", 3700 -> "1 h 1 min"."""
    if seconds >= 60:
        return span(seconds)
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
