"""Replays a trace of prompts against a daemon: the hits, and those that the daemon expects.

    python tests/bench/replay_trace.py --trace conversation.jsonl.gz

The trace has the format of Mooncake's (see `kvferry size`). Each prompt looks its blocks up until
one is missing, touches all of them and stores those that are missing, as an engine does whose GPU
keeps nothing. With --touch-last it stores first, as vLLM's connector mostly does. Found: the share
of all blocks of prompts. Expected: what `kvferry status` shows at the end for half, as many, twice
and four times the blocks. Each block has 64 bytes.

With --hints each replay runs once more, and a prompt is released if its conversation ends with it:
no later prompt of the trace begins with all of its full blocks.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.many_keys import FILL, LAYOUT, PAGE
from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    OffloadKey,
)
from kvferry.proto.opening import POLICIES
from kvferry.proto.status import NamespaceStatus

FINGERPRINT = Fingerprint("bench", PAGE, key_bytes=32)
LEAST_POOL = 8 << 20
BLOCK_TOKENS = 512


@dataclass
class Prompt:
    """keys: of its blocks. full: how many of them are full, so that a longer prompt has them, too.
    ends: whether no later prompt has these."""

    keys: list[OffloadKey]
    full: int
    ends: bool = False


def read_prompts(path: Path, count: int) -> list[Prompt]:
    prompts = []
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            keys = [hashlib.sha256(str(number).encode()).digest() for number in row["hash_ids"]]
            prompts.append(Prompt(keys, row["input_length"] // BLOCK_TOKENS))
    later = set[OffloadKey]()  # a key is a hash of all tokens up to its block
    for prompt in reversed(prompts):
        prompt.ends = not later.intersection(prompt.keys[: prompt.full][-1:])
        later.update(prompt.keys)
    return prompts


class Replay:
    """An engine without a cache of its own."""

    def __init__(self, client: OffloadClient, *, touch_last: bool, hints: bool) -> None:
        self.client, self.manager = client, OffloadingManager(client)
        self.touch_last, self.hints = touch_last, hints
        self.asked = self.found = self.jobs = 0

    def run_prompt(self, prompt: Prompt) -> None:
        keys = prompt.keys
        self.asked += len(keys)
        for key in keys:
            if self.manager.lookup(key) is not Lookup.HIT:
                break
            self.found += 1
        if not self.touch_last:
            self._touch(keys)
        output = self.manager.prepare_store(keys)
        new = () if output is None else tuple(output.keys_to_store)
        for at in range(0, len(new), FILL):
            part = new[at : at + FILL]
            spec = GPULoadStoreSpec(np.arange(len(part))), KeyLoadStoreSpec(part)
            self.client.transfer_async(self.jobs, spec)
            self.client.wait([self.jobs])
            self.jobs += 1
        self.client.get_finished()
        self.manager.complete_store(new)
        if self.touch_last:
            self._touch(keys)
        if self.hints and prompt.ends:
            self.manager.release(keys)

    def _touch(self, keys: list[OffloadKey]) -> None:
        self.manager.touch(keys)
        self.manager.flush()


def replay(
    prompts: list[Prompt], blocks: int, policy: str, *, touch_last: bool, hints: bool
) -> None:
    pool = max(LEAST_POOL, 2 * blocks * PAGE)
    with (
        LocalDaemon(pool_bytes=pool) as daemon,
        OffloadClient(daemon.directory, engine="replay") as client,
    ):
        client.open_namespace(FINGERPRINT, cpu_bytes_to_use=blocks * PAGE, eviction_policy=policy)
        client.allocate_kv_caches(LAYOUT)
        engine = Replay(client, touch_last=touch_last, hints=hints)
        for prompt in prompts:
            engine.run_prompt(prompt)
        (status,) = client.namespaces()
        found, expected = engine.found / engine.asked, " ".join(_rates(status))
        name = f"{policy}+hints" if hints else policy
        print(f"{blocks:>8} {name:<12} {found:>7.2%}   {expected}", flush=True)


def _rates(status: NamespaceStatus) -> Iterator[str]:
    rates = status.hit_rate_half, status.hit_rate, status.hit_rate_double
    for rate in (*rates, status.hit_rate_quadruple):
        yield "      -" if rate is None else f"{rate:>7.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--blocks", default="1250,2500,5000,10000,20000")
    parser.add_argument("--prompts", type=int, default=6000)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--touch-last", action="store_true")
    parser.add_argument("--hints", action="store_true")
    options = parser.parse_args()
    prompts = read_prompts(options.trace, options.prompts)
    print(f"{'blocks':>8} {'policy':<12} {'found':>7}   expected: x 0.5   x 1     x 2     x 4")
    for blocks in map(int, options.blocks.split(",")):
        for policy in options.policies.split(","):
            for hints in (False, True) if options.hints else (False,):
                replay(prompts, blocks, policy, touch_last=options.touch_last, hints=hints)


if __name__ == "__main__":
    main()
