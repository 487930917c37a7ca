"""Real vLLM engines, each in a process that receives JSON lines, and a daemon beside them.

For the scripts in tests/gpu. Weights are dummies with vLLM's seed, the same in every engine. Needs
a GPU and vLLM in the environment. KVFERRYD_PYTHONPATH is the daemon's PYTHONPATH, if it differs
from vLLM's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from support.answers import TOP
from support.service_manager import ServiceManager
from support.time_limits import TIMEOUT
from support.vllm_models import SMALL
from support.vllm_served import Prompts

CONNECTORS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "vllm": {"kv_connector": "OffloadingConnector"},
    "ideal": {"kv_connector": "OffloadingConnector"},
    "kvferry": {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.client.vllm",
    },
    "unpacked": {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.client.vllm",
    },
    "multi": {"kv_connector": "MultiConnector", "kv_load_failure_policy": "recompute"},
    "pegaflow": {
        "kv_connector": "PegaKVConnector",
        "kv_connector_module_path": "pegaflow.connector",
    },
}
# Options of vLLM for the weights of sensitive_loader.py.
SENSITIVE = {
    "load_format": "sensitive",
    "worker_extension_cls": "support.sensitive_loader.SensitiveLoading",
}

CONTAINER = "unshare", "--pid", "--ipc", "--mount-proc", "--fork", "--kill-child"


class EngineEnded(Exception):
    """The engine's process has ended."""


class VLLM:
    """A vLLM engine. It logs to this process's stderr.

    connector: a name in CONNECTORS. extra: its kv_connector_extra_config. sensitive: use weights
    whose outputs depend on the KV cache (sensitive_loader.py), so that answers can be compared;
    else dummy weights. isolated: in PID and IPC namespaces of its own, as in a container. tree:
    another source tree of kvferry, whose client the engine uses. device: the GPU; None: all.
    options: of vLLM.
    """

    def __init__(
        self,
        connector: str = "kvferry",
        *,
        model: dict[str, Any] = SMALL,
        extra: dict[str, Any] | None = None,
        sensitive: bool = False,
        isolated: bool = False,
        tree: str = "",
        device: int | None = None,
        **options: Any,
    ) -> None:
        transfer = CONNECTORS[connector]
        if transfer is not None:
            transfer = transfer | {"kv_role": "kv_both", "kv_connector_extra_config": extra or {}}
        if sensitive:
            options = SENSITIVE | options
        chosen = {
            "model": str(model_folder(model)),
            "transfer": transfer,
            "options": options,
            "top": TOP if sensitive else None,
        }
        visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
        self._process = subprocess.Popen(
            [
                *(CONTAINER if isolated else ()),
                *(sys.executable, "-m", "support.vllm_served", json.dumps(chosen)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"} | python_path(tree) | visible,
        )
        self.answer()

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def ask(self, **request: Any) -> Any:
        self.send(**request)
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
            sys.stderr.write(line)
        raise EngineEnded(f"with status {self._process.wait()}")

    def generate(self, prompts: Prompts, tokens: int = 16) -> list[dict[str, Any]]:
        """The outputs of each prompt, with the number of tokens found in a cache."""
        answer: list[dict[str, Any]] = self.ask(do="generate", prompts=prompts, tokens=tokens)[
            "outputs"
        ]
        return answer

    def timed(self, prompts: Prompts, tokens: int = 1) -> tuple[float, int]:
        """Seconds for all prompts together, and the number of tokens found in a cache."""
        answer = self.ask(do="generate", prompts=prompts, tokens=tokens)
        return answer["seconds"], sum(output["cached"] for output in answer["outputs"])

    def settle(self) -> None:
        """Run some steps and wait, because later steps submit the stores of earlier ones."""
        for number in range(3):
            self.generate(make_prompts(1, 1000 + number, 64))
            time.sleep(0.3)

    def forget(self, *, connector: bool = False) -> bool:
        """Empty the GPU's prefix cache, and with `connector` the host's. Returns the success."""
        deadline = time.monotonic() + TIMEOUT
        while not self.ask(do="reset", connector=connector):
            if time.monotonic() > deadline:
                return False
            self.generate(make_prompts(1, 2000, 64))
        return True

    def kill(self) -> None:
        """Send SIGKILL to all processes of the engine."""
        os.killpg(self._process.pid, 9)
        self._process.wait()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError, subprocess.TimeoutExpired):
            self._process.communicate("", timeout=TIMEOUT)
        if self._process.poll() is None:
            self.kill()

    def __enter__(self) -> VLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_prompts(count: int, seed: int, tokens: int, shared: int = 0) -> Prompts:
    """Random prompts of `tokens` tokens. The first `shared` tokens are the same in all of them."""
    rng = random.Random(seed)
    prefix = [rng.randrange(10, 31000) for _ in range(shared)]
    return [
        prefix + [rng.randrange(10, 31000) for _ in range(tokens - shared)] for _ in range(count)
    ]


class GpuDaemon:
    """A kvferryd for one GPU, or "cpu", with a runtime directory of its own, that keeps its pool as
    under systemd. tree: as for VLLM."""

    def __init__(
        self, device: int | str = 0, pool: str = "8GiB", tree: str = "", **options: Any
    ) -> None:
        self._device, self._pool, self._options = device, pool, options
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="kvferry-"))
        environment = python_path(tree, "KVFERRYD_PYTHONPATH")
        self._manager = ServiceManager((), self.runtime_dir / "notify", environ=environment)
        self.start()

    @property
    def pid(self) -> int:
        return self._manager.process.pid

    @property
    def directory(self) -> str:
        """The directory of its sockets."""
        return str(next(self.runtime_dir.glob("*/kvferry.sock")).parent)

    def start(self, timeout: float = TIMEOUT) -> None:
        command = [sys.executable, "-m", "kvferry.daemon", "--device", str(self._device)]
        command += ["--pool-size", self._pool, "--runtime-dir", str(self.runtime_dir)]
        for name, value in self._options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        for stale in self.runtime_dir.glob("*/kvferry.sock"):
            stale.unlink()
        self._manager.command = command
        self._manager.start(timeout)

    def restart(self, **options: Any) -> None:
        """Kill the daemon, and start it with other options. The pool is kept."""
        self.kill()
        self._options = options
        self.start()

    def resize(self, pool: str) -> None:
        """Kill the daemon, and start it with a pool of another size, which is empty."""
        self.kill()
        self._manager.lose_fds()
        self._pool = pool
        self.start()

    def kill(self) -> None:
        self._manager.kill()

    def __enter__(self) -> GpuDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()


