"""`sglang.launch_server`, as users run it, and its answers over HTTP. For the scripts in tests/gpu.

Needs SGLang in the environment. Prompts are token ids, so models have no tokenizer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.time_limits import TIMEOUT
from support.vllm_process import EngineEnded, free_port

START_SECONDS = 10 * TIMEOUT
# As in deploy/sglang.md. On CPUs SGLang's pools are moved to shared memory first.
LINKERS = {
    "cuda": {"linker": "KVFerryLinker", "linker_module_path": "kvferry.client.sglang"},
    "cpu": {"linker": "SharedLinker", "linker_module_path": "support.sglang_shared"},
}
# Standard deviations of weights with which an answer depends on the KV cache, as in
# sensitive_loader.py.
USUAL, QUERIES = 0.02, 0.06


class SGLangAnswer(NamedTuple):
    """status: of HTTP; message: of an error. seconds: to the answer. cached: prompt tokens that
    were found in a cache; host: of these, in host memory. tokens and top: see answer_distance."""

    status: int
    seconds: float
    cached: int = 0
    host: int = 0
    tokens: tuple[int, ...] = ()
    top: tuple[Any, ...] = ()
    message: str = ""

    @property
    def comparable(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "top": self.top}


class SGLangServer:
    """A server. model: a directory. options: of launch_server, by name; None for a flag. extra: of
    the linker; without it, the server has none. `wait` waits until it serves, so that several can
    start at the same time."""

    def __init__(
        self,
        model: Path,
        device: str,
        log: Path,
        extra: dict[str, Any] | None = None,
        more: list[str] | None = None,
        **options: Any,
    ) -> None:
        self.log, self._port = log, free_port()
        options = {
            "model_path": model,
            "device": device,
            "port": self._port,
            "page_size": 64,
            # A server without requests leaves the cores to the others.
            "sleep_on_idle": None,
            "skip_tokenizer_init": None,
            "grammar_backend": "none",
        } | options
        if extra is not None:
            config = LINKERS[device] | {"linker_extra_config": extra}
            options |= {
                "enable_unified_cache_external_linker": None,
                "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": json.dumps(config),
            }
        self._command = [sys.executable, "-m", "sglang.launch_server", *(more or [])]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            self._command += [flag, *([] if value is None else [str(value)])]
        self._device = device
        self.start()

    def start(self) -> None:
        self.began = time.monotonic()
        environment = {"SGLANG_USE_CPU_ENGINE": "1"} if self._device == "cpu" else {}
        with self.log.open("ab") as log:
            self._logged = log.tell()
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **environment},
            )

    def wait(self) -> float:
        """Returns the seconds from the start."""
        while not self._is_ready():
            if self._process.poll() is not None:
                raise EngineEnded(f"SGLang did not start: {self.log.read_text()[-2000:]}")
            if time.monotonic() - self.began > START_SECONDS:
                raise EngineEnded(f"SGLang is not ready: {self.log.read_text()[-2000:]}")
            time.sleep(0.2)
        return time.monotonic() - self.began

    def ask(self, prompt: list[int], tokens: int = 1, *, top: int = 0) -> SGLangAnswer:
        """Any thread."""
        request: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }
        if top:
            request |= {"return_logprob": True, "top_logprobs_num": top}
        began = time.perf_counter()
        status, body = self._post("/generate", request)
        seconds = time.perf_counter() - began
        if status != http.client.OK:
            return SGLangAnswer(status, seconds, message=body.decode()[:300])
        answer = json.loads(body)
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        tops = meta.get("output_top_logprobs") or ()
        return SGLangAnswer(
            status,
            seconds,
            meta["cached_tokens"],
            details.get("host", 0),
            tuple(answer["output_ids"]),
            tuple([(token, logprob) for logprob, token, *_ in step] for step in tops),
        )

    def ask_and_leave(self, prompt: list[int], seconds: float) -> None:
        """Close the connection while the request waits, loads or is computed."""
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 16}}
        connection = self._connect()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        time.sleep(seconds)
        connection.close()

    def flush(self) -> None:
        """Retried while requests run."""
        deadline = time.monotonic() + TIMEOUT
        while self._post("/flush_cache", {})[0] != http.client.OK:
            if time.monotonic() > deadline:
                raise EngineEnded("SGLang does not flush its cache")
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all of its processes, and SIGKILL to those that do not end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TIMEOUT)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=4 * TIMEOUT)

    def _post(self, path: str, request: dict[str, Any]) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(request), headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def _is_ready(self) -> bool:
        """Whether it has answered its own first request."""
        return b"ready to roll" in self.log.read_bytes()[self._logged :]


def write_model(directory: Path, config: dict[str, Any], *, weights: bool) -> Path:
    """A Llama. weights: random ones, the same in each process; else for load_format=dummy."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if weights:
        from safetensors.torch import save_file

        tensors = {name: random_weight(name, shape) for name, shape in weight_shapes(config)}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weight_shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return [(f"{name}.weight", shape) for name, shape in shapes.items()]


def random_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    deviation = QUERIES if "q_proj" in name else USUAL
    return (torch.randn(shape, generator=generator) * deviation).to(torch.bfloat16)
