"""Packs and unpacks tiles of bfloat16 values on the CPU, as kernels.cu does on a GPU.

The format: kvferry.proto.packing. Used by the reference engine, on any thread.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvferry.proto.layout import Bools
from kvferry.proto.packing import PACKED_TILE_BYTES, TILE_BYTES

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

VALUES = TILE_BYTES // 2
ESCAPES = 30
# Codes of values whose exponent is 0, and of those whose exponent is an escape.
ZERO, ESCAPED = 14, 15
# Offsets in a packed tile.
_CODES, _LARGEST, _COUNT, _ESCAPES = (
    VALUES,
    VALUES * 3 // 2,
    VALUES * 3 // 2 + 1,
    VALUES * 3 // 2 + 2,
)


def pack_tiles(tiles: Bytes) -> tuple[Bytes, Bools]:
    """Pack tiles. tiles: (n, TILE_BYTES).

    Returns (n, PACKED_TILE_BYTES), and for each tile whether it has few enough escapes; if not, its
    packed bytes are not those of the tile.
    """
    values = tiles.view("<u2")
    exponents = (values >> 7).astype(np.uint8)
    largest = exponents.max(axis=1)
    codes = largest[:, None] - exponents
    codes[codes >= ZERO] = ESCAPED
    codes[exponents == 0] = ZERO
    packed = np.zeros((len(tiles), PACKED_TILE_BYTES), np.uint8)
    packed[:, :_CODES] = (values >> 8 & 0x80) | (values & 0x7F)
    packed[:, _CODES:_LARGEST] = codes[:, ::2] | codes[:, 1::2] << 4
    packed[:, _LARGEST] = largest
    rows, columns = np.nonzero(codes == ESCAPED)
    places, counts = _places(rows, len(tiles))
    packed[:, _COUNT] = np.minimum(counts, 255)
    fits = places < ESCAPES
    packed[rows[fits], _ESCAPES + places[fits]] = exponents[rows[fits], columns[fits]]
    return packed, counts <= ESCAPES


def unpack_tiles(packed: Bytes) -> Bytes:
    """Unpack tiles: the inverse of `pack_tiles`. Any bytes give some tile, without an error.

    packed: (n, PACKED_TILE_BYTES). Returns (n, TILE_BYTES).
    """
    codes = np.empty((len(packed), VALUES), np.uint8)
    codes[:, ::2] = packed[:, _CODES:_LARGEST] & 0x0F
    codes[:, 1::2] = packed[:, _CODES:_LARGEST] >> 4
    exponents = packed[:, _LARGEST, None] - codes
    exponents[codes == ZERO] = 0
    rows, columns = np.nonzero(codes == ESCAPED)
    places, _ = _places(rows, len(packed))
    exponents[rows, columns] = packed[rows, _ESCAPES + np.minimum(places, ESCAPES - 1)]
    rest = packed[:, :_CODES].astype("<u2")
    values = (rest & 0x80) << 8 | (rest & 0x7F) | exponents.astype("<u2") << 7
    return values.view(np.uint8)


def _places(
    rows: np.ndarray[Any, np.dtype[np.intp]], tiles: int
) -> tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.intp]]]:
    """The number of each escape within its tile, and the number of escapes of each tile."""
    counts = np.bincount(rows, minlength=tiles)
    return np.arange(rows.size) - (np.cumsum(counts) - counts)[rows], counts
