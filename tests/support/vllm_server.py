"""`vllm serve`, as users run it, and its answers over HTTP. For the scripts in tests/gpu."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from support.time_limits import TIMEOUT
from support.vllm_process import CONNECTORS, EngineEnded, free_port, model_folder, python_path

VOCABULARY = 32000
START_SECONDS = 5 * TIMEOUT


class ServedAnswer(NamedTuple):
    """Seconds to the first token and to the last one; prompt tokens that were found in a cache."""

    first: float
    last: float
    cached: int


class VLLMServer:
    """An OpenAI server. options: of `vllm serve`, by name; None for a flag.

    connector, model, extra, tree: as for vllm_process.VLLM. Weights are dummies. `wait` waits until
    it serves, so that several can start at the same time.
    """

    def __init__(
        self,
        connector: str,
        *,
        model: dict[str, Any],
        extra: dict[str, Any] | None = None,
        tree: str = "",
        **options: Any,
    ) -> None:
        self._port = free_port()
        self._model = str(model_folder(model))
        _write_tokenizer(Path(self._model))
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self._model]
        options = {"port": self._port, "load_format": "dummy", "host": "127.0.0.1"} | options
        options["enable_prompt_tokens_details"] = None
        transfer = CONNECTORS[connector]
        if transfer is not None:
            transfer = transfer | {"kv_role": "kv_both", "kv_connector_extra_config": extra or {}}
            options["kv_transfer_config"] = json.dumps(transfer)
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", *([] if value is None else [str(value)])]
        environment = {"PYTHONHASHSEED": "0", "VLLM_SERVER_DEV_MODE": "1"} | python_path(tree)
        self._process = subprocess.Popen(
            command, stdout=sys.stderr, start_new_session=True, env={**os.environ, **environment}
        )

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineEnded("vllm serve did not start")
            time.sleep(0.2)

    def ask(self, prompt: list[int], tokens: int = 1) -> ServedAnswer:
        """Any thread."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2 * TIMEOUT)
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        first, chunk = 0.0, b""
        while (line := reply.readline()) and not line.startswith(b"data: [DONE]"):
            if line.startswith(b"data: "):
                first, chunk = first or time.perf_counter(), line[6:]
        last = time.perf_counter()
        if reply.status != http.client.OK or not first:
            raise EngineEnded(f"vllm serve answered {reply.status}")
        connection.close()
        details = json.loads(chunk)["usage"]["prompt_tokens_details"] or {}
        return ServedAnswer(first - began, last - began, details.get("cached_tokens") or 0)

    def forget(self) -> None:
        """Empty the GPU's prefix cache."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2 * TIMEOUT)
        connection.request("POST", "/reset_prefix_cache")
        reply = connection.getresponse()
        reply.read()
        if reply.status != http.client.OK:
            raise EngineEnded(f"vllm serve answered {reply.status} to a reset")
        connection.close()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> VLLMServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer with a word for each id. Prompts are ids, so it only makes answers text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
