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
        ("17B", 17),
        ("1Ki", 1 << 10),
        ("512 MiB", 512 << 20),
        (" 64GiB ", 64 << 30),
        ("64Gi", 64 << 30),
        ("1.5TiB", 3 << 39),
        ("0.5 KiB", 512),
        ("1k", 10**3),
        ("512 MB", 512 * 10**6),
        ("64G", 64 * 10**9),
        ("64GB", 64 * 10**9),
        ("64.1GB", 64_100_000_000),  # a float would be one byte less
        ("1.5T", 15 * 10**11),
        ("1e9", 10**9),
        ("6.87e+10", 68_700_000_000),
        ("6.8719476736E10", 64 << 30),
        ("1e-3Mi", 1048),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "-1", "1 000", "1_000", "1,5GiB", "64 GiBs", "64P", "0x10", "64 Gi B", "1."),
        *("ten", "e9", "1e", "1e999", "nan", "inf", "64g", "64gb", "64gib", "512m", "1K"),
    ],
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="64GiB") as caught:
        parse_bytes(text)
    assert (caught.value.code, caught.value.value) == (Code.BAD_CONFIG, text)
