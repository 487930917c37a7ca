"""KVFerryLinker of a server that runs on CPUs, whose KV pools SGLang does not allocate in shared
memory. For SGLang's --unified-cache-external-linker-config. Needs SGLang."""

from __future__ import annotations

from typing import Any

from kvferry.client.sglang.linker import KVFerryLinker
from support.sglang_pools import share


class SharedLinker(KVFerryLinker):
    def __init__(self, server_args: Any, params: Any, **options: Any) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        share([*pool.k_buffer, *pool.v_buffer])
        super().__init__(server_args, params, **options)
