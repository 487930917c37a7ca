"""EngineCore with two tensor-parallel ranks that compute the same KV, each with its own daemon.

Importing this needs vLLM.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from support.vllm_core import EngineCore, connector_output, kvferry_of, register_rows
from support.vllm_runner import CheckedRunner
from support.vllm_stand_ins import wait_connected

RANKS = 2


class EachRank:
    """Calls a method of each rank's object, with arguments of its own as in another process.

    Returns what rank 0 returns.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = objects

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            first, *others = [getattr(each, name) for each in self.objects]
            result = first(*arguments)
            for method in others:
                method(*copy.deepcopy(arguments))
            return result

        return call


class RankedCore(EngineCore):
    """directories: of the ranks' daemons."""

    def __init__(self, directories: Sequence[Path], **options: Any) -> None:
        self._directories = [str(directory) for directory in directories]
        super().__init__(directories[0], ("latent",), **options)
        config = copy.deepcopy(self._config)
        config.parallel_config.rank = 1
        other = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self._caches)
        rows = register_rows(other, ("latent",), self._caches.num_blocks)
        wait_connected(kvferry_of(other).connector_worker.worker.session.client)
        self.worker = EachRank([self.worker, other])
        self.runner = EachRank([self.runner, CheckedRunner(("latent",), rows, random.Random(1))])
        self._aggregator = KVOutputAggregator(RANKS)

    def _set_up(self, config: VllmConfig, groups: tuple[str, ...]) -> None:
        config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = RANKS
        config.kv_transfer_config.kv_connector_extra_config["kvferry_dirs"] = self._directories
        self._config = config

    def _plan_caches(self, groups: tuple[str, ...], blocks: int, drafts: int) -> KVCacheConfig:
        self._caches = super()._plan_caches(groups, blocks, drafts)
        if hasattr(self._caches, "kv_tp_replicas"):
            self._caches.kv_tp_replicas = RANKS
        return self._caches

    def stored_keys(self) -> list[set[bytes]]:
        """The keys in each rank's daemon."""
        self.manager.poll()
        return [set(keys) for keys in self.manager.ready_keys]

    def loads_in_flight(self) -> list[bool]:
        return [bool(each.connector_worker._load_jobs) for each in self.worker.objects]

    @property
    def wrong(self) -> list[str]:
        return [wrong for runner in self.runner.objects for wrong in runner.wrong]

    def _connector_output(self, finished: set[str]) -> KVConnectorOutput:
        outputs = [
            ModelRunnerOutput([], {}, kv_connector_output=connector_output(worker, finished))
            for worker in self.worker.objects
        ]
        reported: KVConnectorOutput = self._aggregator.aggregate(outputs).kv_connector_output
        return reported
