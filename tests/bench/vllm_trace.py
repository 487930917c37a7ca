"""Replays a trace of prompts through vLLM's own scheduler and a daemon: the hits of both memories.

    python tests/bench/vllm_trace.py --trace conversation.jsonl.gz [--gpu 5000] [--host 1,2,4]

Run it with vLLM's environment (`make vllm`). The trace has the format of Mooncake's (see `kvferry
size`); each of its blocks becomes a block of 16 tokens, in the GPU and in host memory. One prompt
at a time; the worker is a process without a GPU that copies and compares all KV. Printed: the share
of the tokens of all prompts that were found, and the part of it that was beyond the GPU; the chunks
that the GPU lost before they were stored.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import warnings
from itertools import count, islice
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTHONHASHSEED", "0")
warnings.filterwarnings("ignore")

TOKENS_PER_STEP = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--gpu", type=int, default=5000, help="blocks of the GPU's cache")
    parser.add_argument("--host", default="1,2,4", help="sizes of host memory, as multiples of it")
    parser.add_argument("--modes", default="at_once,auto", help="of kvferry_store")
    parser.add_argument("--policies", default="lru")
    parser.add_argument("--prompts", type=int, default=1 << 30)
    chosen = parser.parse_args()
    with gzip.open(chosen.trace) if chosen.trace.suffix == ".gz" else chosen.trace.open("rb") as f:
        prompts = [json.loads(line)["hash_ids"] for line in islice(f, chosen.prompts)]
    print("    gpu    host store        policy    found  beyond    lost")
    for times in map(float, chosen.host.split(",")):
        for policy in chosen.policies.split(","):
            for mode in chosen.modes.split(","):
                host = int(times * chosen.gpu)
                found, beyond, lost = replay(prompts, chosen.gpu, host, mode, policy)
                print(
                    f"{chosen.gpu:>7} {host:>7} {mode:<12} {policy:<7} "
                    f"{found:>7.1%} {beyond:>7.1%} {lost:>7.2%}",
                    flush=True,
                )


def replay(
    prompts: list[list[int]], gpu: int, host: int, mode: str, policy: str
) -> tuple[float, float, float]:
    """Shares of tokens found, and found beyond the GPU; and of evicted chunks that were lost."""
    from kvferry.client import LocalDaemon
    from support import vllm_core
    from support.vllm_runner import PAGE, TOKENS

    with LocalDaemon(pool_bytes=max(8 << 20, 2 * host * PAGE)) as daemon:
        extra = vllm_core.kvferry_options(daemon.directory, host * PAGE)
        extra |= {"kvferry_store": mode, "blocks_per_chunk": 1, "eviction_policy": policy}
        engine = vllm_core.EngineCore(
            daemon.directory,
            ("full",),
            blocks=gpu + 1,
            kv_connector_extra_config=extra,
            longest=TOKENS * (max(map(len, prompts)) + 1),
            batch=TOKENS_PER_STEP,
        )
        evicted, lost = count_evictions(engine)
        found = total = 0
        for ids in prompts:
            tokens = [token for n in ids for token in block_of(n, TOKENS)]
            name = engine.add(tokens, 1)
            engine.run_until(lambda name=name: name in engine.finished)
            found, total = found + engine.finished[name], total + len(tokens)
        if engine.wrong:
            raise SystemExit(f"wrong KV was read: {engine.wrong[:3]}")
        engine.close()
    beyond = sum(engine.sources.values())
    return found / total, beyond / total, (next(lost) / max(1, next(evicted)))


def block_of(number: int, tokens: int) -> list[int]:
    """The tokens of a block of the trace."""
    return [number % 997, number // 997 % 997, *([1] * (tokens - 2))]


def count_evictions(engine: Any) -> tuple[Any, Any]:
    """Count the chunks that the GPU evicts, and those that host memory does not have then."""
    evicted, lost = count(), count()
    pool = engine.scheduler.kv_cache_manager.block_pool
    evict = pool._maybe_evict_cached_block

    def counted(block: Any) -> Any:
        if (key := block.block_hash) is not None:
            next(evicted)
            manager = engine.manager
            if key not in manager.ready_keys[0] and key not in manager._offered:
                next(lost)
        return evict(block)

    pool._maybe_evict_cached_block = counted
    return evicted, lost


if __name__ == "__main__":
    main()
