"""Whether host blocks are packed: if all KV is bfloat16, it takes 77 % of the bytes, bit for bit.

The scheduler's process and the workers' must decide alike, so only vLLM's configuration counts.
Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvferry.client.engines.options import PACK, PackMode, bad_option, read_pack_mode
from kvferry.proto.packing import TILE_BYTES


def packs(vllm_config: Any, groups: Sequence[Any], block_bytes: int, *, rows: bool) -> bool:
    """Whether the offloaded groups are packed. Raises Refused (BAD_CONFIG) if they cannot be, and
    the user wants it.

    block_bytes: of a GPU block. rows: whether one buffer has the blocks of groups of several sizes.
    """
    mode = read_pack_mode(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if mode is PackMode.OFF:
        return False
    if reason := next(_obstacles(vllm_config, groups, block_bytes, rows=rows), None):
        if mode is PackMode.ON:
            raise bad_option(PACK, mode.value, f"not possible: {reason}", "set it to 'auto'")
        return False
    return mode is PackMode.ON or _on_gpu()


def _obstacles(
    vllm_config: Any, groups: Sequence[Any], block_bytes: int, *, rows: bool
) -> Iterator[str]:
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield "with pipeline parallelism the scheduler does not know all layers"
    if rows:
        yield "the KV cache groups have blocks of several sizes"
    for group in groups:
        for spec in _layer_specs(group):
            dtype = str(getattr(spec, "dtype", "of several types")).removeprefix("torch.")
            if dtype != "bfloat16" or hasattr(spec, "dtypes"):
                yield f"{type(spec).__name__} has KV that is {dtype}, not bfloat16"
            # K and V of a page may be tensors of their own.
            page = getattr(spec, "real_page_size_bytes", 0) or getattr(spec, "page_size_bytes", 1)
            if page % (2 * TILE_BYTES):
                yield f"a page has {page} bytes, no multiple of {2 * TILE_BYTES}"
    # The scheduler knows one layer of each group. All others are like it if as many fill a block.
    layers = max(len(group.layer_names) for group in groups)
    if {layers * _layer_specs(group)[0].page_size_bytes for group in groups} != {block_bytes}:
        yield "the layers have pages of several sizes"
    if block_bytes % TILE_BYTES:
        yield f"a GPU block has {block_bytes} bytes, no multiple of {TILE_BYTES}"


def _layer_specs(group: Any) -> tuple[Any, ...]:
    """The specs that this process knows: in the scheduler, one of each group."""
    spec = getattr(group, "kv_cache_spec", None)
    layers = getattr(spec, "kv_cache_specs", None)
    return tuple(layers.values()) if layers else (spec,)


def _on_gpu() -> bool:
    with suppress(ImportError):
        from vllm.platforms import current_platform

        return bool(current_platform.is_cuda())
    return False
