"""Which prefixes can be restored, against a plain model. No SGLang needed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.client.sglang.restorable import Window, restorable_lengths

FOUND = st.lists(st.booleans(), max_size=12)


def is_restorable(length: int, pages: Sequence[bool], windows: Sequence[Window]) -> bool:
    """Each page of the prefix is there, and of each window each of its last pages."""
    return all(pages[:length]) and all(
        found[page]
        for found, needed in windows
        for page in range(length)
        if page >= length - needed
    )


@settings(max_examples=300)
@given(FOUND, st.lists(st.tuples(FOUND, st.integers(1, 14)), max_size=3))
def test_all_lengths(pages: list[bool], others: list[tuple[list[bool], int]]) -> None:
    count = [*pages, False].index(False)
    windows = [
        Window([*found, *[False] * len(pages)][: len(pages)], needed) for found, needed in others
    ]
    expected = [
        length for length in range(1, len(pages) + 1) if is_restorable(length, pages, windows)
    ]
    cut = [Window(found[:count], needed) for found, needed in windows]
    assert restorable_lengths(count, windows) == restorable_lengths(count, cut) == expected


def test_the_last_pages_of_a_window_are_needed() -> None:
    window = Window([True, False, True, True], 2)
    assert restorable_lengths(4, [window]) == [1, 4]
