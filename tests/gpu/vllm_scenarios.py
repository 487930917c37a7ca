"""Real vLLM engines with a real daemon: restarts, sharing, failures, changed host memory.

    python tests/gpu/vllm_scenarios.py [scenario...] [--json FILE]

restart, ended, share, same-outputs, daemon-killed, resets, aborted, multi, hybrid, containers,
exported, sleep, tampered, siblings: on one GPU, in this order if none is named. Two run only if
they are named: mooncake, which needs its wheel, and tensor-parallel, which needs two GPUs.
Prints a line per finding. Exits with status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvferry.client import OffloadClient
from kvferry.proto.version import installed_version
from kvferry.testing.mooncake_store import MooncakeStore
from support.answers import TIE, answer_distance
from support.pool_files import pool_files
from support.time_limits import TIMEOUT
from support.vllm_measure import tier_of, wait_written
from support.vllm_models import HYBRID
from support.vllm_process import CONNECTORS, VLLM, GpuDaemon, make_prompts, restart_as_siblings

TOKENS = 2048
POOL = 4 << 30
# The size of the KV cache is fixed, so no engine measures free memory while another starts or ends.
ENGINE: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 30, "sensitive": True}
findings: list[dict[str, Any]] = []


def check(what: str, fine: bool, **figures: Any) -> None:
    text = ", ".join(f"{name} {value}" for name, value in figures.items())
    print(f"{'ok   ' if fine else 'WRONG'} {what}: {text}", flush=True)
    findings.append({"what": what, "fine": fine, **figures})


def start_engine(*daemons: GpuDaemon, **options: Any) -> VLLM:
    """Start an engine with these daemons, one per rank."""
    directories = [daemon.directory for daemon in daemons]
    extra = {"cpu_bytes_to_use": POOL * len(directories), "kvferry_dirs": directories}
    return VLLM(extra=extra | options.pop("extra", {}), **ENGINE, **options)


def check_same(
    what: str,
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    *,
    wanted: bool = True,
    **figures: Any,
) -> None:
    """Check that answers to the same prompts have equal KV caches, or with wanted=False differ."""
    nats = sorted(answer_distance(a, b) for a, b in zip(first, second, strict=True))
    same = sum(each <= TIE for each in nats)
    median, largest = round(nats[len(nats) // 2], 3), round(nats[-1], 3)
    fine = (same == len(nats)) is wanted
    check(what, fine, same=f"{same} of {len(nats)}", nats=f"{median} to {largest}", **figures)


def hits(outputs: list[dict[str, Any]]) -> list[int]:
    return [output["cached"] for output in outputs]


def restart(daemon: GpuDaemon) -> None:
    prompts = make_prompts(4, 1, TOKENS)
    first = start_engine(daemon)
    before = first.generate(prompts)
    first.settle()
    first.kill()
    with start_engine(daemon) as second:
        after = second.generate(prompts)
    cached = hits(after)
    check("an engine killed and started again hits", min(cached) >= TOKENS - 64, cached=cached)
    check_same("and has the same outputs", before, after)


def ended(daemon: GpuDaemon) -> None:
    """An engine that stores at eviction, and ends before anything is evicted."""
    prompts = make_prompts(16, 21, TOKENS)
    extra = {"kvferry_store": "at_eviction"}
    with start_engine(daemon, extra=extra) as first:
        before = first.generate(prompts)
        first.settle()
        check("nothing is stored before its eviction", stored(daemon) == 0, stored=stored(daemon))
        began = time.monotonic()
    seconds = round(time.monotonic() - began, 1)
    with start_engine(daemon, extra=extra) as second:
        after = second.generate(prompts)
    cached = hits(after)
    check("the next engine finds what the GPU had", min(cached) >= TOKENS - 64, seconds=seconds)
    check_same("and has the same outputs", before, after)


def stored(daemon: GpuDaemon) -> int:
    """Blocks in the daemon's namespaces."""
    with OffloadClient(daemon.directory, engine="observer") as client:
        return sum(namespace.ready for namespace in client.namespaces())


def share(daemon: GpuDaemon) -> None:
    prompts = make_prompts(4, 2, TOKENS)
    with start_engine(daemon) as first:
        before = first.generate(prompts)
        first.settle()
        with start_engine(daemon) as second:
            after = second.generate(prompts)
    cached = hits(after)
    check("a second engine hits the blocks of the first", min(cached) >= TOKENS - 64, cached=cached)
    check_same("and has the same outputs", before, after)


