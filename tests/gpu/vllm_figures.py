"""What kvferry costs and gives inside vLLM, beside vLLM's own connector and none.

    python tests/gpu/vllm_figures.py ttft | small | cold | throughput | itl [--json FILE] ...

ttft        time to first token of 16,384 tokens in host memory, Llama-3.1-8B's shape
small       the same of 65,536 tokens in small pages: one KV head
cold        time to first token of 16,384 tokens that are nowhere, stored meanwhile
throughput  64 requests at once whose prompts are in host memory, alone and with a shared half
itl         milliseconds between tokens of streams that decode, beside requests whose prompts are
            stored, and beside requests whose prompts are loaded

Engines of all connectors stand side by side and take turns, so that what changes with the hour
changes for all; --apart starts them one after the other, for a GPU of 80 GB. Where PegaFlow is
installed beside vLLM, `--connectors none,vllm,pegaflow,kvferry` measures it, too; `ideal` copies
nothing and takes the link's time for it (kvferry.testing.vllm_ideal). The floor of a host hit is
the GPU-hit time of the same engine plus the bytes over the link, both of the same run: of_floor
over GPU hits in a row, of_rested over those that are asked for after a rest, as host hits are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from kvferry.testing.vllm_process import (
    LARGE,
    VLLM,
    Daemon,
    PegaFlow,
    Prompts,
    kv_bytes,
    make_prompts,
)

LINK = """
import statistics, time, torch
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
device = torch.empty_like(host, device="cuda")
rates = []
for _ in range(8):
    torch.cuda.synchronize()
    began = time.perf_counter()
    device.copy_(host)
    torch.cuda.synchronize()
    rates.append(host.numel() / (time.perf_counter() - began) / 1e9)
print(statistics.median(rates[2:]))
"""
Record: TypeAlias = dict[str, Any]

GPU_HITS = 5
"""Of one prompt: their times vary more than all else here, and the floor stands on their median."""
REST = 0.3
"""Seconds that an engine has done nothing before a host hit is asked for. GPU hits one right behind
the other find the CPU awake and its caches warm, so they are asked for after such a rest, too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=[*FIGURES])
    parser.add_argument("--connectors", default="none,vllm,kvferry")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--tokens", type=int, help="of a prompt")
    parser.add_argument("--host-gib", type=int, default=24, help="of each host tier")
    parser.add_argument("--utilization", type=float, help="of the GPU's memory, for each engine")
    parser.add_argument("--apart", action="store_true", help="one engine at a time")
    parser.add_argument("--extra", type=json.loads, default={}, help="kvferry's extra_config")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    record: Record = {"what": chosen.what, "link_gbs": link(), "began": time.time()}
    say("link", gbs=record["link_gbs"])
    chosen.link_gbs = record["link_gbs"]
    record |= FIGURES[chosen.what](chosen, record)
    out = chosen.json or Path(f"vllm-figures-{chosen.what}.json")
    out.write_text(json.dumps(record, indent=1))
    print(f"JSON {out}", flush=True)


def say(what: str, **figures: Any) -> None:
    def form(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    said = "  ".join(f"{name} {form(value)}" for name, value in figures.items())
    print(f"{time.strftime('%H:%M:%S')} {what:24} {said}", flush=True)


def link() -> float:
    """GB/s of one contiguous copy to the device, in a process that is gone again."""
    ran = subprocess.run([sys.executable, "-c", LINK], capture_output=True, text=True, check=True)
    return float(ran.stdout)


def spread(values: list[float]) -> Record:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "least": ordered[0], "most": ordered[-1]}


# Engines


