"""Sizes with units, as in options and configuration files."""

from __future__ import annotations

import pytest

from kvferry.proto.errors import Code, Refused
from kvferry.proto.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("17b", 17),
        ("1k", 1 << 10),
        ("512 MiB", 512 << 20),
        ("512 mb", 512 << 20),
        (" 64GiB ", 64 << 30),
        ("64g", 64 << 30),
        ("1.5T", 3 << 39),
        ("0.5 KiB", 512),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "1e9", "1 000", "1,5GiB", "64 GiBs", "64P", "0x10", "64 Gi B", "1.", "ten"],
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="64GiB") as caught:
        parse_bytes(text)
    assert (caught.value.code, caught.value.value) == (Code.BAD_CONFIG, text)
