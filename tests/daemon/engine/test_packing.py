"""Packing on the CPU: it gives back every bit, or says that it cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.engine.packing import ESCAPES, VALUES, pack_tiles, unpack_tiles
from kvferry.proto.packing import PACKED_TILE_BYTES, TILE_BYTES, packed_bytes

Values = np.ndarray[Any, np.dtype[np.uint16]]


def tiles_of(values: Values) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ascontiguousarray(values, "<u2").view(np.uint8).reshape(-1, TILE_BYTES)


def exponent(number: int) -> Values:
    """All 256 values with this exponent, NaN, infinities and subnormals included."""
    rest = np.arange(256, dtype=np.uint16)
    return ((rest & 0x80) << 8 | number << 7 | (rest & 0x7F)).astype(np.uint16)


def test_the_format() -> None:
    values = np.full(VALUES, 127 << 7, np.uint16)  # 1.0
    values[:5] = [0xC001, 113 << 7, 114 << 7, 0x8003, 112 << 7 | 5]
    packed, fits = pack_tiles(tiles_of(values))
    assert fits.all()
    assert packed.shape == (1, PACKED_TILE_BYTES)
    assert packed[0, :6].tolist() == [0x81, 0, 0, 0x83, 5, 0]  # sign and mantissa
    # Distances to 128: the first value's exponent. 15: an escape; 14: the exponent is 0.
    assert packed[0, 1024:1028].tolist() == [0xF0, 0xEF, 0x1F, 0x11]
    assert packed[0, 1536:1544].tolist() == [128, 3, 113, 114, 112, 0, 0, 0]
    assert packed_bytes(10 * TILE_BYTES) == 10 * PACKED_TILE_BYTES


def test_every_pattern_of_16_bits_is_given_back() -> None:
    for number in range(256):
        values = np.resize(exponent(number), VALUES)
        packed, fits = pack_tiles(tiles_of(values))
        assert fits.all()
        assert np.array_equal(unpack_tiles(packed), tiles_of(values))


@pytest.mark.parametrize(("far", "fits"), [(ESCAPES, True), (ESCAPES + 1, False), (900, False)])
def test_a_tile_with_too_many_escapes_is_reported(far: int, fits: bool) -> None:
    values = np.full((3, VALUES), 200 << 7, np.uint16)
    values[1, -far:] = np.random.default_rng(far).integers(1, 186, far) << 7
    packed, packable = pack_tiles(tiles_of(values))
    assert packable.tolist() == [True, fits, True]
    same = (unpack_tiles(packed) == tiles_of(values)).all(axis=1)
    assert same.tolist() == [True, fits, True]


@settings(max_examples=200)
@given(
    st.integers(0, 255),
    st.integers(0, 40),
    st.integers(0, 1 << 32),
)
def test_packed_values_are_given_back(largest: int, far: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    exponents = np.maximum(0, largest - rng.integers(0, 14, VALUES))
    exponents[rng.permutation(VALUES)[:far]] = rng.integers(0, largest + 1, far)
    rest = rng.integers(0, 256, VALUES)
    values = ((rest & 0x80) << 8 | exponents << 7 | (rest & 0x7F)).astype(np.uint16)
    packed, fits = pack_tiles(tiles_of(values))
    assert fits.all() or far > ESCAPES
    assert not fits.all() or np.array_equal(unpack_tiles(packed), tiles_of(values))


def test_any_bytes_are_unpacked_without_an_error() -> None:
    hostile = np.random.default_rng(5).integers(0, 256, (500, PACKED_TILE_BYTES), dtype=np.uint8)
    hostile[:100] = 0xFF
    assert unpack_tiles(hostile).shape == (500, TILE_BYTES)
