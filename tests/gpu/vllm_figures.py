"""Cost and benefit of kvferry with vLLM, compared with vLLM's own connector and with none.

    python tests/gpu/vllm_figures.py ttft,cold,chat [--connectors none,vllm,kvferry] [--json FILE]

ttft        time to first token of 16,384 tokens in host memory, Llama-3.1-8B's shape
small       the same of 65,536 tokens in small pages: one KV head
busy        the same of 16,384 tokens while 8 other requests decode
cold        time to first token of 16,384 tokens that are in no cache, and are stored meanwhile
throughput  64 requests at once whose prompts are in host memory, alone and with a shared half
chat        conversations that together exceed the GPU's cache: later rounds load the blocks of
            earlier rounds, while they store their own
itl         milliseconds between tokens of streams that decode, beside requests whose prompts are
            stored, and beside requests whose prompts are loaded

Engines of all connectors run at the same time and alternate, so that slow changes of the machine
affect all of them. Figures of one model share the engines. --apart starts the engines one after
another, for a GPU of 80 GB. A connector `kvferry@DIR` is the kvferry of another source tree, client
and daemon, which compares two versions in one run. `unpacked` is kvferry with "kvferry_pack":
"off". If PegaFlow is installed beside vLLM, `--connectors none,vllm,pegaflow,kvferry` measures it,
too. `ideal` copies nothing and waits for the link's time (support.vllm_ideal). Newer versions of
vLLM's own connector keep their host tier in /dev/shm, and do not start if it has less than --host-
gib. The lower bound of a host hit is the GPU-hit time of the same engine plus the bytes over the
link, both of the same run: of_floor is relative to GPU hits in a row, of_rested to GPU hits after a
rest, as host hits are. found: the share of the prompts' tokens, in `chat` of those of earlier
rounds, that were found in a cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.vllm_measure import (
    Record,
    choose_figures,
    measure_link,
    print_figures,
    print_set,
    summary,
)
from support.vllm_models import LARGE, kv_bytes
from support.vllm_process import (
    VLLM,
    GpuDaemon,
    PegaFlow,
    make_prompts,
)
from support.vllm_served import Prompts

# GPU hits of one prompt. They vary more than the other figures, and the bound uses their median.
GPU_HITS = 5
# Seconds that an engine is idle before a host hit. After another GPU hit the CPU is awake and its
# caches are warm, so GPU hits are measured after such a rest, too.
REST = 0.3
SMALL_PAGES = LARGE | {"num_key_value_heads": 1}


@dataclass(frozen=True)
class Figure:
    """prepare(options, record) returns a function (connector, engine, round) -> row of one round.

    columns: those of a row that are summarized. tokens: of a prompt. at_once: prompts whose blocks
    must be in host memory at the same time.
    """

    prepare: Callable[[Any, Record], Callable[[str, VLLM, int], Record]]
    columns: tuple[str, ...]
    model: Record
    tokens: int
    at_once: int = 1
    most_reps: int = 99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connectors", default="none,vllm,kvferry")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--tokens", type=int, help="of a prompt")
    parser.add_argument("--host-gib", type=int, default=24, help="of each host tier")
    parser.add_argument("--utilization", type=float, help="of the GPU's memory, for each engine")
    parser.add_argument("--apart", action="store_true", help="one engine at a time")
    parser.add_argument("--extra", type=json.loads, default={}, help="kvferry's extra_config")
    parser.add_argument("--json", type=Path)
    chosen, what = choose_figures(parser, FIGURES)
    record: Record = {"what": chosen.what, "link_gbs": measure_link(), "began": time.time()}
    print_figures("link", gbs=record["link_gbs"])
    chosen.link_gbs = record["link_gbs"]
    out = chosen.json or Path("vllm-figures.json")
    for wanted in by_model(what):
        measure(chosen, record, wanted)
        out.write_text(json.dumps(record, indent=1))
    print(f"JSON {out}", flush=True)


def by_model(names: list[str]) -> Iterator[list[str]]:
    """Groups of figures that share their engines, in the order of `names`."""
    left = names
    while left:
        model = FIGURES[left[0]].model
        yield [name for name in left if FIGURES[name].model == model]
        left = [name for name in left if FIGURES[name].model != model]


def measure(chosen: Any, record: Record, wanted: list[str]) -> None:
    """Measure figures of one model. Adds their rows and summaries to `record`.

    The first two rounds are not recorded, because every path is compiled and run once in them.
    """
    connectors = chosen.connectors.split(",")
    figures = {name: FIGURES[name] for name in wanted}
    rows: dict[str, list[Record]] = {name: [] for name in wanted}
    longest = max(chosen.tokens or figure.tokens for figure in figures.values())
    options = {"max_model_len": longest + 1024, "max_num_seqs": 64}
    model = figures[wanted[0]].model
    for together in [[name] for name in connectors] if chosen.apart else [connectors]:
        with engines(chosen, together, model, **options) as started:
            for name, figure in figures.items():
                tokens = (chosen.tokens or figure.tokens) * figure.at_once
                print_set(name, kv_bytes(figure.model, tokens) / 2**30, chosen.host_gib)
                measure_round = figure.prepare(chosen, record)
                for number in range(-2, min(chosen.reps, figure.most_reps)):
                    for connector, engine in started.items():
                        row = measure_round(connector, engine, number)
                        print_figures(f"{name} {connector}", round=number, **row)
                        if number >= 0:
                            rows[name].append({"connector": connector, **row})
    for name, figure in figures.items():
        record[name] = {
            "tokens": chosen.tokens or figure.tokens,
            "rows": rows[name],
            "figures": summary(name, rows[name], *figure.columns),
        }


# Engines


@contextmanager
def engines(chosen: Any, names: list[str], model: Record, **options: Any) -> Iterator[Any]:
    """Start engines with these connectors, and a daemon for each connector of kvferry."""
    share = chosen.utilization or (0.6 if len(names) == 1 else 0.9 / len(names))
    host = chosen.host_gib << 30
    with ExitStack() as running:
        extras: dict[str, Record] = {
            "vllm": {"cpu_bytes_to_use": host},
            "ideal": {
                "spec_name": "IdealSpec",
                "spec_module_path": "support.vllm_ideal",
                "link_gbs": chosen.link_gbs,
            },
        }
        for name in names:
            connector, _, tree = name.partition("@")
            if connector in ("kvferry", "unpacked"):
                daemon = running.enter_context(GpuDaemon(pool=f"{chosen.host_gib}GiB", tree=tree))
                extras[name] = {"kvferry_dirs": daemon.directory, "cpu_bytes_to_use": host}
                extras[name] |= chosen.extra
                if connector == "unpacked":
                    extras[name]["kvferry_pack"] = "off"
            if connector == "pegaflow":
                server = running.enter_context(PegaFlow(pool=f"{chosen.host_gib}gb"))
                extras[name] = {"pegaflow.port": server.port}
        started = {}
        for name in names:  # one after another, because vLLM measures the free memory
            connector, _, tree = name.partition("@")
            created = VLLM(
                connector,
                model=model,
                extra=extras.get(name),
                tree=tree,
                gpu_memory_utilization=share,
                **options,
            )
            started[name] = running.enter_context(created)
            print_figures("started", engine=name)
        yield started


# Time to first token


def host_hits(chosen: Any, record: Record, model: Record, tokens: int) -> Any:
    """Prompts that are computed, then loaded from host memory, then in the GPU's own cache."""
    moved = kv_bytes(model, tokens) / record["link_gbs"] / 1e6

    def measure_round(name: str, engine: VLLM, number: int) -> Record:
        prompt = make_prompts(1, 100 + number, tokens)
        cold, _ = engine.timed(prompt)
        engine.settle()
        done = engine.forget()
        host, cached = engine.timed(prompt)
        found = cached / tokens
        gpu, rested = gpu_hit(engine, prompt), gpu_hit(engine, prompt, REST)
        times = {"cold_ms": cold, "host_ms": host, "gpu_ms": gpu, "rested_ms": rested}
        return {
            **{name: 1e3 * seconds for name, seconds in times.items()},
            "of_floor": 1e3 * host / (1e3 * gpu + moved),
            "of_rested": 1e3 * host / (1e3 * rested + moved),
            "found": found,
            "reset": done,
        }

    return measure_round


