"""Time to first token of a prompt that another replica has stored, through its daemon.

    python tests/gpu/sibling_figures.py [--devices 0,1] [--reps 7] [--json FILE]

Two daemons that are siblings, and an engine beside each, Llama-3.1-8B's shape. The first engine
computes and stores a prompt of 16,384 tokens. The second one is asked for it: that loads the blocks
of the sibling (sibling_ms). Then its GPU's cache is emptied and it is asked again: those are blocks
of its own daemon (own_ms). With `--devices 0,0` both are on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvferry.client import OffloadClient
from support.vllm_measure import Record, measure_link, print_figures, summary
from support.vllm_models import LARGE, kv_bytes
from support.vllm_process import VLLM, GpuDaemon, make_prompts

TOKENS = 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--host-gib", type=int, default=24, help="of each daemon")
    parser.add_argument("--tree", default="", help="another source tree of the daemons")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    record: Record = {"link_gbs": measure_link()}
    print_figures("link", gbs=record["link_gbs"])
    record["moved_ms"] = kv_bytes(LARGE, TOKENS) / record["link_gbs"] / 1e6
    with ExitStack() as running:
        daemons, (first, second) = start(running, chosen)
        rows = [measure_round(first, second, daemons[1], n) for n in range(-2, chosen.reps)]
    record["rows"] = [{"connector": "kvferry", **row} for row in rows[2:]]
    record["figures"] = summary(
        "siblings", record["rows"], "cold_ms", "sibling_ms", "own_ms", "ratio"
    )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(record, indent=1))


def start(running: ExitStack, chosen: Any) -> tuple[list[GpuDaemon], list[VLLM]]:
    devices = [int(device) for device in chosen.devices.split(",")]
    folders = [Path(tempfile.mkdtemp(prefix="kvferry-")) for _ in devices]
    siblings = {
        "siblings_enabled": "true",
        "siblings_directories": ":".join(map(str, folders)),
    }
    daemons, engines = list[GpuDaemon](), list[VLLM]()
    for device, folder in zip(devices, folders, strict=True):
        pool = f"{chosen.host_gib}GiB"
        daemon = GpuDaemon(device, pool, chosen.tree, runtime_dir=folder, **siblings)
        daemons.append(running.enter_context(daemon))
    for device, daemon in zip(devices, daemons, strict=True):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
        extra = {"cpu_bytes_to_use": chosen.host_gib << 30, "kvferry_dirs": daemon.directory}
        engine = VLLM(
            model=LARGE, extra=extra, max_model_len=TOKENS + 1024, gpu_memory_utilization=0.42
        )
        engines.append(running.enter_context(engine))
    return daemons, engines


def measure_round(first: VLLM, second: VLLM, daemon: GpuDaemon, number: int) -> Record:
    prompt = make_prompts(1, 100 + number, TOKENS)
    cold, _ = first.timed(prompt)
    first.settle()
    second.settle()
    second.forget()
    sibling, cached = second.timed(prompt)
    second.settle()
    second.forget()
    own, again = second.timed(prompt)
    with OffloadClient(daemon.directory, engine="observer") as client:
        (status,) = client.status().siblings
    row = {
        "cold_ms": 1e3 * cold,
        "sibling_ms": 1e3 * sibling,
        "own_ms": 1e3 * own,
        "ratio": sibling / own,
        "cached": cached,
        "again": again,
        "copied": status.copied,
        "missed": status.missed,
    }
    print_figures("siblings", round=number, **row)
    return row


if __name__ == "__main__":
    main()
