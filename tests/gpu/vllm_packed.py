"""Packed KV against KV as it is, with vLLM: are the answers equal to the last bit?

    python tests/gpu/vllm_packed.py [--prompts 16] [--json FILE]

Two engines with equal weights, one of which packs, answer the same prompts one at a time: computed,
then from the GPU's cache, then from host memory. So both engines compute the same batches, and
loaded KV that differs in one bit can differ in its log probabilities. Prints a line per finding.
Exits with status 1 if an answer differs, nothing was loaded, or blocks could not be packed.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvferry.client import OffloadClient
from support.vllm_measure import Record, print_figures
from support.vllm_process import VLLM, GpuDaemon, make_prompts

TOKENS, GENERATED, POOL = 2048, 32, 4 << 30
ENGINE: Record = {
    "kv_cache_memory_bytes": 4 << 30,
    "gpu_memory_utilization": 0.05,
    "sensitive": True,
}
KINDS = "computed", "GPU hit", "loaded"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with ThreadPoolExecutor() as pool:  # answers are compared, not times
        packed, plain = pool.map(lambda pack: answers(pack, chosen.prompts), ("on", "off"))
    rows = [compare(kind, packed[kind], plain[kind]) for kind in KINDS]
    rows.append({"what": "loaded and GPU hit", **equal(packed["loaded"], packed["GPU hit"])})
    rows += [{"what": "blocks, packed", **blocks} for blocks in packed["blocks"]]
    rows += [{"what": "blocks, as they are", **blocks} for blocks in plain["blocks"]]
    for row in rows:
        print_figures(**row)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1))
    loaded = min(answer["cached"] for answer in packed["loaded"])
    fine = (
        all(row["equal"] == chosen.prompts for row in rows if row["what"] in KINDS)
        and loaded >= TOKENS - 64
        and not any(blocks["unpackable"] for blocks in packed["blocks"])
    )
    sys.exit(0 if fine else 1)


def answers(pack: str, count: int) -> dict[str, list[Record]]:
    """The answers of an engine, by kind, and the blocks of its namespace."""
    prompts = make_prompts(count, 31, TOKENS)
    with GpuDaemon(pool=str(POOL)) as daemon:
        extra = {"kvferry_dirs": daemon.directory, "kvferry_pack": pack}
        found: dict[str, list[Record]] = {}
        with VLLM(extra=extra, **ENGINE) as engine:
            for kind in KINDS:
                if kind == "loaded":
                    engine.settle()
                    engine.forget()
                found[kind] = [engine.generate([ids], GENERATED)[0] for ids in prompts]
            with OffloadClient(daemon.directory, engine="observer") as client:
                found["blocks"] = [
                    {
                        "bytes": namespace.block_bytes,
                        "in_pool": namespace.blocks,
                        "stored": namespace.stored,
                        "unpackable": namespace.stores_unpackable,
                    }
                    for namespace in client.namespaces()
                ]
    return found


def compare(kind: str, packed: list[Record], plain: list[Record]) -> Record:
    cached = [sum(answer["cached"] for answer in each) for each in (packed, plain)]
    return {"what": kind, **equal(packed, plain), "cached": cached}


def equal(first: list[Record], second: list[Record]) -> Record:
    """How many answers have the same tokens and the same log probabilities, to the last bit."""
    pairs = zip(first, second, strict=True)
    same = [a["tokens"] == b["tokens"] and a["top"] == b["top"] for a, b in pairs]
    return {"equal": sum(same), "of": len(same)}


if __name__ == "__main__":
    main()
