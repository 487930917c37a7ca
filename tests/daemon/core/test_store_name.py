"""Names of stores in tiers."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.store_name import StoreName


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("abc-def", StoreName("abc", "def")),
        ("abc-def-77", StoreName("abc", "def", 77)),
        ("abc", StoreName("abc", "")),
        ("abc--77", StoreName("abc", "", 77)),
    ],
)
def test_a_name_has_namespace_composition_and_epoch(text: str, name: StoreName) -> None:
    assert str(name) == text
    assert StoreName.parse(text) == name


@pytest.mark.parametrize("text", ["", "-", "a-b-c", "a-b--3", "a-b-3-4", "a-b-0x3"])
def test_any_text_is_a_name(text: str) -> None:
    assert StoreName.parse(text).epoch == 0
