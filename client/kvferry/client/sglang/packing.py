"""Whether host blocks are packed: bfloat16 KV then takes 77 % of the bytes, bit for bit.

Each rank decides for itself, by its pools; all ranks have pools of the same kinds. Called when a
server starts. Does not import SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from kvferry.client.engines.options import PACK, PackMode, bad_option
from kvferry.proto.packing import TILE_BYTES

if TYPE_CHECKING:
    from kvferry.client.sglang.pools import Source


def packs(mode: PackMode, sources: Sequence[Source]) -> bool:
    """Whether these sources are packed. Raises Refused (BAD_CONFIG) if they cannot be, and the user
    wants it."""
    if mode is PackMode.OFF:
        return False
    if reason := next(_obstacles(sources), None):
        if mode is PackMode.ON:
            raise bad_option(PACK, mode.value, f"not possible: {reason}", "set it to 'auto'")
        return False
    return mode is PackMode.ON or all(buffer.is_cuda for buffer in sources[0].buffers)


def _obstacles(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        if source.name != "kv":
            yield f"the model has {source.name} pages beside those of full attention"
        for buffer in source.buffers:
            if buffer.dtype != torch.bfloat16:
                dtype = str(buffer.dtype).removeprefix("torch.")
                yield f"a KV pool has values of {dtype}, not bfloat16"
            if (page := buffer.shape[1] * buffer.itemsize) % TILE_BYTES:
                yield f"a page of a layer has {page} bytes, no multiple of {TILE_BYTES}"
