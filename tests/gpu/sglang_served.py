"""SGLang's server with kvferry, over HTTP: times to the first token, and what must work.

    python tests/gpu/sglang_served.py ttft,answers,killed,stopped,aborted,flush [--json FILE]
    python tests/gpu/sglang_served.py ttft,answers,killed,stopped,aborted,flush --device cpu

ttft     of a prompt that is computed, in the GPU's cache, and in host memory; of a server with
         kvferry and one with HiCache, in turn. Llama-3.1-8B's shape, dummy weights
answers  two servers share a namespace, and one of them restarts: prompts are found, and the answers
         are those of computed prompts
killed   the daemon is killed while clients load: only requests whose load was in flight may fail,
         with 503. It starts again with its pool, and prompts are found
stopped  the daemon is stopped (SIGSTOP) for some seconds instead
aborted  clients leave at all times; then nothing is pinned
flush    /flush_cache of one server empties the namespace for both

All but `ttft` use a small model with random weights, of which the answers depend on the KV cache.
Each row is one line of JSON in FILE. Exit status 1: something was wrong.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from kvferry.client import OffloadClient
from support.answers import TIE, answer_distance
from support.eventually import wait_until
from support.json_rows import JsonRows
from support.sglang_server import TOP, SGLangAnswer, SGLangServer, write_model
from support.vllm_measure import Record, measure_link
from support.vllm_models import LARGE, SMALL, kv_bytes
from support.vllm_process import GpuDaemon

# For CPUs.
TINY = SMALL | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
# Tokens of a prompt of `ttft`, and of the other figures. GPU memory has room for one of `ttft`, and
# for six others.
LONG, SHORT = {"cuda": 16384, "cpu": 2048}, {"cuda": 4096, "cpu": 640}
# Prompts that do not fit into the GPU's memory together, and clients that ask for them.
PROMPTS, CLIENTS = 12, 4
HOST_GIB = {"cuda": 24, "cpu": 1}
STOPPED_SECONDS = 8.0


class ServedBench(JsonRows):
    """What the figures share. servers: of the small model, A and B. timed: of `ttft`, by name."""

    def __init__(self, chosen: argparse.Namespace, root: Path, running: ExitStack) -> None:
        super().__init__(chosen.json)
        self.device, self.reps = chosen.device, chosen.reps
        self._more, self._root, self._running = shlex.split(chosen.options), root, running
        self.daemon: GpuDaemon
        self.servers: list[SGLangServer] = []
        self.timed: dict[str, SGLangServer] = {}
        self._numbers = count()

    def start(self, connectors: list[str], names: list[str]) -> None:
        """Start the daemon and all servers, at the same time."""
        on_gpu = self.device == "cuda"
        device = 0 if on_gpu else "cpu"
        self.daemon = self._running.enter_context(GpuDaemon(device, f"{HOST_GIB[self.device]}GiB"))
        if set(names) - {"ttft"}:
            model = write_model(self._root / "small", SMALL if on_gpu else TINY, weights=True)
            for name in "AB":
                self.servers.append(self._launch(name, model, 6 * SHORT[self.device]))
        if "ttft" in names:
            model = write_model(self._root / "large", LARGE if on_gpu else TINY, weights=False)
            for name in connectors:
                tokens = LONG[self.device] * 5 // 4
                self.timed[name] = self._launch(name, model, tokens, load_format="dummy")
        for name, server in [*zip("AB", self.servers, strict=False), *self.timed.items()]:
            self.report("started", server=name, seconds=server.wait())

    def _launch(self, name: str, model: Path, tokens: int, **options: Any) -> SGLangServer:
        extra: Record | None = None
        if name == "hicache":
            options |= {"enable_hierarchical_cache": None, "hicache_size": HOST_GIB[self.device]}
        elif name != "none":
            half = HOST_GIB[self.device] * 2**30 // 2
            extra = {"kvferry_dirs": [self.daemon.directory], "cpu_bytes_to_use": half}
            extra |= {"kvferry_salt": "weights are dummies"} if "load_format" in options else {}
        server = SGLangServer(
            model,
            self.device,
            self.path.with_name(f"server-{name}.log"),
            extra,
            self._more,
            max_total_tokens=tokens // 64 * 64,
            max_running_requests=16,
            **options,
        )
        return self._running.enter_context(server)

    def prompt(self, tokens: int) -> list[int]:
        draw = random.Random(f"prompt {next(self._numbers)}")
        return [draw.randrange(3, 1000) for _ in range(tokens)]

    def prompts(self) -> list[list[int]]:
        return [self.prompt(SHORT[self.device]) for _ in range(PROMPTS)]

    def pinned(self) -> int:
        with OffloadClient(self.daemon.directory, engine="observer") as client:
            return sum(each.pinned for each in client.namespaces())


def measure_ttft(bench: ServedBench) -> None:
    tokens = LONG[bench.device]
    moved_ms = 0.0
    if bench.device == "cuda":
        link = measure_link()
        moved_ms = kv_bytes(LARGE, tokens) / link / 1e6
        bench.report("link", gbs=link)
    rows: dict[str, list[Record]] = {name: [] for name in bench.timed}
    for number in range(-2, bench.reps):
        for name, server in bench.timed.items():
            prompt, other = bench.prompt(tokens), bench.prompt(tokens)
            cold = server.ask(prompt)
            time.sleep(0.5)
            gpu = min((server.ask(prompt) for _ in range(3)), key=lambda answer: answer.seconds)
            server.ask(other)  # evicts the prompt from the GPU
            time.sleep(0.5)
            host = server.ask(prompt)
            row = {
                "computed_ms": 1e3 * cold.seconds,
                "gpu_ms": 1e3 * gpu.seconds,
                "host_ms": 1e3 * host.seconds,
                "found": host.host / tokens,
                "of_computed": host.seconds / cold.seconds,
                "of_floor": 1e3 * host.seconds / (1e3 * gpu.seconds + moved_ms),
            }
            bench.report(f"ttft {name}", round=number, **row)
            if number >= 0:
                rows[name].append(row)
    for name, each in rows.items():
        figures = bench.summarize(f"ttft {name}", each)
        bench.check(f"ttft {name} found", figures["found"]["least"] > 0.9 or name == "none")


def compare_answers(bench: ServedBench) -> None:
    a, b = bench.servers
    prompts = bench.prompts()
    computed = ask_all(a, prompts)
    check_found(bench, "answers: from host memory", prompts, computed, ask_all(a, prompts))
    check_found(bench, "answers: of the other server", prompts, computed, ask_all(b, prompts))
    a.stop()
    a.start()
    bench.report("restarted", seconds=a.wait())
    check_found(bench, "answers: after a restart", prompts, computed, ask_all(a, prompts))
    others = ask_all(b, [[*bench.prompt(64), *prompt[64:]] for prompt in prompts])
    nearest = min(distances(computed, others))
    bench.check("answers: control", nearest > TIE, nearest=nearest)


def ask_all(server: SGLangServer, prompts: list[list[int]]) -> list[SGLangAnswer]:
    return [server.ask(prompt, 8, top=TOP) for prompt in prompts]


def distances(some: list[SGLangAnswer], others: list[SGLangAnswer]) -> list[float]:
    pairs = zip(some, others, strict=True)
    return [answer_distance(one.comparable, other.comparable) for one, other in pairs]


def check_found(
    bench: ServedBench,
    what: str,
    prompts: list[list[int]],
    computed: list[SGLangAnswer],
    found: list[SGLangAnswer],
) -> None:
    far = max(distances(computed, found))
    share = sum(answer.host for answer in found) / sum(map(len, prompts))
    seconds = [sum(answer.seconds for answer in each) for each in (computed, found)]
    fine = far <= TIE and share > 0.8
    bench.check(what, fine, distance=far, found=share, of_time=seconds[1] / seconds[0])


class Load:
    """Clients that ask for prompts at random, until `end`. answers: with the times of the request
    and of its end, and the number of the prompt."""

    def __init__(self, server: SGLangServer, prompts: list[list[int]]) -> None:
        self.answers: list[tuple[float, float, int, SGLangAnswer]] = []
        self._server, self._prompts = server, prompts
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._ask, seed) for seed in range(CLIENTS)]

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._ended.is_set():
            number, began = draw.randrange(len(self._prompts)), time.monotonic()
            answer = self._server.ask(self._prompts[number], 8, top=TOP)
            self.answers.append((began, time.monotonic(), number, answer))

    def wait(self, answers: int) -> None:
        """Wait for so many more answers."""
        goal = len(self.answers) + answers
        wait_until(lambda: len(self.answers) >= goal or any(c.done() for c in self._clients))

    def end(self) -> None:
        self._ended.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()


def under_load(
    bench: ServedBench, what: str, disturb: Callable[[], None], repair: Callable[[], None]
) -> None:
    """Disturb the daemon while clients load, and repair it after some answers."""
    server, prompts = bench.servers[0], bench.prompts()
    computed = ask_all(server, prompts)
    load = Load(server, prompts)
    load.wait(6 * CLIENTS)
    disturbed = time.monotonic()
    disturb()
    load.wait(6 * CLIENTS)
    repair()
    repaired = time.monotonic()
    deadline = repaired + 60
    load.wait(2 * CLIENTS)
    while time.monotonic() < deadline and not any(
        answer.host for began, _, _, answer in load.answers[-CLIENTS:] if began > repaired
    ):
        load.wait(1)
    load.end()
    before = [each for each in load.answers if each[1] < disturbed]
    failed = [each for each in load.answers if each[3].status != http.client.OK]
    fine = [(number, answer) for *_, number, answer in load.answers if answer.status == 200]
    far = max(distances([computed[number] for number, _ in fine], [it for _, it in fine]))
    bench.check(
        what,
        far <= TIE
        and {each[3].status for each in failed} <= {http.client.SERVICE_UNAVAILABLE}
        and all("load failed" in each[3].message for each in failed)
        and len(failed) <= CLIENTS
        and any(each[3].host for each in before)
        and any(each[3].host for each in load.answers if each[0] > repaired),
        answers=len(load.answers),
        failed=len(failed),
        begun_after=[each[0] - disturbed for each in failed],
        messages=Counter(each[3].message for each in failed).most_common(2),
        distance=far,
        host_before=sum(each[3].host > 0 for each in before) / len(before),
        slowest_s=max(each[3].seconds for each in load.answers),
        slowest_before_s=max(each[3].seconds for each in before),
    )


def kill_daemon(bench: ServedBench) -> None:
    for number in range(bench.reps):
        under_load(bench, f"killed {number}", bench.daemon.kill, bench.daemon.start)


def stop_daemon(bench: ServedBench) -> None:
    def stop() -> None:
        os.kill(bench.daemon.pid, signal.SIGSTOP)
        threading.Timer(STOPPED_SECONDS, os.kill, (bench.daemon.pid, signal.SIGCONT)).start()

    under_load(bench, "stopped", stop, lambda: time.sleep(STOPPED_SECONDS))


def abort_requests(bench: ServedBench) -> None:
    server, draw, prompts = bench.servers[0], random.Random("aborts"), bench.prompts()
    computed = ask_all(server, prompts)
    longest = max(answer.seconds for answer in computed)
    with ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(10 * CLIENTS):
            pool.submit(server.ask_and_leave, draw.choice(prompts), longest * draw.random())
    far = max(distances(computed, ask_all(server, prompts)))
    wait_until(lambda: bench.pinned() == 0)
    bench.check("aborted", far <= TIE, distance=far)


def flush(bench: ServedBench) -> None:
    a, b = bench.servers
    prompt = bench.prompt(SHORT[bench.device])
    a.ask(prompt)
    wait_until(lambda: b.ask(prompt).cached)
    a.flush()
    emptied = a.ask(prompt).cached
    a.flush()
    for _ in range(8):
        b.ask(bench.prompt(SHORT[bench.device]))  # evicts the prompt from B's GPU memory
    other = b.ask(prompt).cached
    bench.check("flush", emptied == other == 0, emptied=emptied, other=other)


FIGURES = {
    "ttft": measure_ttft,
    "answers": compare_answers,
    "killed": kill_daemon,
    "stopped": stop_daemon,
    "aborted": abort_requests,
    "flush": flush,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", help=f"figures, comma-separated: {', '.join(FIGURES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--connectors", default="kvferry,hicache", help="of ttft; also: none")
    parser.add_argument("--options", default="", help="more options of launch_server")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("sglang-served.jsonl"))
    chosen = parser.parse_args()
    names = chosen.what.split(",")
    if unknown := set(names) - FIGURES.keys():
        parser.error(f"unknown figures: {', '.join(sorted(unknown))}; choose from {[*FIGURES]}")
    with tempfile.TemporaryDirectory() as root, ExitStack() as running:
        bench = ServedBench(chosen, Path(root), running)
        with bench.guarded("start"):
            bench.start(chosen.connectors.split(","), names)
            for name in names:
                with bench.guarded(name):
                    FIGURES[name](bench)
        bench.report("all", failed=bench.failed)
    sys.exit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
