"""CPU time of kvferry's calls for a prompt that the GPU's cache serves, in vLLM's scheduler.

    PYTHONHASHSEED=0 python tests/bench/gpu_hits.py [--tokens 24576,1000000]   # needs vLLM

Such a request needs nothing from kvferry, but waits for its calls. Milliseconds of CPU time in the
scheduler's thread, from the arrival of a request to the step that computes its first token; medians
of ROUNDS requests, with minimum and maximum:

without     vLLM without a connector
with        with kvferry, whose pool has the prompt, too
kvferry     of `with`, kvferry's own calls: keys that arrive, lookups, offers, block tables. The
            rest of the difference is vLLM's scheduler of offloading connectors
ended       kvferry's own calls when the request ends; others wait for them

No GPU is needed: a runner that computes nothing replaces the model. GPU blocks have 16 tokens, host
blocks 64.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvferry.client import LocalDaemon

if TYPE_CHECKING:
    from support.vllm_core import EngineCore

ROUNDS = 11
# Tokens of a GPU block; GPU blocks in a host block, the default of kvferry.
TOKENS, FACTOR = 16, 4
OWN_CALLS = {
    "manager": (
        "request_arrived begin_lookups lookup prepare_store touch_keys is_resetting on_schedule_end"
    ),
    "_block_owners": "allocate_for_load begin_step drop_foreign_blocks",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", default=f"24576,{1_000_000}")
    for number in parser.parse_args().tokens.split(","):
        measure(int(number))


def measure(tokens: int) -> None:
    from support.vllm_core import EngineCore

    blocks = tokens // TOKENS
    prompt = random.Random(1).choices(range(900), k=tokens)
    with LocalDaemon("cpu", pool_bytes=512 << 20) as daemon:
        engine = EngineCore(
            daemon.directory,
            ("full",),
            blocks=blocks + 64,
            host_bytes=2 * blocks * 256 + (1 << 20),
            longest=tokens + 64,
            batch=8192,
            kv_connector_extra_config={
                "kvferry_dirs": str(daemon.directory),
                "kvferry_salt": "bench",
                "cpu_bytes_to_use": 64 << 20,
                "block_size": FACTOR * TOKENS,
            },
        )
        scheduler = engine.scheduler
        engine.runner = SimpleNamespace(
            wrong=[], prepare=lambda *_: None, compute=lambda output, _: sample(scheduler, output)
        )
        engine.run(prompt)
        engine.settle()
        own: list[float] = []
        connector = scheduler.connector
        for owner, names in OWN_CALLS.items():
            part = getattr(connector, owner, None) or connector.connector_scheduler.manager
            for name in names.split():
                setattr(part, name, timed(getattr(part, name), own))
        gc.collect()
        gc.freeze()
        rows: dict[str, list[float]] = {"without": [], "with": [], "kvferry": [], "ended": []}
        for _ in range(ROUNDS):
            scheduler.connector = None
            rows["without"].append(first_step(engine, prompt))
            finish(engine)
            scheduler.connector = connector
            own.clear()
            rows["with"].append(first_step(engine, prompt))
            rows["kvferry"].append(sum(own))
            own.clear()
            finish(engine)
            rows["ended"].append(sum(own))
        engine.close()
    print(f"{tokens:,} tokens, {blocks:,} GPU blocks, {blocks // FACTOR:,} host blocks; ms")
    for name, values in rows.items():
        least, most = 1e3 * min(values), 1e3 * max(values)
        print(f"{name:<8} {1e3 * statistics.median(values):8.2f} ({least:.2f}..{most:.2f})")


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            times.append(time.thread_time() - began)

    return measured


def sample(scheduler: Any, output: Any) -> dict[str, list[int]]:
    """A token of each request whose prompt is computed."""
    requests = {name: scheduler.requests[name] for name in output.num_scheduled_tokens}
    return {
        name: [7] if each.num_computed_tokens >= each.num_tokens else []
        for name, each in requests.items()
    }


def first_step(engine: EngineCore, prompt: list[int]) -> float:
    """Seconds from the arrival of a request to the end of `schedule`. The step is then run."""
    scheduler, times = engine.scheduler, list[float]()
    add, schedule = scheduler.add_request, scheduler.schedule
    scheduler.add_request, scheduler.schedule = timed(add, times), timed(schedule, times)
    name = engine.add(prompt)
    step(engine)
    scheduler.add_request, scheduler.schedule = add, schedule
    served = engine._found.pop(name)
    assert served >= len(prompt) - FACTOR * TOKENS, f"the GPU's cache served {served} tokens"
    return sum(times)


def finish(engine: EngineCore) -> None:
    while engine.scheduler.requests:
        step(engine)
    if engine.scheduler.connector is not None:
        engine.settle()


def step(engine: EngineCore) -> None:
    if engine.scheduler.connector is not None:
        engine.step()
        return
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler = engine.scheduler
    output = scheduler.schedule()
    for new in output.scheduled_new_reqs:
        engine._found[new.req_id] = new.num_computed_tokens
    sampled = sample(scheduler, output)
    result = ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={name: number for number, name in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
    )
    scheduler.update_from_output(output, result)


if __name__ == "__main__":
    main()
