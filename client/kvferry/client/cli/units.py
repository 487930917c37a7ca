"""How commands print numbers, names and lists.

Sizes are in powers of 1024, rates in powers of 1000.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from kvferry.proto.sizes import format_size
from kvferry.proto.specs import Part
from kvferry.proto.status_numbers import Number, declared_numbers

size = format_size
_DURATION_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
# Columns of the label at the start of a row.
LABEL_WIDTH = 9


def rows(label: str, parts: Iterable[Text | str], width: int, style: str = "") -> Iterator[Text]:
    """A label and its parts, separated by commas, in lines of at most `width` columns.

    A line ends between two parts only: a part that is longer than a line stays whole.
    """
    line = Text(f"{label:<{LABEL_WIDTH - 1}} ")
    is_empty = True
    for part in parts:
        text = part if isinstance(part, Text) else Text(part, style)
        # The line may end with a comma.
        if not is_empty and line.cell_len + len(", ") + text.cell_len + 1 > width:
            yield line.append(",", style)
            line, is_empty = Text(" " * LABEL_WIDTH), True
        line.append("" if is_empty else ", ", style).append_text(text)
        is_empty = False
    yield line


def numbers(part: Part, *, top: bool = False) -> list[Text | str]:
    """The declared numbers of a part of the status that are not zero, such as "12 evicted".

    top: only those of `kvferry top`.
    """
    return [
        Text(text, "yellow" if top else "red") if number.failure else text
        for field, number in declared_numbers(type(part)).items()
        if number.text and (number.top or not top) and (value := getattr(part, field))
        if (text := number.text.format(format_number(number, value)))
    ]


def format_number(number: Number, value: float) -> str:
    """A value in its unit."""
    formats = {"bytes": size, "seconds": short_duration}
    return formats.get(number.unit, "{:,}".format)(value)


def printable(name: str) -> str:
    """A name without control characters, which a terminal would interpret."""
    return name if name.isprintable() else repr(name)[1:-1]


def duration(seconds: float) -> str:
    """11520.7 -> "3 h 12 min": the two largest units."""
    parts: list[str] = []
    left = int(seconds)
    for name, length in _DURATION_UNITS:
        if left >= length or parts:
            parts.append(f"{left // length} {name}")
            left %= length
    return " ".join([*parts, f"{left} s"][:2])


def short_duration(seconds: float) -> str:
    """0.000204 -> "204 us", 31.25 -> "31.2 s", 3700 -> "1 h 1 min"."""
    if seconds >= 60:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
