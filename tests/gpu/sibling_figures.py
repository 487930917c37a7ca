"""What replicas of one model gain from siblings: two daemons, and an engine beside each.

    python tests/gpu/sibling_figures.py [figure,...] [--devices 0,1] [--reps 7]

ttft    time to first token of 16,384 tokens, Llama-3.1-8B's shape. The first engine computes and
        stores a prompt. The second one is asked for it: that loads blocks of the sibling. Then its
        GPU's cache is emptied, it stores another prompt, and loads that: blocks of its own daemon
fresh   tokens that the second engine finds of 16,384 whose first token the first engine has just
        returned, and its time to first token, by the pause between both; the first engine is idle
restart the first load from an engine's own pool after both daemons were restarted, by the pause
        between both
reads   time to first token of prompts in the first daemon's pool: alone, and while the second
        engine loads from that pool without a pause; and plain copies to the first GPU, alone and
        beside plain copies to the second
chat    conversations of four rounds, each round of each at one of two engines, chosen at random.
        Before every round the GPUs' caches are emptied, without a pause. `isolated`: daemons that
        are no siblings; `vllm`: vLLM's own connector, with two GPUs
mla     two ranks of one engine with multi-head latent attention: bytes that a prompt takes in both
        pools, and time to first token of a prompt in host memory. `alone`: another engine, whose
        daemons are no siblings; the engines are asked in turn. A GPU hit is no lower bound: it
        computes a block of tokens, and a host hit computes one token

With `--devices 0,0` both engines are on one GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

from kvferry.client import OffloadClient
from support.vllm_measure import Record, measure_link, print_figures, print_set, summary
from support.vllm_models import DEEPSEEK, FAMILIES, LARGE, kv_bytes
from support.vllm_process import VLLM, GpuDaemon, make_prompts, restart_as_siblings

TOKENS = 16384
# With as many layers as large models have.
MANY_LAYERS = DEEPSEEK | {"num_hidden_layers": 48}
CONVERSATIONS, ROUNDS, STEP, GENERATED = 16, 4, 2048, 32
# Seconds between the first engine's answer and the second engine's request, in `fresh`.
PAUSES = 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0
# Seconds between the restart of the daemons and the request, in `restart`.
AFTER_RESTART = 0.0, 1.0, 3.0
# Loads of each kind in `reads`: enough for a 99th percentile.
READS = 200
# Of each prompt in `mla`, by each engine.
LOADS = 10
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
    devices = [int(device) for device in chosen.devices.split(",")]
    record: Record = {"link_gbs": measure_link()}
    print_figures("link", gbs=record["link_gbs"])
    names = set(chosen.what.split(","))
    if "mla" in names:
        record["mla"] = measure_mla(devices, f"{chosen.host_gib}GiB", chosen.reps)
    if names - {"mla"}:
        record |= measure_replicas(names, devices, chosen.host_gib, chosen.reps)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(record, indent=1))


def measure_replicas(names: set[str], devices: list[int], host_gib: int, reps: int) -> Record:
    """Figures of two engines with one GPU each."""
    record: Record = {}
    with ExitStack() as running:
        daemons = start_daemons(running, devices, f"{host_gib}GiB")
        wanted = [
            ("kvferry", d, {"kvferry_dirs": each.directory})
            for d, each in zip(devices, daemons, strict=True)
        ]
        kinds = ["siblings", "isolated"]
        if "chat" in names and len(set(devices)) > 1:
            kinds.insert(1, "vllm")
            wanted += [("vllm", device, {}) for device in devices]
        started = start_engines(running, host_gib, wanted)
        engines, own = started[:2], started[2:]
        if "reads" in names:
            record["reads"] = measure_reads(engines, devices)
        if "ttft" in names:
            rows = [measure_ttft(engines, daemons[1], n) for n in range(-2, reps)][2:]
            record["ttft"] = rows
            summary("ttft", rows, "cold_ms", "sibling_ms", "own_ms", "ratio")
        if "fresh" in names:
            rows = [measure_fresh(engines, n, pause) for n in range(-1, reps) for pause in PAUSES]
            record["fresh"] = rows[len(PAUSES) :]
            summary("fresh", record["fresh"], "found", "second_ms")
        if "restart" in names:
            pauses = AFTER_RESTART * max(1, reps // 2)
            record["restart"] = [
                measure_restart(engines, daemons, number, pause)
                for number, pause in enumerate(pauses)
            ]
        if "chat" in names:
            record["chat"] = []
            gib = CONVERSATIONS * kv_bytes(LARGE, ROUNDS * STEP) / 2**30
            print_set("chat", gib, host_gib, "each daemon's host memory")
            for kind in kinds:
                if kind == "isolated":
                    for daemon in daemons:
                        daemon.restart(siblings_enabled="false")
                for number in range(-1, reps):
                    row = measure_chat(own if kind == "vllm" else engines, number)
                    print_figures(f"chat {kind}", round=number, **row)
                    if number >= 0:
                        record["chat"].append({"connector": kind, **row})
            summary("chat", record["chat"], "later_s", "requests_s", "found")
    return record


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
    return start_at_once(
        running,
        [partial(start, name, extra=host | extra, device=device) for name, device, extra in wanted],
    )


def start_at_once(running: ExitStack, starts: Sequence[Callable[[], VLLM]]) -> list[VLLM]:
    with ThreadPoolExecutor(len(starts)) as threads:
        started = [threads.submit(start) for start in starts]
        engines = [running.enter_context(each.result()) for each in started]
    print_figures("started", engines=len(engines))
    return engines


def measure_mla(devices: Sequence[int], pool: str, reps: int) -> Record:
    """Rows of each kind, and the bytes that one prompt takes in both pools."""
    rows, stored = list[Record](), dict[str, int]()
    with ExitStack() as running:
        daemons = {
            "siblings": start_daemons(running, devices, pool),
            "alone": [
                running.enter_context(GpuDaemon(device, pool, siblings_enabled="false"))
                for device in devices
            ],
        }
        start = partial(
            VLLM,
            model=MANY_LAYERS,
            tensor_parallel_size=2,
            max_model_len=TOKENS + 1024,
            kv_cache_memory_bytes=KV_BYTES,
            **FAMILIES["mla"].options,
        )
        extras = [
            {"cpu_bytes_to_use": 16 << 30, "kvferry_dirs": [d.directory for d in each]}
            for each in daemons.values()
        ]
        started = start_at_once(running, [partial(start, extra=extra) for extra in extras])
        engines = dict(zip(daemons, started, strict=True))
        for number in range(-1, reps):
            prompt = make_prompts(1, 300 + number, TOKENS)
            for kind, engine in engines.items():
                before = stored_bytes(daemons[kind])
                engine.timed(prompt)
                engine.settle()
                stored[kind] = stored_bytes(daemons[kind]) - before
            for load, (kind, engine) in product(range(LOADS), engines.items()):
                gpu = time_gpu_hit(engine, prompt)
                engine.forget()
                host, cached = engine.timed(prompt)
                row: Record = {"host_ms": 1e3 * host, "gpu_ms": 1e3 * gpu, "found": cached / TOKENS}
                if load == 0:
                    print_figures(f"mla {kind}", round=number, mib=stored[kind] >> 20, **row)
                if number >= 0:
                    rows.append({"connector": kind, **row})
    summary("mla", rows, "host_ms", "gpu_ms")
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
        "found": (copied / TOKENS, cached / TOKENS),
        "loaded_gib": status.loaded_bytes / 2**30,
        "loaded": status.loaded,
    }
    print_figures("ttft", round=number, **row)
    return {"connector": "kvferry", **row}


def measure_fresh(engines: Sequence[VLLM], number: int, pause: float) -> Record:
    first, second = engines
    seed = 5000 + len(PAUSES) * number + PAUSES.index(pause)
    prompt = make_prompts(1, seed, TOKENS)
    seconds, _ = first.timed(prompt)
    time.sleep(pause)
    again, cached = second.timed(prompt)
    row: Record = {"found": cached / TOKENS, "first_ms": 1e3 * seconds, "second_ms": 1e3 * again}
    print_figures(f"fresh, after {1e3 * pause:.0f} ms", round=number, **row)
    return {"connector": f"after {1e3 * pause:.0f} ms", **row}


def measure_restart(
    engines: Sequence[VLLM], daemons: Sequence[GpuDaemon], number: int, pause: float
) -> Record:
    prompt = make_prompts(1, 7000 + number, TOKENS)
    computed, _ = engines[0].timed(prompt)
    for engine in engines:
        engine.settle()
        engine.forget()
    restart_as_siblings(*daemons)
    time.sleep(pause)
    first, cached = engines[0].timed(prompt)
    row: Record = {"found": cached / TOKENS, "computed_ms": 1e3 * computed, "first_ms": 1e3 * first}
    engines[0].settle()
    engines[0].forget()
    row["next_ms"] = 1e3 * engines[0].timed(prompt)[0]
    print_figures(f"restart, after {pause:.0f} s", **row)
    return row


def measure_reads(engines: Sequence[VLLM], devices: Sequence[int]) -> Record:
    """Loads of the first engine, and GB/s of plain copies to the first GPU, alone and beside."""
    first, second = engines
    prompts = make_prompts(8, 900, TOKENS)
    for prompt in prompts:
        first.timed([prompt])
    first.settle()
    times: dict[str, list[float]] = {"alone": [], "beside": []}
    for kind in ("alone", "beside") * 2:
        ended = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            if kind == "beside":
                reading = threads.submit(load_until, ended, second, prompts)
            loads = [load_again(first, prompts, number) for number in range(READS // 2)]
            ended.set()
        times[kind] += [1e3 * seconds for seconds, _ in loads]
        figures = quantiles(times[kind])
        if kind == "beside":
            figures["sibling_loads"] = reading.result()
        print_figures(f"reads {kind}", **figures, found=min(cached for _, cached in loads) / TOKENS)
    with ThreadPoolExecutor(2) as threads:
        links = {"alone": measure_link(devices[0])}
        links["beside"], *_ = threads.map(measure_link, devices)
    print_figures("reads: plain copies, GB/s", **links)
    return {"ms": {kind: quantiles(each) for kind, each in times.items()}, "link_gbs": links}


def quantiles(times: list[float]) -> Record:
    ordered = sorted(times)
    return {
        "p50_ms": statistics.median(ordered),
        "p90_ms": ordered[int(0.9 * len(ordered))],
        "p99_ms": ordered[int(0.99 * len(ordered))],
    }


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
                engine.forget()
    for engine in engines:
        engine.settle()
    later = sum(seconds[1:])
    tokens = CONVERSATIONS * STEP * sum(range(1, ROUNDS))
    return {
        "first_s": seconds[0],
        "later_s": later,
        "requests_s": CONVERSATIONS * (ROUNDS - 1) / later,
        "found": cached / tokens,
    }


if __name__ == "__main__":
    main()
