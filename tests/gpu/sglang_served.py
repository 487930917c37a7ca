"""SGLang's server with kvferry, over HTTP: times to the first token, and what must work.

    python tests/gpu/sglang_served.py ttft,answers,killed,stopped,aborted,flush [--json FILE]
    python tests/gpu/sglang_served.py ttft,answers,killed,stopped,aborted,flush --device cpu

ttft     of a prompt that is computed, in the GPU's cache, and in host memory; of a server with
         kvferry and one with HiCache, in turn. Llama-3.1-8B's shape, dummy weights
answers  two servers share a namespace, and one of them restarts: prompts are found, and the answers
         are those of a server without a cache below the GPU's. Times to the first token of the
         restarted server: of prompts that are found, and of others
killed   the daemon is killed while a load is in flight: only requests that load may fail, with 503.
         It starts again with its pool, and prompts are found
stopped  the daemon is stopped (SIGSTOP) for some seconds instead
aborted  clients leave at all times; then nothing is pinned
flush    /flush_cache of one server empties the namespace for both

All but `ttft` use a small model with random weights, of which the answers depend on the KV cache;
all use that of --model if it is given. The output of each server is in server-*.log beside FILE.
Each row is one line of JSON in FILE. Exit status 1: something was wrong.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import shlex
import signal
import statistics
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
from support.answers import TIE
from support.eventually import wait_until
from support.json_rows import JsonRows
from support.sglang_load import Load, ask_all, distances
from support.sglang_server import SGLangAnswer, SGLangServer, write_model
from support.time_limits import TIMEOUT
from support.vllm_measure import Record, measure_link
from support.vllm_models import LARGE, SMALL, kv_bytes
from support.vllm_process import EngineEnded, GpuDaemon

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
# for so many others.
LONG, SHORT = {"cuda": 16384, "cpu": 2048}, {"cuda": 4096, "cpu": 640}
ROOM = {"cuda": 6, "cpu": 4}
# Prompts that do not fit into the GPU's memory together, and clients that ask for them.
PROMPTS, CLIENTS = {"cuda": 12, "cpu": 8}, {"cuda": 4, "cpu": 2}
HOST_GIB = {"cuda": 24, "cpu": 1}
STOPPED_SECONDS = 8.0


class ServedBench(JsonRows):
    """What the figures share. servers: of the small model, A and B. plain: it has no linker.
    timed: of `ttft`, by name."""

    def __init__(self, chosen: argparse.Namespace, root: Path, running: ExitStack) -> None:
        super().__init__(chosen.json)
        self.device, self.reps = chosen.device, chosen.reps
        self._model, self._pack = chosen.model, chosen.pack
        self._more, self._root, self._running = shlex.split(chosen.options), root, running
        self.daemon: GpuDaemon
        self.servers: list[SGLangServer] = []
        self.plain: SGLangServer
        self.timed: dict[str, SGLangServer] = {}
        self._numbers = count()

    def start(self, connectors: list[str], names: list[str]) -> None:
        """Start the daemon and all servers, at the same time."""
        on_gpu = self.device == "cuda"
        device = 0 if on_gpu else "cpu"
        self.daemon = self._running.enter_context(GpuDaemon(device, f"{HOST_GIB[self.device]}GiB"))
        shapes = (SMALL, LARGE) if on_gpu else (TINY, TINY)
        launched: dict[str, SGLangServer] = {}
        if set(names) - {"ttft"}:
            model = self._model or write_model(self._root / "small", shapes[0], weights=True)
            tokens = ROOM[self.device] * (SHORT[self.device] + 64)
            launched = {name: self._launch(name, "kvferry", model, tokens) for name in "AB"}
            self.servers = [*launched.values()]
        if "answers" in names:
            self.plain = launched["plain"] = self._launch("plain", "none", model, tokens)
        if "ttft" in names:
            options: Record = {} if self._model else {"load_format": "dummy"}
            model = self._model or write_model(self._root / "large", shapes[1], weights=False)
            tokens = LONG[self.device] * 5 // 4
            for name in connectors:
                self.timed[name] = self._launch(name, name, model, tokens, **options)
        for name, server in launched.items():
            self.report("started", server=name, seconds=server.wait())
        for name, server in [*self.timed.items()]:
            with self.guarded(f"start {name}"):
                self.report("started", server=name, seconds=server.wait())
                continue
            del self.timed[name]

    def _launch(
        self, name: str, connector: str, model: Path, tokens: int, **options: Any
    ) -> SGLangServer:
        extra: Record | None = None
        if connector == "hicache":
            options |= {
                "enable_hierarchical_cache": None,
                "hicache_size": HOST_GIB[self.device],
                "hicache_write_policy": "write_through",
            }
        elif connector in ("kvferry", "unpacked"):
            extra = {
                "kvferry_dirs": [self.daemon.directory],
                "kvferry_pack": self._pack if connector == "kvferry" else "off",
                "cpu_bytes_to_use": HOST_GIB[self.device] * 2**30 // 3,
            }
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
        return [self.prompt(SHORT[self.device]) for _ in range(PROMPTS[self.device])]

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
        for name, server in [*bench.timed.items()]:
            with bench.guarded(f"ttft {name}"):
                row = time_prompt(bench, server, tokens, moved_ms)
                bench.report(f"ttft {name}", round=number, **row)
                if number >= 0:
                    rows[name].append(row)
                continue
            del bench.timed[name]
    for name in bench.timed:
        figures = bench.summarize(f"ttft {name}", rows[name])
        bench.check(f"ttft {name} found", figures["found"]["least"] > 0.9 or name == "none")


def time_prompt(bench: ServedBench, server: SGLangServer, tokens: int, moved_ms: float) -> Record:
    prompt, other = bench.prompt(tokens), bench.prompt(tokens)
    cold = server.ask(prompt)
    time.sleep(0.5)
    gpu = min((server.ask(prompt) for _ in range(3)), key=lambda answer: answer.seconds)
    server.ask(other)  # evicts the prompt from the GPU
    time.sleep(0.5)
    host = server.ask(prompt)
    for answer in (cold, gpu, host):
        if answer.status != http.client.OK:
            raise EngineEnded(answer.message)
    return {
        "computed_ms": 1e3 * cold.seconds,
        "gpu_ms": 1e3 * gpu.seconds,
        "host_ms": 1e3 * host.seconds,
        "found": host.host / tokens,
        "of_computed": host.seconds / cold.seconds,
        "of_floor": 1e3 * host.seconds / (1e3 * gpu.seconds + moved_ms),
    }


def compare_answers(bench: ServedBench) -> None:
    a, b = bench.servers
    prompts = bench.prompts()
    expected = ask_all(bench.plain, prompts)
    bench.plain.stop()
    computed = ask_all(a, prompts)
    far = max(distances(expected, computed))
    bench.check("answers: computed", far <= TIE and not any(it.cached for it in computed), far=far)
    check_found(bench, "answers: from host memory", prompts, expected, ask_all(a, prompts))
    check_found(bench, "answers: of the other server", prompts, expected, ask_all(b, prompts))
    a.stop(signal.SIGTERM)
    a.start()
    bench.report("restarted", seconds=a.wait())
    found = [a.ask(prompt) for prompt in prompts]
    others = [a.ask(prompt) for prompt in bench.prompts()]
    first = {
        "found_ms": 1e3 * statistics.median(answer.seconds for answer in found),
        "computed_ms": 1e3 * statistics.median(answer.seconds for answer in others),
        "found": min(
            answer.host / len(prompt) for answer, prompt in zip(found, prompts, strict=True)
        ),
    }
    bench.check("restart: first token", first["found"] > 0.8, **first)
    check_found(bench, "answers: after a restart", prompts, expected, ask_all(a, prompts))
    others = ask_all(b, [[*bench.prompt(64), *prompt[64:]] for prompt in prompts])
    nearest = min(distances(expected, others))
    bench.check("answers: control", nearest > TIE, nearest=nearest)


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


def under_load(
    bench: ServedBench, what: str, disturb: Callable[[], None], repair: Callable[[], None]
) -> None:
    """Disturb the daemon while clients load, and repair it after some answers."""
    server, prompts, clients = bench.servers[0], bench.prompts(), CLIENTS[bench.device]
    computed = ask_all(server, prompts)
    load = Load(server, prompts, clients)
    load.wait(6 * clients)
    disturbed = time.monotonic()
    disturb()
    failing = time.monotonic()
    load.wait(6 * clients)
    repair()
    repaired = time.monotonic()
    deadline = repaired + TIMEOUT
    load.wait(2 * clients)
    while time.monotonic() < deadline and not any(
        answer.host for began, _, _, answer in load.answers[-clients:] if began > repaired
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
        and len(failed) <= clients
        and all(each[0] < failing for each in failed)
        and any(each[3].host for each in before)
        and any(each[3].host for each in load.answers if each[0] > repaired),
        answers=len(load.answers),
        failed=len(failed),
        begun_before=[failing - each[0] for each in failed],
        messages=Counter(each[3].message for each in failed).most_common(2),
        distance=far,
        host_before=sum(each[3].host > 0 for each in before) / len(before),
        slowest_s=max(each[3].seconds for each in load.answers),
        slowest_before_s=max(each[3].seconds for each in before),
    )


def kill_daemon(bench: ServedBench) -> None:
    def kill() -> None:
        with OffloadClient(bench.daemon.directory, engine="observer") as client:
            wait_until(lambda: any(engine.jobs for engine in client.status().engines))
            bench.daemon.kill()

    for number in range(bench.reps):
        under_load(bench, f"killed {number}", kill, bench.daemon.start)


def stop_daemon(bench: ServedBench) -> None:
    def stop() -> None:
        os.kill(bench.daemon.pid, signal.SIGSTOP)
        threading.Timer(STOPPED_SECONDS, os.kill, (bench.daemon.pid, signal.SIGCONT)).start()

    under_load(bench, "stopped", stop, lambda: time.sleep(STOPPED_SECONDS))


def abort_requests(bench: ServedBench) -> None:
    server, draw, prompts = bench.servers[0], random.Random("aborts"), bench.prompts()
    computed = ask_all(server, prompts)
    longest = max(answer.seconds for answer in computed)
    with ThreadPoolExecutor(CLIENTS[bench.device]) as pool:
        for _ in range(10 * CLIENTS[bench.device]):
            pool.submit(server.ask_and_leave, draw.choice(prompts), longest * draw.random())
    far = max(distances(computed, ask_all(server, prompts)))
    wait_until(lambda: bench.pinned() == 0)
    bench.check("aborted", far <= TIE, distance=far)


def flush(bench: ServedBench) -> None:
    """Of what both servers have found in host memory, nothing is found after a flush of one."""
    a, b = bench.servers
    prompts = bench.prompts()
    ask_all(a, prompts)
    found = [min(answer.host for answer in ask_all(server, prompts)) for server in (a, b)]
    for server in (b, a):  # evicts them from B's memory, which a flush of A does not empty
        for prompt in bench.prompts():
            server.ask(prompt)
    a.flush()
    after = [sum(answer.cached for answer in ask_all(b, prompts))]
    a.flush()
    after.append(sum(answer.cached for answer in ask_all(a, prompts)))
    bench.check("flush", min(found) > 0 and not any(after), found=found, after=after)


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
    parser.add_argument(
        "--connectors", default="kvferry,hicache", help="of ttft; also: unpacked, none"
    )
    parser.add_argument("--pack", choices=("auto", "on", "off"), default="auto", help="of kvferry")
    parser.add_argument(
        "--model", type=Path, help="a model's directory, in place of random weights"
    )
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
