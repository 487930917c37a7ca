"""The size of packed bfloat16 values: 12.25 bits each, bit for bit.

Exponents of the values of a page are close to each other. So a tile of 1,024 values is stored as

    1,024 bytes   sign and mantissa of each value
      512 bytes   four bits of each value: 0 to 13, by how much its exponent is below the largest
                  one of the tile; 14, its exponent is 0; 15, its exponent is an escape
       32 bytes   the largest exponent, the number of escapes, and up to 30 escapes: exponents in
                  the order of their values

A tile that needs more escapes cannot be packed. The engines of the daemon pack and unpack
(kvferry.daemon.engine); clients need only the sizes.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

# Bytes of a tile, as bfloat16 and packed. Pages are whole tiles.
TILE_BYTES = 2048
PACKED_TILE_BYTES = 1568

Sizes = np.ndarray[Any, np.dtype[np.int64]]


@overload
def packed_bytes(nbytes: int) -> int: ...
@overload
def packed_bytes(nbytes: Sizes) -> Sizes: ...
def packed_bytes(nbytes: int | Sizes) -> int | Sizes:
    """The bytes of packed pages. nbytes: of the pages, multiples of TILE_BYTES."""
    return nbytes // TILE_BYTES * PACKED_TILE_BYTES
