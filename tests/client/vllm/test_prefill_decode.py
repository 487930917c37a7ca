"""A prefill and a decode engine: kvferry beside vLLM's NixlConnector in a MultiConnector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd
from support.time_limits import TIMEOUT
from support.vllm_stand_ins import prompt

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("nixl") is None,
        reason="vLLM or NIXL is not installed; see `make vllm-tests`",
    ),
]

PROMPT = prompt(0)
# It begins with six blocks of PROMPT.
OTHER = PROMPT[:100] + prompt(1, 100)
BLOCKS = 127
# Tokens of a chunk in host memory.
CHUNK = 64
ORDERS = [("nixl", "kvferry"), ("kvferry", "nixl")]
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


class EngineProcess:
    """A process of support.vllm_prefill_decode."""

    def __init__(self, **arguments: Any) -> None:
        # Bound but not listening, so that NIXL can use the port and nobody else is given it.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        environment = {
            **os.environ,
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # older versions log to stdout
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._port.getsockname()[1]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.vllm_prefill_decode", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._port.close()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine has ended: {self.process.wait()}"
        return json.loads(line)

    def ask(self, **line: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return self.read()

    def wait(self, condition: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + TIMEOUT
        while not condition(answer := self.ask()):
            assert time.monotonic() < deadline, answer
            time.sleep(0.01)
        return answer

    def run(self, prompt: list[int], tokens: int, transfer: dict[str, Any] | None = None) -> Any:
        """Run a request. Returns its kv_transfer_params, and how many tokens were found."""
        name = self.ask(prompt=prompt, tokens=tokens, transfer=transfer or {})["added"]
        answer = self.wait(lambda answer: name in answer["finished"])
        assert answer["wrong"] == []
        return answer["transfers"][name], answer["finished"][name]


class Pair:
    """A prefill engine, which only stores to the daemon, and a decode engine, which only loads."""

    def __init__(self, directory: Path, model: Path, order: tuple[str, str]) -> None:
        self.prefill, self.decode = (
            EngineProcess(
                directory=str(directory),
                order=order,
                roles=dict.fromkeys(order, role),
                model=str(model),
            )
            for role in ("kv_producer", "kv_consumer")
        )
        self._stored: set[tuple[int, ...]] = set()

    def prefilled(self, prompt: list[int]) -> dict[str, Any]:
        """Prefill a prompt and store it. Returns the kv_transfer_params for the decode engine."""
        transfer, _ = self.prefill.run(prompt, 1, REMOTE_DECODE)
        ends = range(CHUNK, len(prompt) + 1, CHUNK)
        self._stored.update(tuple(prompt[:end]) for end in ends)
        self.decode.wait(lambda answer: answer["known"] == len(self._stored))
        assert transfer["do_remote_prefill"]
        return dict(transfer)


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, start_kvferryd: StartKvferryd, tmp_path: Path
) -> Iterator[Pair]:
    pair = Pair(start_kvferryd().directory, tmp_path, request.param)
    try:
        pair.prefill.read()
        pair.decode.read()
        yield pair
    finally:
        pair.prefill.close()
        pair.decode.close()


@pytest.mark.parametrize("pair", ORDERS, ids="-".join, indirect=True)
def test_a_prompt_is_loaded_from_the_prefill_engine_and_later_from_host_memory(pair: Pair) -> None:
    """It is read by NIXL up to its last token, and by kvferry up to its last whole chunk."""
    assert pair.decode.run(PROMPT, 8, pair.prefilled(PROMPT)) == (None, 199)
    assert pair.decode.ask(reset=True)["loaded"] == 0
    assert pair.decode.run(PROMPT, 8) == (None, 192)
    assert pair.decode.ask(reset=True)["loaded"] == 3
    assert pair.decode.run(OTHER, 8, pair.prefilled(OTHER)) == (None, 199)
    assert pair.decode.ask()["loaded"] == 3
    for engine in (pair.prefill, pair.decode):
        engine.wait(lambda answer: answer["free"] == BLOCKS)


@pytest.mark.parametrize(
    ("pair", "connected"), [(ORDERS[0], False), (ORDERS[1], True)], indirect=["pair"]
)
def test_a_prompt_of_a_killed_prefill_engine_is_loaded_from_host_memory(
    pair: Pair, connected: bool
) -> None:
    """connected: the decode engine has loaded from the prefill engine before."""
    if connected:
        assert pair.decode.run(OTHER, 8, pair.prefilled(OTHER)) == (None, 199)
        pair.decode.ask(reset=True)
    transfer = pair.prefilled(PROMPT)
    pair.prefill.process.kill()
    pair.prefill.process.wait()
    assert pair.decode.run(PROMPT, 8, transfer) == (None, 192)
    assert pair.decode.ask()["loaded"] == 3
    pair.decode.wait(lambda answer: answer["free"] == BLOCKS)
