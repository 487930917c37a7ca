"""What replicas of one model gain from siblings: two daemons, and an engine beside each.

    python tests/gpu/sibling_figures.py [ttft,reads,chat,mla] [--devices 0,1] [--reps 7]

ttft    time to first token of 16,384 tokens, Llama-3.1-8B's shape. The first engine computes and
        stores a prompt. The second one is asked for it: that loads blocks of the sibling. Then its
        GPU's cache is emptied, it stores another prompt, and loads that: blocks of its own daemon
reads   time to first token of prompts in the first daemon's pool: alone, and while the second
        engine loads from that pool without a pause
chat    conversations of four rounds, each round of each at one of two engines, chosen at random.
        Before every round the GPUs' caches are emptied. `isolated`: daemons that are no siblings;
        `vllm`: vLLM's own connector, with two GPUs
mla     two ranks of one engine with multi-head latent attention: bytes stored in both pools, and
        time to first token of a prompt in host memory. `alone`: daemons that are no siblings

With `--devices 0,0` both engines are on one GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from kvferry.client import OffloadClient
from support.vllm_measure import Record, measure_link, print_figures, summary
from support.vllm_models import DEEPSEEK, FAMILIES, LARGE, kv_bytes
from support.vllm_process import VLLM, GpuDaemon, make_prompts, restart_as_siblings

TOKENS = 16384
# With as many layers as large models have.
MANY_LAYERS = DEEPSEEK | {"num_hidden_layers": 48}
CONVERSATIONS, ROUNDS, STEP, GENERATED = 16, 4, 2048, 32
# Loads of each kind in `reads`: enough for a 99th percentile.
READS = 200
# Of each engine. The size is given, so that no engine measures free memory while another starts.
KV_BYTES = 12 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", default="ttft,chat")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--host-gib", type=int, default=24, help="of each daemon")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    record: Record = {"link_gbs": measure_link()}
    print_figures("link", gbs=record["link_gbs"])
    devices = [int(device) for device in chosen.devices.split(",")]
    with ExitStack() as running:
        daemons = start_daemons(running, devices, f"{chosen.host_gib}GiB")
        if "mla" in chosen.what:
            record["mla"] = measure_mla(daemons, chosen.reps)
            restart_as_siblings(*daemons)
        kinds = ["siblings", "isolated"]
        if {"ttft", "reads", "chat"} & set(chosen.what.split(",")):
            wanted = [
                ("kvferry", d, {"kvferry_dirs": each.directory})
                for d, each in zip(devices, daemons, strict=True)
            ]
            if "chat" in chosen.what and len(set(devices)) > 1:
                kinds.append("vllm")
                wanted += [("vllm", device, {}) for device in devices]
            started = start_engines(running, chosen.host_gib, wanted)
            engines, own = started[:2], started[2:]
        if "reads" in chosen.what:
            record["reads"] = measure_reads(engines)
        if "ttft" in chosen.what:
            rows = [measure_ttft(engines, daemons[1], n) for n in range(-2, chosen.reps)][2:]
            record["ttft"] = rows
            summary("ttft", rows, "cold_ms", "sibling_ms", "own_ms", "ratio")
        if "chat" in chosen.what:
            record["chat"] = []
            for kind in kinds:
                if kind == "isolated":
                    for daemon in daemons:
                        daemon.restart(siblings_enabled="false")
                for number in range(-1, chosen.reps):
                    row = measure_chat(own if kind == "vllm" else engines, number)
                    print_figures(f"chat {kind}", round=number, **row)
                    if number >= 0:
                        record["chat"].append({"connector": kind, **row})
            summary("chat", record["chat"], "later_s", "requests_s", "cached")
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(record, indent=1))


def start_daemons(running: ExitStack, devices: Sequence[int], pool: str) -> list[GpuDaemon]:
    daemons = [running.enter_context(GpuDaemon(device, pool)) for device in devices]
    restart_as_siblings(*daemons)
    return daemons


def start_engines(
    running: ExitStack, host_gib: int, wanted: Sequence[tuple[str, int, dict[str, Any]]]
) -> list[VLLM]:
    """Start engines at the same time. wanted: connector, device and options of each."""
    start = partial(VLLM, model=LARGE, max_model_len=TOKENS + 1024, kv_cache_memory_bytes=KV_BYTES)
    host = {"cpu_bytes_to_use": host_gib << 30}
    with ThreadPoolExecutor(len(wanted)) as threads:
        started = [
            threads.submit(start, connector, extra=host | extra, device=device)
            for connector, device, extra in wanted
        ]
        engines = [running.enter_context(each.result()) for each in started]
    print_figures("started", engines=len(engines))
    return engines


def measure_mla(daemons: Sequence[GpuDaemon], reps: int) -> Record:
    """Rows of each kind, and the bytes that one prompt takes in both pools."""
    rows, stored = list[Record](), dict[str, int]()
    for kind in ("siblings", "alone"):
        if kind == "alone":
            for daemon in daemons:
                daemon.restart(siblings_enabled="false")
        extra = {"cpu_bytes_to_use": 16 << 30, "kvferry_dirs": [d.directory for d in daemons]}
        engine = VLLM(
            model=MANY_LAYERS,
            extra=extra,
            tensor_parallel_size=2,
            max_model_len=TOKENS + 1024,
            enforce_eager=True,
            **FAMILIES["mla"].options,
        )
        with engine:
            for number in range(-2, reps):
                before = stored_bytes(daemons)
                prompt = make_prompts(1, 300 + number, TOKENS)
                cold, _ = engine.timed(prompt)
                engine.settle()
                stored[kind] = stored_bytes(daemons) - before
                engine.forget()
                host, cached = engine.timed(prompt)
                row: Record = {
                    "cold_ms": 1e3 * cold,
                    "host_ms": 1e3 * host,
                    "gpu_ms": 1e3 * time_gpu_hit(engine, prompt),
                    "cached": cached,
                }
                print_figures(f"mla {kind}", round=number, stored_mib=stored[kind] >> 20, **row)
                if number >= 0:
                    rows.append({"connector": kind, **row})
    summary("mla", rows, "cold_ms", "host_ms", "gpu_ms")
    return {"rows": rows, "stored_bytes": stored}


def stored_bytes(daemons: Sequence[GpuDaemon]) -> int:
    total = 0
    for daemon in daemons:
        with OffloadClient(daemon.directory, engine="observer") as client:
            total += sum(each.ready * each.block_bytes for each in client.namespaces())
    return total


def measure_ttft(engines: Sequence[VLLM], daemon: GpuDaemon, number: int) -> Record:
    first, second = engines
    theirs, own = (
        make_prompts(1, 200 + 2 * number, TOKENS),
        make_prompts(1, 201 + 2 * number, TOKENS),
    )
    cold = first.timed(theirs)[0]
    second.timed(own)
    for engine in engines:
        engine.settle()
    second.forget()
    gpu = time_gpu_hit(second, own)
    second.forget()
    sibling, copied = second.timed(theirs)
    second.settle()
    second.forget()
    loaded, cached = second.timed(own)
    with OffloadClient(daemon.directory, engine="observer") as client:
        (status,) = client.status().siblings
    row: Record = {
        "cold_ms": 1e3 * cold,
        "sibling_ms": 1e3 * sibling,
        "own_ms": 1e3 * loaded,
        "gpu_ms": 1e3 * gpu,
        "ratio": sibling / loaded,
        "cached": (copied, cached),
        "loaded_gib": status.loaded_bytes / 2**30,
        "copied": status.copied,
    }
    print_figures("ttft", round=number, **row)
    return {"connector": "kvferry", **row}


def measure_reads(engines: Sequence[VLLM]) -> list[Record]:
    first, second = engines
    prompts = make_prompts(8, 900, TOKENS)
    for prompt in prompts:
        first.timed([prompt])
    first.settle()
    rows = []
    for kind in ("alone", "beside", "alone", "beside"):
        ended = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            if kind == "beside":
                reading = threads.submit(load_until, ended, second, prompts)
            loads = [load_again(first, prompts, number) for number in range(READS // 2)]
            ended.set()
        times = sorted(1e3 * seconds for seconds, _ in loads)
        row: Record = {
            "connector": kind,
            "p50_ms": statistics.median(times),
            "p99_ms": times[int(0.99 * len(times))],
            "cached": min(cached for _, cached in loads),
            "sibling_loads": reading.result() if kind == "beside" else 0,
        }
        print_figures("reads", **row)
        rows.append(row)
    return rows


def load_until(ended: threading.Event, engine: VLLM, prompts: Sequence[list[int]]) -> int:
    """Load prompts from host memory, one after the other. Returns how many."""
    for number in count():
        if ended.is_set():
            break
        load_again(engine, prompts, number)
    return number


def load_again(engine: VLLM, prompts: Sequence[list[int]], number: int) -> tuple[float, int]:
    """Time one of the prompts, which the GPU's cache does not have."""
    engine.forget()
    return engine.timed([prompts[number % len(prompts)]])


