"""An engine with kvferry and vLLM's NixlConnector in a MultiConnector, in a process of its own.

    python -m support.vllm_prefill_decode '{"directory": ..., "order": ["nixl", "kvferry"], ...}'

The process reads a JSON object per line: a request, or a command. It steps its engine all the time,
as vLLM does, and answers each line with a JSON object. NIXL transfers by UCX over loopback. NIXL's
worker pins its process to one core, and vLLM's parallel state is global, so it needs a process.
Needs vLLM and NIXL.
"""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # before NIXL's classes read it

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402

from support.vllm_core import EngineCore, kvferry_options  # noqa: E402
from support.vllm_plan import kvferry_transfer  # noqa: E402
from support.vllm_runner import ONE_ALLOCATION, TOKENS  # noqa: E402


class SmallBlockBackend(CPUAttentionBackend):  # type: ignore[misc]
    """An attention backend for the blocks of the fake model."""

    @classmethod
    def get_supported_kernel_block_sizes(cls, *specs: Any) -> list[Any]:
        return [TOKENS]


class FakeAttentionLayer(AttentionLayerBase):  # type: ignore[misc]
    def get_attn_backend(self) -> type[SmallBlockBackend]:
        return SmallBlockBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        raise NotImplementedError


class PrefillDecodeEngine(EngineCore):
    """A vLLM engine with the NIXL connector and kvferry's in a MultiConnector.

    order: "nixl" and "kvferry". roles: the kv_role of each.
    """

    def __init__(self, directory: str, order: list[str], roles: dict[str, str], model: str) -> None:
        children = {
            "nixl": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
            "kvferry": kvferry_transfer(kvferry_options(directory, 4 << 20)),
        }
        super().__init__(
            directory,
            ("full",),
            folder=model,
            kv_connector="MultiConnector",
            kv_connector_module_path=None,
            kv_role=roles["nixl"],
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "connectors": [children[name] | {"kv_role": roles[name]} for name in order]
            },
        )
        metadata = self.worker.get_handshake_metadata()
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    def _set_up(self, config: VllmConfig, groups: tuple[str, ...]) -> None:
        layers = config.compilation_config.static_forward_context
        layers.update((group, FakeAttentionLayer()) for group in groups)

    def answer(self, line: dict[str, Any]) -> dict[str, Any]:
        """Do a command, and say what is known."""
        if (name := line.get("abort")) is not None:
            self.abort(name)
        if line.get("reset"):
            self.settle()
            assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        added = None
        if "prompt" in line:
            added = self.add(line["prompt"], line["tokens"], **line["transfer"])
        return {
            "added": added,
            "finished": self.finished,
            "transfers": self.transfers,
            "loaded": self.loaded,
            "known": self.known_chunks(),
            "wrong": self.wrong,
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }


@contextmanager
def one_rank() -> Iterator[None]:
    """vLLM's parallel state of one rank."""
    with tempfile.TemporaryDirectory() as name, set_current_vllm_config(VllmConfig()):
        address = f"file://{Path(name) / 'store'}"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield


def main() -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(ONE_ALLOCATION))  # as vLLM chooses on a GPU
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NIXL and vLLM print
    with one_rank():
        engine = PrefillDecodeEngine(**json.loads(sys.argv[1]))
        print("{}", file=answers, flush=True)
        while True:
            if select.select([0], [], [], 0.001)[0]:
                line = sys.stdin.readline()
                if not line:
                    break
                print(json.dumps(engine.answer(json.loads(line))), file=answers, flush=True)
            engine.step()
        engine.close()
    answers.flush()
    os._exit(0)  # threads of NIXL may remain


if __name__ == "__main__":
    main()
