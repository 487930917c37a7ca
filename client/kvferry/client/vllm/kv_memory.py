"""Memory for vLLM's KV caches that the daemon maps by file descriptor.

vLLM asks connectors for it from 0.31 on. So an engine and its daemon may run in different PID and
IPC namespaces, as in containers, and sleep mode can release the memory. Of several connectors in a
MultiConnector only one may provide the memory, and others register it with network cards, so there
it is used for sleep mode only, or if the user asks for it. Used in the worker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvferry.client.tensors.exported_pool import ExportedPool, exported_pool
from kvferry.client.vllm import compat
from kvferry.client.vllm.options import EXPORTED_KV
from kvferry.proto.errors import Code, Refused

# Seconds to wait until the device has the memory of KV caches back. If another process allocates
# meanwhile, it never seems to.
RELEASE_SECONDS = 2.0


class KVMemory:
    """The memory of a worker's KV caches."""

    def __init__(self, vllm_config: Any) -> None:
        self._sleeps = sleeps(vllm_config)
        self._wanted = exports(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._pool: ExportedPool | None = None

    def allocation_context(self) -> AbstractContextManager[Any] | None:
        """vLLM allocates the KV caches within it; None: as it does without a connector."""
        if self._wanted is False or not compat.is_cuda():
            return None
        if self._wanted is None and not self._sleeps and compat.is_in_multi_connector():
            return None
        self._pool = exported_pool(torch.cuda.current_device())
        return self._pool.allocating()

    def release(self) -> None:
        """Before sleep: give the memory back, and wait until the daemon has done so, too.

        The tensors keep their addresses. The daemon has a mapping of its own, which it removes when
        the worker's session ends.
        """
        if self._pool is None:
            return
        free = torch.cuda.mem_get_info()[0] + self._pool.memory.nbytes
        self._pool.memory.release_memory()
        deadline = time.monotonic() + RELEASE_SECONDS
        while torch.cuda.mem_get_info()[0] < free and time.monotonic() < deadline:
            time.sleep(0.002)

    def restore(self) -> None:
        """After sleep."""
        if self._pool is not None:
            self._pool.memory.restore_memory()


def sleeps(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))


def exports(extra: Mapping[str, Any]) -> bool | None:
    """The user's choice; None if the user makes none. extra: the kv_connector_extra_config."""
    chosen = extra.get(EXPORTED_KV)
    return None if chosen is None else bool(chosen)


def check_sleep_mode(vllm_config: Any, extra: Mapping[str, Any]) -> None:
    """Raise Refused (BAD_CONFIG) if the memory of the KV caches changed without a notice."""
    if sleeps(vllm_config):
        check_sleep_options(extra)


def check_sleep_options(extra: Mapping[str, Any]) -> None:
    """As check_sleep_mode, of an engine that sleeps."""
    if not compat.CALLS_BEFORE_SLEEP:
        message = (
            "this vLLM does not notify connectors before it sleeps; start it without "
            "--enable-sleep-mode, or use vLLM 0.33"
        )
        raise Refused(Code.BAD_CONFIG, message, "enable_sleep_mode")
    if exports(extra) is False:
        message = (
            "the daemon cannot map the memory that vLLM's sleep mode allocates; remove "
            f"{EXPORTED_KV} from kv_connector_extra_config, or start vLLM without "
            "--enable-sleep-mode"
        )
        raise Refused(Code.BAD_CONFIG, message, EXPORTED_KV)
