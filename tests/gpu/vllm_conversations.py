"""Whether answers of a chat that exceeds the GPU's cache are those of computing everything.

    python tests/gpu/vllm_conversations.py [--models small,hybrid] [--connectors none,kvferry]

48 conversations of four rounds are asked all at once in each round, with a GPU cache that holds a
quarter of them. First an engine without any cache computes all answers. Each conversation continues
with these answers, so that all engines get the same prompts. Then the log probabilities of each
answer are compared. The connector `none` has only the GPU's prefix cache: the distance of its
answers is what rounding alone causes, because a cached prefix is computed in other batches than a
whole prompt. Prints a line per engine and seed, and exits with status 1 if an answer of kvferry
differs by more than TIE (sensitive_weights.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from support.sensitive_weights import TIE, answer_distance
from support.vllm_measure import Record, print_figures
from support.vllm_models import HYBRID, SMALL
from support.vllm_process import VLLM, GpuDaemon, make_prompts
from support.vllm_served import Prompts

CONVERSATIONS, ROUNDS, STEP, GENERATED = 48, 4, 512, 16
# GPU blocks of 16 tokens: a quarter of what the conversations need in their last round.
GPU_BLOCKS = CONVERSATIONS * ROUNDS * STEP // 16 // 4
HOST = 16 << 30
MODELS = {"small": SMALL, "hybrid": HYBRID}
# The prompts and the answers of each round, by seed.
Chats = dict[int, list[tuple[Prompts, list[Record]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="small,hybrid")
    parser.add_argument("--connectors", default="none,kvferry")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows: list[Record] = []
    for name in chosen.models.split(","):
        chats = compute(MODELS[name], chosen.seeds)
        for connector in chosen.connectors.split(","):
            for row in compare(MODELS[name], connector, chats):
                print_figures(f"{name} {connector}", **row)
                rows.append({"model": name, "connector": connector, **row})
                if chosen.json is not None:
                    chosen.json.write_text(json.dumps(rows, indent=1))
    sys.exit(any(row["differ"] for row in rows if row["connector"] == "kvferry"))


def compute(model: Record, seeds: int) -> Chats:
    """The answers of an engine that computes every token of every prompt."""
    chats: Chats = {}
    options: dict[str, Any] = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 8 << 30}
    with VLLM("none", model=model, sensitive=True, **options) as engine:
        for seed in range(seeds):
            prompts: Prompts = [[] for _ in range(CONVERSATIONS)]
            chats[seed] = []
            for number in range(ROUNDS):
                asked = make_prompts(CONVERSATIONS, 100 * seed + number + 5000, STEP)
                prompts = [ids + more for ids, more in zip(prompts, asked, strict=True)]
                answers = engine.generate(prompts, GENERATED)
                chats[seed].append((prompts, answers))
                pairs = zip(prompts, answers, strict=True)
                prompts = [ids + answer["tokens"] for ids, answer in pairs]
    return chats


def compare(model: Record, connector: str, chats: Chats) -> list[Record]:
    """For each seed the distances of the answers from the computed ones, in nats."""
    options: dict[str, Any] = {
        "num_gpu_blocks_override": GPU_BLOCKS,
        "kv_cache_memory_bytes": 8 << 30,
        "max_model_len": 4096,
    }
    rows = []
    with GpuDaemon(pool=str(HOST)) as daemon:
        extra: Record = {"cpu_bytes_to_use": HOST}
        if connector == "kvferry":
            extra["kvferry_dirs"] = [daemon.directory]
        with VLLM(connector, model=model, extra=extra, sensitive=True, **options) as engine:
            for seed, rounds in chats.items():
                found = [answer for ids, _ in rounds for answer in engine.generate(ids, GENERATED)]
                expected = [answer for _, answers in rounds for answer in answers]
                nats = sorted(answer_distance(*pair) for pair in zip(expected, found, strict=True))
                tokens = sum(
                    a["tokens"] != b["tokens"] for a, b in zip(expected, found, strict=True)
                )
                row = {
                    "seed": seed,
                    "answers": len(nats),
                    "differ": sum(each > TIE for each in nats),
                    "other_tokens": tokens,
                    "median": nats[len(nats) // 2],
                    "largest": nats[-1],
                    "cached": sum(answer["cached"] for answer in found),
                }
                rows.append(row)
    return rows


if __name__ == "__main__":
    main()
