"""Benefit and cost of a disk tier with vLLM, compared with kvferry without a tier.

    python tests/gpu/tier_figures.py disk,cold,dead [--path DIR] [--reps 5] [--json FILE]

disk   time to first token of a prompt that is on disk only, compared with computing it and with a
       hit in host memory. The goal: bytes over the rate of fio or dd, plus the hit in host memory.
cold   prompts without reuse, one after another, while a tier writes all of them
many   32 prompts without reuse at once, 64 tokens each
dead   prompts that are on disk, and prompts that are not, while the tier's process never replies
slow   the same while the tier reads 50 MB/s

Two engines and their daemons run on one GPU and alternate: `none` has no tier, `disk` has one. More
prompts than the host pool can keep are stored first, and requested in order, so the next one has
always been evicted. --alone starts no engine without a tier: the other one also computes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvferry.proto.status import TierStatus
from support.child_processes import children_of
from support.vllm_measure import (
    WRITE_SECONDS,
    Record,
    alternate,
    ask_at_once,
    ask_in_a_row,
    choose_figures,
    measure_link,
    print_figures,
    print_set,
    summary,
    tier_of,
    wait_written,
)
from support.vllm_models import LARGE, kv_bytes
from support.vllm_process import VLLM, GpuDaemon, make_prompts

TOKENS = 16384
# The pool can keep fewer of these prompts than are on disk. A quarter of it can keep one.
POOL_GIB, ON_DISK, DISK_GIB = 10, 6, 30
# Blocks that fio and dd read: bytes, and how many are in flight.
BLOCK_BYTES, DEPTH = 2 << 20, 16
SLOW_RATE = 50e6
NAMES = "none", "disk"


@dataclass
class TierEngines:
    """vLLM engines with and without a disk tier.

    engines, daemons: by name. new: seeds of prompts that no engine has computed.
    """

    root: Path
    model: Record
    engines: dict[str, VLLM]
    daemons: dict[str, GpuDaemon]
    stored: list[list[int]]
    new: Iterator[int]

    def tier(self) -> TierStatus:
        return tier_of(self.daemons["disk"].directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=8, help="1: an eighth of the bytes")
    parser.add_argument("--alone", action="store_true", help="only the engine with a tier")
    parser.add_argument("--write", default="write_through", help="the tier's write policy")
    parser.add_argument("--json", type=Path, default=Path("tier-figures.json"))
    chosen, what = choose_figures(parser, FIGURES)
    root = Path(tempfile.mkdtemp(prefix="kvferry-tier-", dir=chosen.path))
    try:
        tool, rate = raw_read_rate(root)
        record: Record = {"link_gbs": measure_link(), "raw_gbs": rate / 1e9, "raw_tool": tool}
        print_figures("rates", **record)
        model = LARGE | {"num_key_value_heads": chosen.kv_heads}
        names = NAMES[1:] if chosen.alone else NAMES
        with start_engines(root, chosen.write, model, names) as bench:
            for name in what:
                rows = FIGURES[name](bench, chosen.reps, record)
                columns = [key for key in rows[0] if key != "connector"]
                record[name] = {"rows": rows, "figures": summary(name, rows, *columns)}
                chosen.json.write_text(json.dumps(record, indent=1))
            print_figures(
                "tier", **{key: getattr(bench.tier(), key) for key in TierStatus.__struct_fields__}
            )
    finally:
        shutil.rmtree(root)


def raw_read_rate(root: Path) -> tuple[str, float]:
    """Bytes per second of O_DIRECT reads of a new file, in blocks of 2 MiB, 16 in flight."""
    file, blocks = root / "raw", 512
    try:
        with file.open("wb") as filled:
            for _ in range(blocks):
                filled.write(os.urandom(BLOCK_BYTES))
            os.fsync(filled.fileno())
        if shutil.which("fio") is None:
            share = blocks // DEPTH
            dd = ["dd", f"if={file}", "of=/dev/null", f"bs={BLOCK_BYTES}", "iflag=direct"]
            commands = [[*dd, f"count={share}", f"skip={n * share}"] for n in range(DEPTH)]
            begun = time.perf_counter()
            running = [subprocess.Popen(each, stderr=subprocess.DEVNULL) for each in commands]
            assert all(process.wait() == 0 for process in running)
            return "dd", blocks * BLOCK_BYTES / (time.perf_counter() - begun)
        command = ["fio", "--name=raw", f"--filename={file}", "--rw=read", "--direct=1"]
        command += [f"--bs={BLOCK_BYTES}", f"--size={blocks * BLOCK_BYTES}", "--ioengine=psync"]
        command += ["--thread", f"--numjobs={DEPTH}", f"--offset_increment={100 // DEPTH}%"]
        command += [f"--io_size={blocks * BLOCK_BYTES // DEPTH}", "--group_reporting"]
        done = subprocess.run(
            [*command, "--output-format=json"], check=True, capture_output=True, text=True
        )
        return "fio", float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])
    finally:
        file.unlink()


@contextmanager
def start_engines(
    root: Path, write: str, model: Record, names: Sequence[str]
) -> Iterator[TierEngines]:
    """Start both daemons and engines, and write the prompts of `stored` to disk."""
    tier = {
        "tiers_disk_path": root / "tier",
        "tiers_disk_size": f"{DISK_GIB}GiB",
        "tiers_disk_write": write,
    }
    with ExitStack() as running:
        pool = POOL_GIB * model["num_key_value_heads"] / 8
        stored = make_prompts(ON_DISK, 1, TOKENS)
        print_set("stored", ON_DISK * kv_bytes(model, TOKENS) / 2**30, pool)
        bench = TierEngines(root / "tier", model, {}, {}, stored, count(1000))
        for name in names:
            options: Record = tier if name == "disk" else {}
            daemon = GpuDaemon(pool=f"{pool}GiB", **options)
            bench.daemons[name] = running.enter_context(daemon)
            engine = VLLM(
                "kvferry",
                model=model,
                extra={"kvferry_dirs": daemon.directory, "cpu_bytes_to_use": int(pool * (1 << 30))},
                gpu_memory_utilization=0.42,
                max_model_len=TOKENS + 1024,
                max_num_seqs=64,
            )
            bench.engines[name] = running.enter_context(engine)
            print_figures("started", engine=name)
        for engine in bench.engines.values():
            for seed in (2, 3):
                engine.timed(make_prompts(1, seed, TOKENS))
        for prompt in bench.stored:
            print_figures("stored", seconds=bench.engines["disk"].timed([prompt])[0])
        bench.engines["disk"].settle()
        begun = time.monotonic()
        wait_written(bench.daemons["disk"].directory)
        print_figures("written", keys=bench.tier().written, seconds=time.monotonic() - begun)
        yield bench


def disk(bench: TierEngines, reps: int, record: Record) -> list[Record]:
    engine, rows = bench.engines["disk"], list[Record]()
    computing = bench.engines.get("none", engine)
    raw_ms = kv_bytes(bench.model, TOKENS) / record["raw_gbs"] / 1e6
    for number in range(-1, reps):
        prompt = bench.stored[number % ON_DISK]
        computed, _ = computing.timed(make_prompts(1, next(bench.new), TOKENS))
        engine.settle()
        engine.forget()
        before = bench.tier().promoted
        from_disk, cached = engine.timed([prompt])
        promoted = bench.tier().promoted - before
        engine.settle()
        engine.forget()
        host, host_cached = engine.timed([prompt])
        row = {
            "connector": "disk",
            "disk_ms": 1e3 * from_disk,
            "host_ms": 1e3 * host,
            "computed_ms": 1e3 * computed,
            "of_goal": 1e3 * from_disk / (raw_ms + 1e3 * host),
            "of_computed": from_disk / computed,
            "found": cached / TOKENS,
            "host_found": host_cached / TOKENS,
            "promoted": promoted,
        }
        print_figures("disk", round=number, **row)
        if number >= 0:
            rows.append(row)
    return rows


def cold(bench: TierEngines, reps: int, _: Record) -> list[Record]:
    def measure(engine: VLLM) -> Record:
        return {"cold_ms": ask_in_a_row(engine, next(bench.new), TOKENS)}

    return alternate(bench.engines, "cold", reps, measure)


def many(bench: TierEngines, reps: int, _: Record) -> list[Record]:
    def measure(engine: VLLM) -> Record:
        return {"tokens_s": ask_at_once(engine, next(bench.new))}

    return alternate(bench.engines, "many", reps, measure)


def dead(bench: TierEngines, reps: int, _: Record) -> list[Record]:
    with stopped_tier(bench.daemons["disk"].pid):
        return known_and_new(bench, "dead", reps)


def slow(bench: TierEngines, reps: int, _: Record) -> list[Record]:
    tier = f'{{ path = "{bench.root}", size = {DISK_GIB << 30}, rate = {SLOW_RATE} }}'
    bench.daemons["disk"].restart(
        tiers_custom_module="support.slow_tier", tiers_custom_options=tier
    )
    deadline = time.monotonic() + WRITE_SECONDS
    while bench.tier().state != "on" and time.monotonic() < deadline:
        time.sleep(0.1)
    return known_and_new(bench, "slow", reps)


def known_and_new(bench: TierEngines, what: str, reps: int) -> list[Record]:
    """Prompts that are on disk and no longer in the pool, and new prompts."""
    turns = count()
    for engine in bench.engines.values():
        for _ in range(ON_DISK):
            engine.timed(make_prompts(1, next(bench.new), TOKENS))

    def measure(engine: VLLM) -> Record:
        stored = bench.stored[next(turns) // len(bench.engines) % ON_DISK]
        engine.forget()
        known, cached = engine.timed([stored])
        new, _ = engine.timed(make_prompts(1, next(bench.new), TOKENS))
        return {"known_ms": 1e3 * known, "new_ms": 1e3 * new, "found": cached / TOKENS}

    return alternate(bench.engines, what, reps, measure)


@contextmanager
def stopped_tier(daemon: int) -> Iterator[None]:
    """Stop (SIGSTOP) every tier process that the daemon starts, until the end."""
    ended = threading.Event()

    def stop() -> None:
        while not ended.wait(0.02):
            for process in tier_processes(daemon):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for process in tier_processes(daemon):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def tier_processes(daemon: int) -> list[int]:
    return children_of(daemon, b" tier\0")


FIGURES: dict[str, Callable[[TierEngines, int, Record], list[Record]]] = {
    "disk": disk,
    "cold": cold,
    "many": many,
    "dead": dead,
    "slow": slow,
}

if __name__ == "__main__":
    main()
