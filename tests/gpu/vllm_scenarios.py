"""Real vLLM engines over a real daemon: restarted, shared with, and left alone by it.

    python tests/gpu/vllm_scenarios.py [restart] [share] [daemon-killed] [same-outputs]

Needs a GPU and vLLM 0.26; weights are dummies (the same in every engine: vLLM seeds them), the
shape is a small Llama's. Each engine is a process of its own that takes JSON lines. Prints a line a
finding, and ends with status 1 where one is not as it must be.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKENS, OUTPUT = 2048, 16
POOL = 4 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
wrong: list[str] = []


def check(what: str, fine: bool, **figures: Any) -> None:
    said = ", ".join(f"{name} {value}" for name, value in figures.items())
    print(f"{'ok   ' if fine else 'WRONG'} {what}: {said}", flush=True)
    if not fine:
        wrong.append(what)


class Engine:
    """A vLLM engine in a process of its own."""

    def __init__(self, connector: bool = True, **options: Any) -> None:
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "engine", json.dumps({"connector": connector, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def ask(self, **request: Any) -> Any:
        self.send(**request)
        return self._answer()

    def generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.ask(do="generate", prompts=prompts)
        return answer

    def kill(self) -> None:
        """SIGKILL, to the engine core and all."""
        os.killpg(self._process.pid, 9)
        self._process.wait()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.communicate("", timeout=60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
        raise RuntimeError(f"the engine ended: {self._process.wait()}")


@contextlib.contextmanager
def engine(connector: bool = True, **options: Any) -> Iterator[Engine]:
    running = Engine(connector, **options)
    try:
        yield running
    finally:
        running.close()


def serve(options: dict[str, Any]) -> None:
    """The engine's process."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    model = Path(tempfile.gettempdir()) / "kvferry-llama"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    more: dict[str, Any] = {}
    if options.pop("connector"):
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVFerryConnector",
            kv_connector_module_path="kvferry.client.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": POOL},
        )
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=8192,
        attention_backend="FLASH_ATTN",
        enable_prefix_caching=True,
        gpu_memory_utilization=0.25,
        disable_log_stats=False,
        seed=0,
        **options,
        **more,
    )
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, detokenize=False)
    answer([])
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "reset":
            answer(llm.reset_prefix_cache() is not False)
            continue
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answer(
            [
                {"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens}
                for o in outputs
            ]
        )


def answer(value: Any) -> None:
    print("ANSWER " + json.dumps(value), flush=True)


def prompts(count: int, seed: int, tokens: int = TOKENS, shared: int = 0) -> list[list[int]]:
    """`shared` tokens in front are the same for all."""
    source = random.Random(seed)
    front = [source.randrange(10, 31000) for _ in range(shared)]
    return [
        front + [source.randrange(10, 31000) for _ in range(tokens - shared)] for _ in range(count)
    ]


def settle(running: Engine) -> None:
    """Stores go out with later steps: run some, and forget what the GPU has."""
    for number in range(3):
        running.generate(prompts(1, 1000 + number, 64))
        time.sleep(0.3)
    deadline = time.monotonic() + 10
    while not running.ask(do="reset") and time.monotonic() < deadline:
        running.generate(prompts(1, 2000, 64))


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    return sum(a["tokens"] == b["tokens"] for a, b in zip(one, other, strict=True))


def restart() -> None:
    asked = prompts(4, 1)
    first = Engine()
    before = first.generate(asked)
    settle(first)
    first.kill()
    with engine() as second:
        after = second.generate(asked)
    cached = [one["cached"] for one in after]
    check("an engine killed and started again hits", min(cached) >= TOKENS - 32, cached=cached)
    check("and says the same", same(before, after) == len(asked), same=same(before, after))


def share() -> None:
    asked = prompts(4, 2)
    with engine() as first:
        before = first.generate(asked)
        settle(first)
        with engine() as second:
            after = second.generate(asked)
    cached = [one["cached"] for one in after]
    check("a second engine hits what the first stored", min(cached) >= TOKENS - 32, cached=cached)
    check("and says the same", same(before, after) == len(asked), same=same(before, after))


def daemon_killed(daemon: Daemon) -> None:
    asked = prompts(256, 3, shared=TOKENS // 2)
    with engine(max_num_seqs=16) as running:
        before = running.generate(asked)
        settle(running)
        running.send(do="generate", prompts=asked)
        time.sleep(0.4)
        daemon.kill()
        began = time.monotonic()
        during = running._answer()
        check(
            "the daemon is killed under load: no request fails or hangs",
            [len(one["tokens"]) for one in during] == [OUTPUT] * len(asked),
            seconds=round(time.monotonic() - began, 1),
        )
        check("outputs stay right", same(before, during) == len(asked), same=same(before, during))
        daemon.start()
        time.sleep(1)
        new = prompts(8, 4)
        deadline, cached = time.monotonic() + 30, [0]
        while min(cached) < TOKENS - 32 and time.monotonic() < deadline:
            running.generate(new)
            settle(running)
            cached = [one["cached"] for one in running.generate(new)]
        check("offloading is back with the daemon", min(cached) >= TOKENS - 32, cached=cached)


def same_outputs() -> None:
    """A small KV cache: requests are preempted, and their prefixes come from the host."""
    asked = prompts(40, 5, tokens=1024, shared=512) + prompts(40, 6, tokens=3000)
    asked = [asked[i % len(asked)] for i in range(240)]
    tight: dict[str, Any] = {"max_num_seqs": 24, "num_gpu_blocks_override": 3072}
    with engine(connector=False, **tight) as plain:
        expected = plain.generate(asked)
    with engine(**tight) as running:
        found = running.generate(asked[:120])
        settle(running)
        found += running.generate(asked[120:])
    hits = sum(one["cached"] for one in found)
    check(
        "outputs with offloading",
        same(expected, found) == len(asked),
        same=same(expected, found),
        cached=hits,
    )


class Daemon:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        path = os.environ.get("KVFERRYD_PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.daemon", "--device", "0", "--pool-size", "8GiB"],
            env={**os.environ, "PYTHONPATH": path},
        )
        time.sleep(4)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def main(chosen: list[str]) -> None:
    daemon = Daemon()
    try:
        for name in chosen or ["restart", "share", "same-outputs", "daemon-killed"]:
            print(f"-- {name}", flush=True)
            match name:
                case "restart":
                    restart()
                case "share":
                    share()
                case "daemon-killed":
                    daemon_killed(daemon)
                case "same-outputs":
                    same_outputs()
    finally:
        daemon.kill()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        serve(json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:])