@contextmanager
def engines(chosen: Any, names: list[str], model: Record, **options: Any) -> Iterator[Any]:
    """Engines of these connectors, all started, over a daemon where one of them is kvferry's."""
    share = chosen.utilization or (0.6 if len(names) == 1 else 0.9 / len(names))
    host = chosen.host_gib << 30
    with Daemon(pool=f"{chosen.host_gib}GiB") as daemon:
        extras: dict[str, Record] = {
            "kvferry": {"kvferry_dirs": daemon.directory, "cpu_bytes_to_use": host} | chosen.extra,
            "vllm": {"cpu_bytes_to_use": host},
            "ideal": {
                "spec_name": "IdealSpec",
                "spec_module_path": "kvferry.testing.vllm_ideal",
                "link_gbs": chosen.link_gbs,
            },
        }
        with ExitStack() as running:
            if "pegaflow" in names:
                server = running.enter_context(PegaFlow(pool=f"{chosen.host_gib}gb"))
                extras["pegaflow"] = {"pegaflow.port": server.port}
            started = {}
            for name in names:  # one by one: vLLM measures what memory is free
                made = VLLM(
                    name,
                    model=model,
                    extra=extras.get(name),
                    gpu_memory_utilization=share,
                    **options,
                )
                started[name] = running.enter_context(made)
                say("started", engine=name)
            yield started


def rounds(chosen: Any, model: Record, one: Callable[..., Record], **options: Any) -> list[Record]:
    """`one(name, engine, round)` of each connector in turn, for as many rounds as are wanted.

    Two rounds before are not recorded: every path is compiled and taken once.
    """
    names, rows = chosen.connectors.split(","), []
    for some in [[name] for name in names] if chosen.apart else [names]:
        with engines(chosen, some, model, **options) as started:
            for number in range(-2, chosen.reps):
                for name, engine in started.items():
                    row = one(name, engine, number)
                    say(name, round=number, **row)
                    if number >= 0:
                        rows.append({"connector": name, **row})
    return rows


def summary(rows: list[Record], *columns: str) -> Record:
    """Median and spread of each column, by connector; printed."""
    found: Record = {}
    for name in dict.fromkeys(row["connector"] for row in rows):
        mine = [row for row in rows if row["connector"] == name]
        found[name] = {column: spread([row[column] for row in mine]) for column in columns}
        say(f"= {name}", **{column: found[name][column]["median"] for column in columns})
    return found


# Time to first token


def host_hits(chosen: Any, record: Record, model: Record, tokens: int) -> Record:
    """Cold, from host memory, and from the GPU's own cache; each prompt is new."""
    tokens = chosen.tokens or tokens
    moved = kv_bytes(model, tokens) / record["link_gbs"] / 1e6

    def one(name: str, engine: VLLM, number: int) -> Record:
        prompt = make_prompts(1, 100 + number, tokens)
        cold, _ = engine.timed(prompt)
        engine.settle()
        done = engine.forget()
        host, cached = engine.timed(prompt)
        gpu, rested = gpu_hit(engine, prompt), gpu_hit(engine, prompt, REST)
        times = {"cold_ms": cold, "host_ms": host, "gpu_ms": gpu, "rested_ms": rested}
        return {
            **{name: 1e3 * seconds for name, seconds in times.items()},
            "of_floor": 1e3 * host / (1e3 * gpu + moved),
            "of_rested": 1e3 * host / (1e3 * rested + moved),
            "cached": cached,
            "reset": done,
        }

    rows = rounds(chosen, model, one, max_model_len=tokens + 1024, max_num_seqs=8)
    columns = "cold_ms", "host_ms", "gpu_ms", "rested_ms", "of_floor", "of_rested", "cached"
    figures = summary(rows, *columns)
    return {"tokens": tokens, "bytes": kv_bytes(model, tokens), "rows": rows, "figures": figures}


def gpu_hit(engine: VLLM, prompt: Prompts, rest: float = 0.0) -> float:
    """Seconds of a prompt that the GPU has, each time after a rest."""
    seconds = []
    for _ in range(GPU_HITS):
        time.sleep(rest)
        seconds.append(engine.timed(prompt)[0])
    return statistics.median(seconds)


def ttft(chosen: Any, record: Record) -> Record:
    return host_hits(chosen, record, LARGE, 16384)


def small(chosen: Any, record: Record) -> Record:
    chosen.reps = min(chosen.reps, 3)
    return host_hits(chosen, record, LARGE | {"num_key_value_heads": 1}, 65536)