def gpu_hit(engine: VLLM, prompt: Prompts, rest: float = 0.0) -> float:
    """Median seconds of a prompt that is in the GPU's cache, each time after a rest."""
    seconds = []
    for _ in range(GPU_HITS):
        time.sleep(rest)
        seconds.append(engine.timed(prompt)[0])
    return statistics.median(seconds)


def ttft(chosen: Any, record: Record) -> Any:
    return host_hits(chosen, record, LARGE, chosen.tokens or 16384)


def small(chosen: Any, record: Record) -> Any:
    return host_hits(chosen, record, SMALL_PAGES, chosen.tokens or 65536)


def busy(chosen: Any, _: Record) -> Any:
    """Prompts in host memory, and in the GPU's own cache, while 8 streams decode."""
    tokens = chosen.tokens or 16384

    def measure_round(_: str, engine: VLLM, number: int) -> Record:
        (prompt,) = prompts = make_prompts(1, 1700 + number, tokens)
        engine.generate(prompts, 1)
        engine.settle()
        engine.forget()
        seeds = 2 * number + 1800, 2 * number + 1801
        host, gpu = (
            engine.ask(do="beside", prompts=make_prompts(8, seed, 256), tokens=700, asked=prompt)
            for seed in seeds
        )
        return {
            "host_ms": 1e3 * host["seconds"],
            "gpu_ms": 1e3 * gpu["seconds"],
            "found": host["cached"] / tokens,
            "streams": min(host["streams"], gpu["streams"]),
        }

    return measure_round


