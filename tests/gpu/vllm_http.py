"""Figures over HTTP, of `vllm serve` with its default settings and each connector in turn.

    python tests/gpu/vllm_http.py [ttft,chat,timeline] [--connectors vllm,kvferry] [--json FILE]

ttft      time to first token of 24,576 tokens: computed, from host memory, from the GPU's cache
chat      32 clients, each with a conversation of four rounds of 2,048 tokens; together they exceed
          the GPU's cache four times
timeline  when a host hit passes each step of vLLM and kvferry

The servers of all connectors run at the same time and are asked in turn. `of_floor` is relative to
a GPU hit of the same server after a rest plus the bytes over the link. `found`: the share of the
tokens of earlier rounds, or of the prompt, that were found in a cache. The conversations of `chat`
together have 32 GiB of KV: with --host-gib 24 they do not fit into host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.vllm_measure import Record, measure_link, print_figures, print_set, summary
from support.vllm_models import LARGE, kv_bytes
from support.vllm_process import CONNECTORS, GpuDaemon, make_prompts
from support.vllm_server import ServedAnswer, VLLMServer

TOKENS = 24576
CLIENTS, ROUNDS, STEP, GENERATED = 32, 4, 2048, 32
# GPU blocks of 16 tokens: what a prompt of TOKENS needs, and a quarter of the conversations.
GPU_BLOCKS = CLIENTS * ROUNDS * STEP // 16 // 4
REST = 0.3
# GPU hits of one prompt: they vary more than the other figures.
GPU_HITS = 5
TIMELINE = {
    "kv_connector": "TimelineConnector",
    "kv_connector_module_path": "support.vllm_timeline",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", default="ttft,chat")
    parser.add_argument("--connectors", default="none,vllm,kvferry")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--host-gib", type=int, default=40, help="of each host tier")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    what = chosen.what.split(",")
    names = chosen.connectors.split(",") if what != ["timeline"] else []
    record: Record = {"link_gbs": measure_link()}
    print_figures("link", gbs=record["link_gbs"])
    with ExitStack() as running:
        if "timeline" in what:
            CONNECTORS["timeline"] = TIMELINE
            names.append("timeline")
            path = Path(running.enter_context(tempfile.TemporaryDirectory())) / "timeline"
            os.environ["KVFERRY_TIMELINE"] = str(path)
        servers = {name: start(running, name, chosen.host_gib, what) for name in names}
        for name, server in servers.items():
            server.wait()
            print_figures("started", server=name)
        if "chat" in what:
            print_set("chat", CLIENTS * kv_bytes(LARGE, ROUNDS * STEP) / 2**30, chosen.host_gib)
        measured = {"ttft": measure_ttft, "chat": measure_chat}
        for name in what:
            if name == "timeline":
                record[name] = measure_timeline(servers.pop(name), path, chosen.reps)
            else:
                record[name] = measured[name](servers, record, chosen.reps)
            if chosen.json is not None:
                chosen.json.write_text(json.dumps(record, indent=1))


def start(running: ExitStack, name: str, host_gib: int, what: list[str]) -> VLLMServer:
    connector, _, tree = name.partition("@")
    extra: Record = {"cpu_bytes_to_use": host_gib << 30}
    if connector in {"kvferry", "timeline"}:
        daemon = running.enter_context(GpuDaemon(pool=f"{host_gib}GiB", tree=tree))
        extra["kvferry_dirs"] = daemon.directory
    options = {
        "max_model_len": TOKENS + 1024,
        "gpu_memory_utilization": 0.25,  # they start at the same time
        "kv_cache_memory_bytes": 4 << 30,
    }
    if "chat" in what:
        options["num_gpu_blocks_override"] = GPU_BLOCKS
    server = VLLMServer(connector, model=LARGE, extra=extra, tree=tree, **options)
    return running.enter_context(server)


def settle(server: VLLMServer) -> None:
    """Run some steps and wait, because later steps submit the stores of earlier ones."""
    for number in range(3):
        server.ask(make_prompts(1, 1000 + number, 64)[0])
        time.sleep(REST)


def measure_ttft(servers: dict[str, VLLMServer], record: Record, reps: int) -> Record:
    moved = kv_bytes(LARGE, TOKENS) / record["link_gbs"] / 1e6
    rows: list[Record] = []
    for number in range(-1, reps):
        for name, server in servers.items():
            if name == "timeline":
                continue
            (prompt,) = make_prompts(1, 100 + number, TOKENS)
            cold = server.ask(prompt).first
            settle(server)
            server.forget()
            time.sleep(REST)
            host = server.ask(prompt)
            gpu = []
            for _ in range(GPU_HITS):
                time.sleep(REST)
                gpu.append(server.ask(prompt).first)
            times = {"cold_ms": cold, "host_ms": host.first, "gpu_ms": statistics.median(gpu)}
            row = {key: 1e3 * value for key, value in times.items()}
            row["found"] = host.cached / TOKENS
            row["of_floor"] = row["host_ms"] / (row["gpu_ms"] + moved)
            print_figures(f"ttft {name}", round=number, **row)
            if number >= 0:
                rows.append({"connector": name, **row})
    return {"rows": rows, "figures": summary("ttft", rows, *list(rows[0])[1:])}


def measure_chat(servers: dict[str, VLLMServer], _: Record, reps: int) -> Record:
    """Each client asks its next round when the last one is answered."""
    rows: list[Record] = []
    earlier = CLIENTS * STEP * sum(range(1, ROUNDS))
    for number in range(-1, min(reps, 3)):
        for name, server in servers.items():
            if name == "timeline":
                continue
            prompts = make_prompts(CLIENTS, 1500 + number, ROUNDS * STEP)

            def talk(ids: list[int], server: VLLMServer = server) -> list[ServedAnswer]:
                return [server.ask(ids[: turn * STEP], GENERATED) for turn in range(1, ROUNDS + 1)]

            began = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as pool:
                answers = [answer for each in pool.map(talk, prompts) for answer in each]
            seconds = time.perf_counter() - began
            settle(server)
            row = {
                "seconds": seconds,
                "requests_s": CLIENTS * ROUNDS / seconds,
                "ttft_ms": 1e3 * statistics.median(answer.first for answer in answers),
                "found": sum(answer.cached for answer in answers) / earlier,
            }
            print_figures(f"chat {name}", round=number, **row)
            if number >= 0:
                rows.append({"connector": name, **row})
    return {"rows": rows, "figures": summary("chat", rows, *list(rows[0])[1:])}


def measure_timeline(server: VLLMServer, path: Path, reps: int) -> list[Any]:
    """Milliseconds from the request to each step, of each host hit, and to the first token."""
    found = []
    for number in range(reps):
        (prompt,) = make_prompts(1, 3000 + number, TOKENS)
        server.ask(prompt)
        settle(server)
        server.forget()
        time.sleep(REST)
        path.write_text("")
        began = time.perf_counter()
        first = server.ask(prompt).first
        moments = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [(round(1e3 * (at - began), 2), what) for at, what in moments]
        steps.append((round(1e3 * first, 2), "first token"))
        found.append(sorted(steps))
        text = "; ".join(f"{at} {what}" for at, what in found[-1])
        print_figures("timeline", round=number, steps=text)
    return found


if __name__ == "__main__":
    main()