def cold(chosen: Any, record: Record) -> Record:
    """Prompts one behind the other: the stores of each run beside the next one's prefill."""
    tokens = chosen.tokens or 16384

    def one(name: str, engine: VLLM, number: int) -> Record:
        prompts = make_prompts(3, 300 + number, tokens)
        times = [1e3 * engine.timed([prompt])[0] for prompt in prompts]
        engine.settle()
        return {"cold_ms": statistics.median(times[1:]), "first_ms": times[0]}

    rows = rounds(chosen, LARGE, one, max_model_len=tokens + 1024, max_num_seqs=8)
    return {"tokens": tokens, "rows": rows, "figures": summary(rows, "cold_ms", "first_ms")}


# Many at once


def throughput(chosen: Any, record: Record) -> Record:
    """64 requests at once, 64 tokens said each, prompts in host memory (computed where there is no
    host tier). Tokens a second count prompts and what is said."""
    tokens, said, count = chosen.tokens or 2048, 64, 64
    sets = {
        "alone": make_prompts(count, 500, tokens),
        "shared": make_prompts(count, 501, tokens, shared=tokens // 2),
    }

    def one(name: str, engine: VLLM, number: int) -> Record:
        row: Record = {}
        for kind, prompts in sets.items():
            if number == -2:
                engine.generate(prompts, 1)
            engine.settle()
            engine.forget()
            seconds, cached = engine.timed(prompts, said)
            row[f"{kind}_tokens_s"] = count * (tokens + said) / seconds
            row[f"{kind}_cached"] = cached / (count * tokens)
        return row

    rows = rounds(chosen, LARGE, one, max_num_seqs=count)
    columns = [f"{kind}_{figure}" for kind in sets for figure in ("tokens_s", "cached")]
    return {"tokens": tokens, "rows": rows, "figures": summary(rows, *columns)}


# Between tokens


def itl(chosen: Any, record: Record) -> Record:
    """16 streams of 400 tokens. Beside them, one each 12 steps, 24 prompts that are new (stored
    where there is a host tier), and then 24 that are in a cache: the host's, or the GPU's own."""
    tokens, streams, count, every = chosen.tokens or 2048, 16, 24, 12
    chosen.reps = min(chosen.reps, 3)
    known = make_prompts(count, 700, tokens)

    def one(name: str, engine: VLLM, number: int) -> Record:
        asked = make_prompts(streams, 720 + number, 256)
        new = make_prompts(count, 800 + number, tokens)
        engine.generate(known, 1)
        engine.settle()
        quiet = decode(engine, asked, [], every)
        storing = decode(engine, make_prompts(streams, 900 + number, 256), new, every)
        if name != "none":
            engine.settle()
            engine.forget()
        loading = decode(engine, make_prompts(streams, 1100 + number, 256), known, every)
        row: Record = {"cached": loading["cached"] / (count * tokens)}
        for kind, gaps in (("quiet", quiet), ("storing", storing), ("loading", loading)):
            row |= {f"{kind}_{name}": value for name, value in quantiles(gaps["gaps"]).items()}
        return row

    rows = rounds(chosen, LARGE, one, max_num_seqs=64)
    columns = [f"{k}_{q}" for k in ("quiet", "storing", "loading") for q in ("p50", "p99", "mean")]
    return {"tokens": tokens, "rows": rows, "figures": summary(rows, *columns, "cached")}


def decode(engine: VLLM, asked: Prompts, others: Prompts, every: int) -> Any:
    return engine.ask(do="decode", prompts=asked, tokens=400, others=others, every=every)


def quantiles(gaps: list[float]) -> Record:
    cuts = statistics.quantiles(gaps, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "mean": statistics.fmean(gaps)}


FIGURES: dict[str, Callable[[Any, Record], Record]] = {
    "ttft": ttft,
    "small": small,
    "cold": cold,
    "throughput": throughput,
    "itl": itl,
}

if __name__ == "__main__":
    main()
