"""Whether answers of a chat that exceeds the GPU's cache are those of computing everything.

    python tests/gpu/vllm_conversations.py [--models small,windows] [--connectors none,kvferry]

48 conversations of four rounds are asked all at once in each round, with a GPU cache that holds a
quarter of them. First an engine without any cache computes all answers. Each conversation continues
with these answers, so that all engines get the same prompts. Then the log probabilities of each
answer are compared. The connector `none` has only the GPU's prefix cache: the distance of its
answers is what rounding alone causes, because a cached prefix is computed in other batches than a
whole prompt. Prints a line per engine and seed, and exits with status 1 if an answer of kvferry
differs by more than the tie of the family (vllm_models.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from support.answers import answer_distance
from support.vllm_measure import Record, print_figures
from support.vllm_models import FAMILIES, Family
from support.vllm_process import VLLM, GpuDaemon, make_prompts
from support.vllm_served import Prompts

CONVERSATIONS, ROUNDS, STEP, GENERATED = 48, 4, 512, 16
HOST = 6 << 30
# The KV cache has a fixed size, so that engines of several families can start beside each other.
ENGINE = {
    "kv_cache_memory_bytes": 3 << 30,
    "gpu_memory_utilization": 0.05,
    "max_model_len": 4096,
    "max_num_seqs": CONVERSATIONS,
}
# Seconds after which the daemon is killed, while blocks are loaded and stored.
KILL_SECONDS = 0.3
# The prompts and the answers of each round, by seed.
Chats = dict[int, list[tuple[Prompts, list[Record]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="small,windows", help=", ".join(FAMILIES))
    parser.add_argument("--connectors", default="none,kvferry")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows: list[Record] = []
    for name in chosen.models.split(","):
        family, connectors = FAMILIES[name], chosen.connectors.split(",")
        chats = compute(family, chosen.seeds)
        with ThreadPoolExecutor() as pool:  # answers are compared, not times
            found = pool.map(partial(compare, family, chats), connectors)
            for connector, compared in zip(connectors, found, strict=True):
                for row in compared:
                    print_figures(f"{name} {connector}", **row)
                    rows.append({"model": name, "connector": connector, **row})
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(rows, indent=1))
    sys.exit(any(row["differ"] for row in rows if row["connector"] == "kvferry"))


def compute(family: Family, seeds: int) -> Chats:
    """The answers of an engine that computes every token of every prompt."""
    chats: Chats = {}
    options = family.options | ENGINE | {"enable_prefix_caching": False}
    with VLLM("none", model=family.model, sensitive=True, **options) as engine:
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


def compare(family: Family, chats: Chats, connector: str) -> list[Record]:
    """For each seed the distances of the answers from the computed ones, in nats.

    With kvferry, the last round is then asked again while the daemon is killed.
    """
    options: dict[str, Any] = family.options | ENGINE
    options["num_gpu_blocks_override"] = family.gpu_blocks
    rows = []
    with GpuDaemon(pool=str(HOST)) as daemon:
        extra: Record = {"cpu_bytes_to_use": HOST}
        if connector == "kvferry":
            extra["kvferry_dirs"] = [daemon.directory]
        with VLLM(connector, model=family.model, extra=extra, sensitive=True, **options) as engine:
            for seed, rounds in chats.items():
                found = [answer for ids, _ in rounds for answer in engine.generate(ids, GENERATED)]
                expected = [answer for _, answers in rounds for answer in answers]
                rows.append({"seed": seed, **distances(family.tie, expected, found)})
            if connector == "kvferry":
                prompts, expected = rounds[-1]
                engine.send(do="generate", prompts=prompts, tokens=GENERATED)
                time.sleep(KILL_SECONDS)
                daemon.kill()
                found = engine.answer()["outputs"]
                after = distances(family.tie, expected, found)
                rows.append({"seed": seed, "killed": True, **after})
    return rows


def distances(tie: float, expected: list[Record], found: list[Record]) -> Record:
    pairs = list(zip(expected, found, strict=True))
    nats = sorted(answer_distance(*pair) for pair in pairs)
    return {
        "answers": len(nats),
        "differ": sum(each > tie for each in nats),
        "other_tokens": sum(a["tokens"] != b["tokens"] for a, b in pairs),
        "median": nats[len(nats) // 2],
        "largest": nats[-1],
        "cached": sum(answer["cached"] for answer in found),
    }


if __name__ == "__main__":
    main()