def daemon_killed(daemon: GpuDaemon) -> None:
    prompts = make_prompts(256, 3, TOKENS, shared=TOKENS // 2)
    tokens = 64
    extra = {"kvferry_store": "at_once"}  # a full pool stores new prompts, too
    with start_engine(daemon, extra=extra, max_num_seqs=16) as running:
        before = running.generate(prompts, tokens)
        running.settle()
        running.forget()
        running.send(do="generate", prompts=prompts, tokens=tokens)
        time.sleep(0.4)
        daemon.kill()
        began = time.monotonic()
        during = running.answer()["outputs"]
        seconds = time.monotonic() - began
        check("the daemon is killed under load", seconds > 0.5, seconds_left=round(seconds, 1))
        check(
            "no request fails or hangs",
            [len(output["tokens"]) for output in during] == [tokens] * len(prompts),
            found_before=f"{sum(map(bool, hits(during)))} of {len(prompts)}",
        )
        check_same("outputs are the same", before, during)
        daemon.start()
        cached = wait_hits(running)
        check("offloading is back with the daemon", min(cached) >= TOKENS - 64, cached=cached)


def wait_hits(running: VLLM) -> list[int]:
    """Store and request new prompts until they are hits, or for 30 s. Returns the cached tokens."""
    new = make_prompts(8, 4, TOKENS)
    deadline, cached = time.monotonic() + TIMEOUT, [0]
    while min(cached) < TOKENS - 64 and time.monotonic() < deadline:
        running.generate(new)
        running.settle()
        running.forget()
        cached = hits(running.generate(new))
    return cached


def same_outputs(daemon: GpuDaemon) -> None:
    """A small KV cache: requests are preempted, and their prefixes are loaded from the host."""
    prompts = make_prompts(40, 5, 1024, shared=512) + make_prompts(40, 6, 3000)
    prompts = [prompts[i % len(prompts)] for i in range(240)]
    tight: dict[str, Any] = {"max_num_seqs": 24, "num_gpu_blocks_override": 3072}
    with VLLM("none", **ENGINE, **tight) as plain:
        expected = plain.generate(prompts)
    with start_engine(daemon, **tight) as running:
        found = running.generate(prompts[:120])
        running.settle()
        running.forget()
        found += running.generate(prompts[120:])
    check_same("outputs with offloading", expected, found, cached=sum(hits(found)))


def resets(daemon: GpuDaemon) -> None:
    """The caches of host and GPU are reset between requests, once and then ten times in a row."""
    prompts = make_prompts(16, 7, TOKENS)
    with start_engine(daemon) as running:
        before = running.generate(prompts)
        running.settle()
        done = running.forget(connector=True)
        after = running.generate(prompts)
        check("after a reset no block is found", done and max(hits(after)) == 0, cached=hits(after))
        check_same("and outputs are the same", before, after)
        often = [answer for _ in range(10) for answer in reset_and_ask(running, prompts)]
        check_same("ten resets right after the stores", before * 10, often)
        cached = wait_hits(running)
        check("then it stores and hits again", min(cached) >= TOKENS - 64, cached=cached)


def reset_and_ask(running: VLLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    running.forget(connector=True)
    return running.generate(prompts)


def aborted(daemon: GpuDaemon) -> None:
    """Requests are aborted while they wait, load, prefill and decode.

    At most 16 of the 64 requests run at a time. Then conversations continue after a request that
    ended at the last token of a block.
    """
    prompts = make_prompts(64, 10, TOKENS)
    conversations = make_prompts(16, 11, TOKENS - 16)
    tight: dict[str, Any] = {"max_num_seqs": 16, "num_gpu_blocks_override": 3072}
    with start_engine(daemon, extra={"offload_prompt_only": False}, **tight) as running:
        before = running.generate(prompts)
        running.settle()
        for steps in (0, 1, 2, 3, 5, 8, 20):
            running.forget()
            running.ask(do="abort", prompts=prompts, tokens=64, steps=steps)
        running.settle()
        running.forget()
        after = running.generate(prompts)
        check_same("64 requests, aborted seven times", before, after, cached=sum(hits(after)))

        answers = running.generate(conversations)
        continued = [
            [*ids, *answer["tokens"], *more]
            for ids, answer, more in zip(
                conversations, answers, make_prompts(16, 12, 64), strict=True
            )
        ]
        running.settle()
        running.forget()
        found = running.generate(continued)
        running.forget(connector=True)
        computed = running.generate(continued)
        cached = hits(found)
        check("conversations continue", min(cached) > max(hits(computed)), cached=cached)
        check_same("after a last token at a block's end", computed, found)


def multi(daemon: GpuDaemon) -> None:
    """Under vLLM's MultiConnector, also with a daemon that is killed under load."""
    prompts = make_prompts(64, 13, TOKENS)
    extra = {"cpu_bytes_to_use": POOL, "kvferry_dirs": [daemon.directory]}
    inner = dict(CONNECTORS["kvferry"] or {}, kv_role="kv_both", kv_connector_extra_config=extra)
    with VLLM("multi", extra={"connectors": [inner]}, **ENGINE, max_num_seqs=16) as running:
        before = running.generate(prompts)
        running.settle()
        running.forget()
        after = running.generate(prompts)
        found = sum(hits(after))
        check_same("under MultiConnector host memory hits", before, after, cached=found)
        running.forget()
        running.send(do="generate", prompts=prompts, tokens=16)
        time.sleep(0.1)
        daemon.kill()
        during = running.answer()["outputs"]
        check_same("and the daemon is killed", before, during, found_before=sum(hits(during)))
        daemon.start()
        cached = wait_hits(running)
        check("offloading is back with the daemon", min(cached) >= TOKENS - 64, cached=cached)


def hybrid(daemon: GpuDaemon) -> None:
    """Layers with full and sliding-window attention. The daemon is killed with loads in flight."""
    prompts = make_prompts(32, 14, TOKENS)
    with start_engine(daemon, model=HYBRID, max_num_seqs=16) as running:
        before = running.generate(prompts)
        running.settle()
        running.forget()
        after = running.generate(prompts)
        cached = hits(after)
        check("a hybrid model hits host memory", min(cached) >= TOKENS - 64, cached=min(cached))
        check_same("and has the same outputs", before, after)
        if not recomputes_hybrids():
            print("      this vLLM ends the engine if a load of a hybrid model fails", flush=True)
            return
        running.forget()
        os.kill(daemon.pid, signal.SIGSTOP)
        running.send(do="generate", prompts=prompts, tokens=16)
        time.sleep(0.5)
        daemon.kill()
        during = running.answer()["outputs"]
        check_same("the daemon is killed during loads", before, during, cached=sum(hits(during)))
        daemon.start()
        cached = wait_hits(running)
        check("offloading is back with the daemon", min(cached) >= TOKENS - 64, cached=cached)


def recomputes_hybrids() -> bool:
    """Whether this vLLM recomputes failed loads of hybrid models: from 0.30 on."""
    major, minor, *_ = (installed_version("vllm") or "0.0").split(".")
    return (int(major), int(minor)) >= (0, 30)


def tampered() -> None:
    """Host memory is changed from outside, which changes outputs until the scrub detects it."""
    prompts = make_prompts(8, 8, TOKENS)
    for scrub_rate in ("0", "16GiB"):
        with GpuDaemon(integrity_scrub_rate=scrub_rate) as daemon, start_engine(daemon) as running:
            before = running.generate(prompts)
            running.settle()
            time.sleep(3)  # until the stored blocks are committed
            running.forget()
            changed = tamper(daemon.pid)
            time.sleep(3)  # until the scrub has read all of it
            after = running.generate(prompts)
            figures: dict[str, Any] = {"cached": sum(hits(after)), "pages_changed": changed}
            if scrub_rate == "0":
                what = "with the scrub off a changed block changes outputs"
                check_same(what, before, after, wanted=False, **figures)
                continue
            what = "blocks that the scrub found are computed again, and outputs are the same"
            check_same(what, before, after, **figures)
            running.forget()
            again = running.generate(prompts)
            check_same("and the same again", before, again, cached=hits(again))


def tamper(pid: int) -> int:
    """Overwrite every used page of a daemon's pool with noise. Returns how many."""
    return sum(map(overwrite_pages, pool_files(pid)))


def overwrite_pages(path: Path, page: int = 64 << 10) -> int:
    """Skips pages that begin with zeros, and the first pages, which the daemon may use itself."""
    changed = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in range(16 * page, len(memory), page):
            if memory[at : at + 64] != bytes(64):
                memory[at : at + page] = os.urandom(page)
                changed += 1
    return changed


def tensor_parallel() -> None:
    """Two ranks with a daemon each: outputs, a restart of the engine, and one daemon killed."""
    prompts = make_prompts(8, 9, TOKENS)
    two_ranks: dict[str, Any] = {"tensor_parallel_size": 2}
    with GpuDaemon(0) as first_daemon, GpuDaemon(1) as other:
        with VLLM("none", **ENGINE, **two_ranks) as plain:
            expected = plain.generate(prompts)
        first = start_engine(first_daemon, other, **two_ranks)
        before = first.generate(prompts)
        check_same("two ranks have the outputs of an engine without kvferry", expected, before)
        first.settle()
        first.kill()
        with start_engine(first_daemon, other, **two_ranks) as second:
            after = second.generate(prompts)
            cached = hits(after)
            check("the restarted engine hits", min(cached) >= TOKENS - 64, cached=cached)
            check_same("and have the same outputs", expected, after)
            second.forget()
            second.send(do="generate", prompts=prompts * 8, tokens=16)
            time.sleep(0.3)
            other.kill()
            during = second.answer()["outputs"]
            check_same("the daemon of one rank is killed", expected * 8, during)
            other.start()
            cached = wait_hits(second)
            check("offloading is back with it", min(cached) >= TOKENS - 64, cached=cached)


def siblings() -> None:
    """Two daemons that are siblings, an engine beside each; one daemon is killed under load."""
    prompts, tokens = make_prompts(192, 15, TOKENS, shared=TOKENS // 2), 64
    # The prompts take 6 GiB. The daemon must not evict any of them.
    whole_pool = {"cpu_bytes_to_use": 2 * POOL}
    with ExitStack() as stack:
        daemons = [stack.enter_context(GpuDaemon()) for _ in range(2)]
        restart_as_siblings(*daemons)
        first, second = (
            stack.enter_context(start_engine(daemon, max_num_seqs=16, extra=whole_pool))
            for daemon in daemons
        )
        before = first.generate(prompts, tokens)
        first.settle()
        after = second.generate(prompts, tokens)
        least = min(hits(after))
        check("an engine hits what the other stored", least >= TOKENS - 64, least=least)
        check_same("and has the same outputs", before, after)
        for engine in (first, second):
            engine.settle()
            engine.forget()
            engine.send(do="generate", prompts=prompts, tokens=tokens)
        time.sleep(0.4)
        daemons[0].kill()
        for name, engine in (("its own engine", first), ("the engine of the sibling", second)):
            during = engine.answer()["outputs"]
            lengths = {len(output["tokens"]) for output in during}
            figures = {"found_before": f"{sum(map(bool, hits(during)))} of {len(prompts)}"}
            check(f"a daemon is killed: {name} serves", lengths == {tokens}, **figures)
            check_same("with the same outputs", before, during)
        daemons[0].start()
        for name, engine in (("its own engine", first), ("the engine of the sibling", second)):
            cached = wait_hits(engine)
            check(f"{name} hits again", min(cached) >= TOKENS - 64, cached=cached)


def mooncake() -> None:
    """Two daemons and a Mooncake Store: the second engine hits the blocks of the first one."""
    prompts = make_prompts(4, 11, TOKENS)
    tier: dict[str, Any] = {
        "tiers_mooncake_write": "write_through",
        "tiers_mooncake_admit_after": 1,
    }
    with MooncakeStore(segment_bytes=POOL) as store:
        tier["tiers_mooncake_master"] = store.address
        with GpuDaemon(**tier) as daemon, GpuDaemon(**tier) as other:
            with start_engine(daemon) as first:
                before = first.generate(prompts)
                first.settle()
                wait_written(daemon.directory)
            with start_engine(other) as second:
                after = second.generate(prompts)
            promoted, cached = tier_of(other.directory).promoted, hits(after)
    fine = min(cached) >= TOKENS - 64 and promoted > 0
    check("an engine hits blocks that another daemon stored", fine, cached=cached, keys=promoted)
    check_same("and has the same outputs", before, after)


def containers(daemon: GpuDaemon) -> None:
    """Engines in PID and IPC namespaces of their own; the daemon is outside."""
    prompts = make_prompts(4, 12, TOKENS)
    first = start_engine(daemon, isolated=True)
    before = first.generate(prompts)
    first.settle()
    first.forget()
    again = first.generate(prompts)
    check("an isolated engine hits", min(hits(again)) >= TOKENS - 64, cached=hits(again))
    check_same("and has the same outputs", before, again)
    first.kill()
    with start_engine(daemon, isolated=True) as second:
        after = second.generate(prompts)
        check("killed and started again it hits", min(hits(after)) >= TOKENS - 64)
        check_same("and has the same outputs", before, after)
        daemon.kill()
        daemon.start()
        cached = wait_hits(second)
        check("offloading is back with the daemon", min(cached) >= TOKENS - 64, cached=cached)


def exported(daemon: GpuDaemon) -> None:
    """Milliseconds to the first token of a host hit, with engines that are asked in turn."""
    variants: dict[str, dict[str, Any]] = {
        "CUDA IPC, shared namespaces": {"extra": {"kvferry_exported_kv": False}},
        "exported, own namespaces": {"isolated": True},
    }
    prompts = make_prompts(8, 13, 7000)
    times: dict[str, list[float]] = {what: [] for what in variants}
    with ExitStack() as stack:
        engines = {
            what: stack.enter_context(start_engine(daemon, **options))
            for what, options in variants.items()
        }
        for engine in engines.values():
            engine.generate(prompts)
            engine.settle()
        for number, prompt in enumerate(prompts * 5):
            for what, engine in engines.items():
                engine.forget()
                seconds, cached = engine.timed([prompt])
                if cached < 6900:
                    check(f"{what} hits", fine=False, cached=cached)
                if number:
                    times[what].append(1e3 * seconds)
    for what, each in times.items():
        low, median, high = statistics.quantiles(each, n=4)
        spread = f"{low:.2f} to {high:.2f}"
        check(f"host hit, {what}", fine=True, ms=round(median, 2), quartiles=spread)


def sleep_mode(daemon: GpuDaemon) -> None:
    """Sleep and wake up 20 times; every fifth time the weights are discarded and loaded again."""
    prompts = make_prompts(8, 14, TOKENS)
    with start_engine(daemon, enable_sleep_mode=True) as engine:
        expected = engine.generate(prompts)
        for cycle in range(20):
            engine.settle()
            engine.forget()
            again = engine.generate(prompts)
            check_same(f"cycle {cycle}", expected, again, cached=sum(hits(again)))
            check("hits from host memory", min(hits(again)) >= TOKENS - 64, cached=hits(again))
            level = 2 if cycle % 5 == 4 else 1
            awake = device_memory_used()
            engine.ask(do="sleep", level=level)
            freed = awake - device_memory_used()
            check(f"sleep of level {level} frees the KV cache", freed >= 8 << 30, mib=freed >> 20)
            engine.ask(do="wake", reload=level == 2)
            after = engine.generate(prompts)
            check_same("after waking up", expected, after, cached=sum(hits(after)))


def device_memory_used() -> int:
    """Bytes of the GPU that all processes use."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


# Scenarios with one daemon.
SHARED: dict[str, Callable[[GpuDaemon], None]] = {
    "restart": restart,
    "ended": ended,
    "share": share,
    "same-outputs": same_outputs,
    "daemon-killed": daemon_killed,
    "resets": resets,
    "aborted": aborted,
    "multi": multi,
    "hybrid": hybrid,
    "containers": containers,
    "exported": exported,
    "sleep": sleep_mode,
}
# Scenarios that start their daemons.
OWN: dict[str, Callable[[], None]] = {
    "tampered": tampered,
    "siblings": siblings,
    "mooncake": mooncake,
    "tensor-parallel": tensor_parallel,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="*")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    names, record = chosen.scenario or [*SHARED, "tampered", "siblings"], chosen.json
    if unknown := set(names) - {*SHARED, *OWN}:
        parser.error(f"no such scenario: {', '.join(unknown)}; one of {', '.join(SHARED | OWN)}")
    for name in names:
        began = time.monotonic()
        print(f"-- {name}", flush=True)
        if name in SHARED:
            with GpuDaemon() as daemon:
                SHARED[name](daemon)
        else:
            OWN[name]()
        print(f"   {time.monotonic() - began:.0f} s", flush=True)
        if record is not None:
            record.write_text(json.dumps(findings, indent=1))
    sys.exit(0 if all(finding["fine"] for finding in findings) else 1)


if __name__ == "__main__":
    main()