def time_gpu_hit(engine: VLLM, prompt: list[list[int]]) -> float:
    engine.timed(prompt)
    return statistics.median(engine.timed(prompt)[0] for _ in range(3))


def measure_chat(engines: Sequence[VLLM], number: int) -> Record:
    rng = random.Random(number)
    prompts = make_prompts(CONVERSATIONS, 1500 + number, ROUNDS * STEP)
    seconds, cached = list[float](), 0
    with ThreadPoolExecutor(len(engines)) as threads:
        for turn in range(1, ROUNDS + 1):
            parts: list[list[list[int]]] = [[] for _ in engines]
            for ids in prompts:
                rng.choice(parts).append(ids[: turn * STEP])
            begun = time.perf_counter()
            asked = [
                threads.submit(engine.timed, part, GENERATED)
                for engine, part in zip(engines, parts, strict=True)
                if part
            ]
            cached += sum(each.result()[1] for each in asked)
            seconds.append(time.perf_counter() - begun)
            for engine in engines:
                engine.settle()
                engine.forget()
    later = sum(seconds[1:])
    tokens = CONVERSATIONS * STEP * sum(range(1, ROUNDS))
    return {
        "first_s": seconds[0],
        "later_s": later,
        "requests_s": CONVERSATIONS * (ROUNDS - 1) / later,
        "cached": cached / tokens,
        "gib": CONVERSATIONS * kv_bytes(LARGE, ROUNDS * STEP) / 2**30,
    }


if __name__ == "__main__":
    main()
