"""Figures of `vllm serve` whose users exceed the GPU's cache, or load all that they ask for.

    python tests/gpu/vllm_turns.py turns [--connectors vllm,at_once,auto] [--json FILE]
    python tests/gpu/vllm_turns.py loads [--connectors at_once] [--json FILE]

turns   4 clients continue 64 conversations, chosen at random, of up to 8 rounds of 1,024 tokens; a
        new one follows each that has ended. The conversations have 36 GiB of KV, the GPU's cache
        has 16 GiB, and host memory as much, and then, with kvferry, twice as much
loads   prompts of 1,024 to 8,192 tokens by 32 and 64 clients at once, 256 tokens generated:
        computed, and then all of their KV loaded from host memory

Connectors: none; vllm and lazy, vLLM's OffloadingConnector and its SimpleCPUOffloadConnector with
lazy_offload; at_once, at_eviction and auto, kvferry with this `kvferry_store`; unpacked, at_once
with "kvferry_pack": "off". All servers run at the same time and are asked in turn. `found`: the
share of the tokens of earlier rounds, or of the prompts, that were in a cache.
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
from itertools import product
from pathlib import Path

from support.vllm_measure import Record, measure_link, print_figures
from support.vllm_models import LARGE
from support.vllm_process import CONNECTORS, GpuDaemon, make_prompts
from support.vllm_server import ServedAnswer, VLLMServer

CLIENTS, CONVERSATIONS, ROUNDS, STEP, GENERATED = 4, 64, 8, 1024, 32
GPU_GIB = 16
# Requests before those that are measured.
WARM_UP = 96
LENGTHS, CLIENT_COUNTS, LOADS_GENERATED = (1024, 4096, 8192), (32, 64), 256
# Of the GPU's cache and of host memory, in `loads`: all prompts of one measurement.
LOADS_GIB = 68
CONNECTORS["lazy"] = {"kv_connector": "SimpleCPUOffloadConnector"}
MODES = {mode: {"kvferry_store": mode} for mode in ("at_once", "at_eviction", "auto")}
MODES["unpacked"] = MODES["at_once"] | {"kvferry_pack": "off"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("turns", "loads"))
    parser.add_argument("--connectors", default="")
    parser.add_argument("--requests", type=int, default=240, help="measured in each turn")
    parser.add_argument("--reps", type=int, default=2, help="of each measurement in `loads`")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    record: Record = {"link_gbs": measure_link(), "rows": []}
    print_figures("link", gbs=record["link_gbs"])

    def report(what: str, **row: object) -> None:
        print_figures(what, **row)
        record["rows"].append({"what": what, **row})
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(record, indent=1))

    with ExitStack() as running:
        if chosen.what == "turns":
            names = (chosen.connectors or "vllm,at_once,auto").split(",")
            servers = {name: ServedEngine(running, name, GPU_GIB) for name in names}
            for server in servers.values():
                server.http.wait()
            print_figures("started", servers=len(servers))
            for number, times in enumerate((1, 2)):
                for name, server in servers.items():
                    if times == 1 or server.resize(times * GPU_GIB):
                        row = measure_turns(server.http, number, chosen.requests)
                        report(f"turns {name}", host_gib=times * GPU_GIB, **row)
        else:
            for name in (chosen.connectors or "at_once").split(","):
                with ExitStack() as alone:
                    server = ServedEngine(alone, name, LOADS_GIB)
                    server.http.wait()
                    print_figures("started", server=name)
                    measure_loads(server, -1, LENGTHS[0], CLIENT_COUNTS[0])  # warms up
                    cells = product(range(chosen.reps), LENGTHS, CLIENT_COUNTS)
                    for number, tokens, clients in cells:
                        for kind, row in measure_loads(server, number, tokens, clients):
                            report(f"loads {name} {kind}", **row)


class ServedEngine:
    """`vllm serve` with a connector, and with kvferry the daemon beside it. gib: of the GPU's cache
    and of host memory."""

    def __init__(self, running: ExitStack, name: str, gib: int) -> None:
        extra: Record = {"cpu_bytes_to_use": gib << 30}
        self._daemon: GpuDaemon | None = None
        if name in MODES:
            self._daemon = running.enter_context(GpuDaemon(pool=f"{gib}GiB"))
            # All of the pool, also after a resize.
            extra = {"kvferry_dirs": self._daemon.directory, **MODES[name]}
        elif name == "lazy":
            extra["lazy_offload"] = True
        self.http = VLLMServer(
            "kvferry" if self._daemon else name,
            model=LARGE,
            extra=extra,
            max_model_len=ROUNDS * STEP + 1024,
            gpu_memory_utilization=0.2,  # they start at the same time
            kv_cache_memory_bytes=gib << 30,
        )
        running.enter_context(self.http)

    def resize(self, gib: int) -> bool:
        """Restart the daemon with an empty pool of another size. False without one."""
        if self._daemon is None:
            return False
        self._daemon.resize(f"{gib}GiB")
        deadline = time.monotonic() + 20
        (prompt,) = make_prompts(1, 77, 2 * STEP)
        while time.monotonic() < deadline:  # until the engine stores again
            self.http.ask(prompt)
            self.http.forget()
            time.sleep(0.2)
            if self.http.ask(prompt).cached >= STEP:
                return True
        raise SystemExit("the engine does not use the new pool")


class Conversations:
    """Those that go on. Any thread."""

    def __init__(self, seed: int) -> None:
        self._rng, self._lock = random.Random(seed), threading.Lock()
        self._seed, self._started = seed, 0
        self._idle = [self._start(number % ROUNDS) for number in range(CONVERSATIONS)]

    def take(self) -> tuple[list[int], int, int]:
        """A conversation: all of its tokens, its rounds until now, and its number."""
        with self._lock:
            return self._idle.pop(self._rng.randrange(len(self._idle)))

    def put(self, tokens: list[int], rounds: int, number: int) -> None:
        """Its next round was answered."""
        with self._lock:
            self._idle.append((tokens, rounds, number) if rounds < ROUNDS else self._start(0))

    def _start(self, rounds: int) -> tuple[list[int], int, int]:
        self._started += 1
        number = 100_000 * (self._seed + 1) + self._started
        return make_prompts(1, number, ROUNDS * STEP)[0], rounds, number


def measure_turns(server: VLLMServer, seed: int, requests: int) -> Record:
    conversations, lock = Conversations(seed), threading.Lock()
    left = requests + WARM_UP
    answers: list[tuple[float, int, ServedAnswer]] = []

    def serve() -> None:
        nonlocal left
        while True:
            with lock:
                if not left:
                    return
                left -= 1
            tokens, rounds, number = conversations.take()
            answer = server.ask(tokens[: (rounds + 1) * STEP], GENERATED)
            conversations.put(tokens, rounds + 1, number)
            with lock:
                answers.append((time.perf_counter(), rounds, answer))

    with ThreadPoolExecutor(CLIENTS) as pool:
        for each in [pool.submit(serve) for _ in range(CLIENTS)]:
            each.result()
    begun, measured = answers[WARM_UP - 1][0], answers[WARM_UP:]
    earlier = sum(rounds * STEP for _, rounds, _ in measured)
    found = sum(answer.cached for *_, answer in measured) / earlier
    row = {"requests_s": len(measured) / (measured[-1][0] - begun), "found": found}
    return row | latencies([answer for *_, answer in measured], GENERATED)


def measure_loads(
    server: ServedEngine, number: int, tokens: int, clients: int
) -> list[tuple[str, Record]]:
    seed = 9000 + 1000 * (number + 1) + tokens // 64 + clients
    prompts = make_prompts(clients, seed, tokens)
    rows = []
    for kind in ("computed", "loaded"):
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda ids: server.http.ask(ids, LOADS_GENERATED), prompts))
        seconds = time.perf_counter() - began
        row: Record = {"tokens": tokens, "clients": clients, "seconds": seconds}
        row["found"] = sum(answer.cached for answer in answers) / (clients * tokens)
        rows.append((kind, row | latencies(answers, LOADS_GENERATED)))
        for again in range(3):  # later steps submit the stores of earlier ones
            server.http.ask(make_prompts(1, 1000 + again, 64)[0])
            time.sleep(0.3)
        server.http.forget()
    return rows


def latencies(answers: Sequence[ServedAnswer], generated: int) -> Record:
    first = sorted(1e3 * answer.first for answer in answers)
    each = sorted(1e3 * (answer.last - answer.first) / (generated - 1) for answer in answers)
    return {
        "ttft_mean_ms": statistics.mean(first),
        "ttft_p50_ms": statistics.median(first),
        "ttft_p99_ms": first[int(0.99 * len(first))],
        "tpot_p50_ms": statistics.median(each),
        "tpot_p99_ms": each[int(0.99 * len(each))],
    }


if __name__ == "__main__":
    main()
