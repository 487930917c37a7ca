"""Benefit and cost of a Mooncake Store with vLLM: two engines, a daemon each, and one store.

    python tests/gpu/mooncake_figures.py shared,dead [--reps 5] [--json FILE]

shared  time to first token of a prompt that engine A has stored and engine B loads: from the store,
        then from the pool of B's daemon, compared with computing a prompt
dead    new prompts in a row, and at once, while the store's processes are stopped (SIGSTOP),
        compared with an engine whose daemon has no tier

All processes run on this machine: the engines on one GPU, the store in host memory, over TCP.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvferry.testing.mooncake_store import MooncakeStore
from support.vllm_measure import (
    Record,
    alternate,
    ask_at_once,
    ask_in_a_row,
    choose_figures,
    print_figures,
    summary,
    tier_of,
    wait_written,
)
from support.vllm_models import LARGE
from support.vllm_process import VLLM, GpuDaemon, make_prompts

TOKENS = 16384
POOL_GIB, STORE_GIB = 10, 64


@dataclass
class SharingEngines:
    """Two engines whose daemons share a Mooncake Store.

    engines, daemons: of A and B. new: seeds of prompts that no engine has computed.
    """

    store: MooncakeStore
    daemons: list[GpuDaemon]
    engines: list[VLLM]
    new: Iterator[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=1, help="of 8: that part of the bytes")
    parser.add_argument("--json", type=Path, default=Path("mooncake-figures.json"))
    chosen, what = choose_figures(parser, FIGURES)
    record: Record = {}
    with start_engines(chosen.kv_heads) as cluster:
        for name in what:
            rows = FIGURES[name](cluster, chosen.reps)
            columns = [key for key in rows[0] if key != "connector"]
            record[name] = {"rows": rows, "figures": summary(name, rows, *columns)}
            chosen.json.write_text(json.dumps(record, indent=1))


@contextmanager
def start_engines(kv_heads: int) -> Iterator[SharingEngines]:
    part = kv_heads / 8
    with ExitStack() as running:
        store = running.enter_context(MooncakeStore(segment_bytes=int(part * STORE_GIB * 2**30)))
        cluster = SharingEngines(store, [], [], count(1000))
        for name in "A", "B":
            daemon = GpuDaemon(
                pool=f"{part * POOL_GIB}GiB",
                tiers_mooncake_master=store.address,
                tiers_mooncake_write="write_through",
                tiers_mooncake_admit_after=1,
            )
            cluster.daemons.append(running.enter_context(daemon))
            host = int(part * POOL_GIB * 2**30)
            engine = VLLM(
                model=LARGE | {"num_key_value_heads": kv_heads},
                extra={"kvferry_dirs": daemon.directory, "cpu_bytes_to_use": host},
                gpu_memory_utilization=0.42,
                max_model_len=TOKENS + 1024,
                max_num_seqs=64,
            )
            cluster.engines.append(running.enter_context(engine))
            print_figures("started", engine=name)
        for engine in cluster.engines:
            for _ in range(2):
                engine.timed(make_prompts(1, next(cluster.new), TOKENS))
        yield cluster


def shared(cluster: SharingEngines, reps: int) -> list[Record]:
    (a, b), rows = cluster.engines, list[Record]()
    for number in range(-1, reps):
        prompts = make_prompts(1, next(cluster.new), TOKENS)
        a.timed(prompts)
        a.settle()
        wait_written(cluster.daemons[0].directory)
        computed, _ = b.timed(make_prompts(1, next(cluster.new), TOKENS))
        b.settle()
        before = tier_of(cluster.daemons[1].directory)
        from_store, cached = b.timed(prompts)
        after = tier_of(cluster.daemons[1].directory)
        b.settle()
        b.forget()
        host, host_cached = b.timed(prompts)
        row = {
            "connector": "mooncake",
            "store_ms": 1e3 * from_store,
            "host_ms": 1e3 * host,
            "computed_ms": 1e3 * computed,
            "of_computed": from_store / computed,
            "found": cached / TOKENS,
            "host_found": host_cached / TOKENS,
            "promoted": after.promoted - before.promoted,
        }
        print_figures("shared", round=number, **row)
        if number >= 0:
            rows.append(row)
    print_figures("tier", **{key: getattr(after, key) for key in after.__struct_fields__})
    return rows


def dead(cluster: SharingEngines, reps: int) -> list[Record]:
    """A's daemon has no tier. The tier of B's daemon does not reply."""
    cluster.daemons[0].restart()
    cluster.store.pause_master()
    cluster.store.pause_store()

    def measure(engine: VLLM) -> Record:
        in_a_row = ask_in_a_row(engine, next(cluster.new), TOKENS)
        return {"cold_ms": in_a_row, "tokens_s": ask_at_once(engine, next(cluster.new))}

    engines = dict(zip(("none", "mooncake"), cluster.engines, strict=True))
    for engine in engines.values():  # A's engine reconnects
        engine.settle()
    try:
        return alternate(engines, "dead", reps, measure)
    finally:
        cluster.store.resume_store()
        cluster.store.resume_master()


FIGURES: dict[str, Callable[[SharingEngines, int], list[Record]]] = {"shared": shared, "dead": dead}

if __name__ == "__main__":
    main()