def restart_as_siblings(*daemons: GpuDaemon) -> None:
    """Let daemons lend each other blocks although they have different runtime directories."""
    directories = ":".join(str(daemon.runtime_dir) for daemon in daemons)
    for daemon in daemons:
        daemon.restart(siblings_directories=directories, state_dir=daemons[0].runtime_dir)


class PegaFlow:
    """PegaFlow's server for one GPU. PegaFlow must be installed beside vLLM."""

    def __init__(self, device: int = 0, pool: str = "8gb") -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "pegaflow._server", "--devices", str(device)]
        command += ["--addr", f"127.0.0.1:{self.port}", "--pool-size", pool]
        command += ["--http-addr", f"127.0.0.1:{free_port()}", "--log-level", "warn"]
        self._process = subprocess.Popen(command, start_new_session=True)
        deadline = time.monotonic() + TIMEOUT
        while not _listens(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineEnded("PegaFlow's server did not start")
            time.sleep(0.2)

    def __enter__(self) -> PegaFlow:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def python_path(tree: str, variable: str = "PYTHONPATH") -> dict[str, str]:
    """The environment of a process that uses a source tree; without one, the variable unchanged."""
    path = os.environ.get(variable, os.environ.get("PYTHONPATH", ""))
    parts = [str(Path(tree) / part) for part in ("proto", "client", "daemon", "tests")]
    return {"PYTHONPATH": ":".join([*parts, path] if tree else [path])}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def model_folder(model: dict[str, Any]) -> Path:
    name = f"{model['model_type']}-{zlib.crc32(json.dumps(model).encode()):08x}"
    folder = Path(tempfile.gettempdir()) / f"kvferry-{name}"
    folder.mkdir(exist_ok=True)
    unfinished = folder / f"{os.getpid()}-{threading.get_ident()}.part"
    unfinished.write_text(json.dumps(model))
    unfinished.replace(folder / "config.json")  # several engines may write at the same time
    return folder