def cold(chosen: Any, _: Record) -> Any:
    """Prompts one after another: the stores of each run beside the next one's prefill."""
    tokens = chosen.tokens or 16384

    def measure_round(_: str, engine: VLLM, number: int) -> Record:
        prompts = make_prompts(3, 300 + number, tokens)
        times = [1e3 * engine.timed([prompt])[0] for prompt in prompts]
        engine.settle()
        return {"cold_ms": statistics.median(times[1:]), "first_ms": times[0]}

    return measure_round


# Many at once


def throughput(chosen: Any, _: Record) -> Any:
    """64 requests at once, with 64 generated tokens each and prompts in host memory.

    Without a host tier the prompts are computed. Tokens per second include prompts and generated
    tokens.
    """
    tokens, generated, count = chosen.tokens or 2048, 64, 64
    sets = {
        "alone": make_prompts(count, 500, tokens),
        "shared": make_prompts(count, 501, tokens, shared=tokens // 2),
    }

    def measure_round(_: str, engine: VLLM, number: int) -> Record:
        row: Record = {}
        for kind, prompts in sets.items():
            if number == -2:
                engine.generate(prompts, 1)
            engine.settle()
            engine.forget()
            seconds, cached = engine.timed(prompts, generated)
            row[f"{kind}_tokens_s"] = count * (tokens + generated) / seconds
            row[f"{kind}_found"] = cached / (count * tokens)
        return row

    return measure_round


def chat(chosen: Any, _: Record) -> Any:
    """Conversations of four rounds, all at once in each round.

    Before every round the GPU's cache is emptied, as if other prompts had reused its blocks.
    """
    step, conversations, rounds, generated = chosen.tokens or 2048, 16, 4, 32

    def measure_round(_: str, engine: VLLM, number: int) -> Record:
        prompts = make_prompts(conversations, 1500 + number, rounds * step)
        seconds: list[float] = []
        cached = 0
        for turn in range(1, rounds + 1):
            elapsed, found = engine.timed([ids[: turn * step] for ids in prompts], generated)
            seconds.append(elapsed)
            cached += found
            engine.forget()
        engine.settle()
        later = conversations * step * sum(range(1, rounds))
        return {"first_s": seconds[0], "later_s": sum(seconds[1:]), "found": cached / later}

    return measure_round


# Between tokens


def itl(chosen: Any, _: Record) -> Any:
    """16 streams of 400 tokens, and beside them one more prompt every 12 steps.

    First 24 new prompts, which are stored if there is a host tier. Then 24 prompts that are in a
    cache: the host's, or the GPU's own.
    """
    tokens, streams, count, every = chosen.tokens or 2048, 16, 24, 12
    known = make_prompts(count, 700, tokens)

    def measure_round(name: str, engine: VLLM, number: int) -> Record:
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
        row: Record = {"found": loading["cached"] / (count * tokens)}
        for kind, gaps in (("quiet", quiet), ("storing", storing), ("loading", loading)):
            row |= {f"{kind}_{name}": value for name, value in quantiles(gaps["gaps"]).items()}
        return row

    return measure_round


def decode(engine: VLLM, asked: Prompts, others: Prompts, every: int) -> Any:
    return engine.ask(do="decode", prompts=asked, tokens=400, others=others, every=every)


def quantiles(gaps: list[float]) -> Record:
    cuts = statistics.quantiles(gaps, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "mean": statistics.fmean(gaps)}


HITS = "cold_ms", "host_ms", "gpu_ms", "rested_ms", "of_floor", "of_rested", "found"
GAPS = [f"{k}_{q}" for k in ("quiet", "storing", "loading") for q in ("p50", "p99", "mean")]
AT_ONCE = [f"{kind}_{figure}" for kind in ("alone", "shared") for figure in ("tokens_s", "found")]
FIGURES: dict[str, Figure] = {
    "ttft": Figure(ttft, HITS, LARGE, 16384),
    "small": Figure(small, HITS, SMALL_PAGES, 65536, most_reps=5),
    "busy": Figure(busy, ("host_ms", "gpu_ms", "found", "streams"), LARGE, 16384),
    "cold": Figure(cold, ("cold_ms", "first_ms"), LARGE, 16384, at_once=3),
    "throughput": Figure(throughput, tuple(AT_ONCE), LARGE, 2048, at_once=2 * 64),
    "chat": Figure(chat, ("first_s", "later_s", "found"), LARGE, 4 * 2048, at_once=16),
    "itl": Figure(itl, (*GAPS, "found"), LARGE, 2048, at_once=24, most_reps=5),
}

if __name__ == "__main__":
    main()
