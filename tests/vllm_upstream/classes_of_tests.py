"""kvferry's connector, and vLLM's mocks of its parts with the methods that kvferry adds.

vLLM's tests decide when a job completes, and check block ids and keys. So no daemon is needed.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from kvferry.client.vllm import KVFerryConnector, KVFerrySpec
from kvferry.client.vllm.connector import FaultTolerantWorker
from kvferry.client.vllm.spec import KVFerryManager
from kvferry.proto.errors import Refused


class ConnectorOfTests(KVFerryConnector):
    """KVFerryConnector with chunks of one block, as vLLM's tests expect."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        extra.setdefault("kvferry_salt", "test")
        if "block_size" not in extra:
            extra.setdefault("blocks_per_chunk", 1)
        super().__init__(vllm_config, role, kv_cache_config)


class WorkerOfTests(FaultTolerantWorker):
    """FaultTolerantWorker for tests that create it and its metadata without a connector."""

    _prepared: Any = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(*arguments.values())
        if not hasattr(self.spec, "engine_config"):
            self.spec.engine_config = SimpleNamespace(packed=None)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Add the fields of kvferry's connector to the metadata first."""
        self._prepared = kv_connector_metadata
        kv_connector_metadata.has_no_forward_pass = False
        kv_connector_metadata.late_loads = set()
        super().handle_preemptions(kv_connector_metadata)

    def start_kv_transfers(self, metadata: Any) -> None:
        """Call handle_preemptions first if the test has not. vLLM's model runners always do."""
        if metadata is not self._prepared:
            self.handle_preemptions(metadata)
        super().start_kv_transfers(metadata)


def extend_mocks(utils: Any) -> None:
    """Patch the module of vLLM's tests that has MockOffloadingSpec."""

    class ExtendedWorker(utils.MockOffloadingWorker):  # type: ignore[misc]
        def wait_next_load(self) -> None:
            """Does nothing, because the test decides when a load completes."""

    class ExtendedSpec(utils.MockOffloadingSpec):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.manager.is_resetting.return_value = False  # a MagicMock's is true
            # Some tests create the spec without a connector.
            with contextlib.suppress(Refused):
                self.engine_config = KVFerrySpec(config).engine_config

    utils.MockOffloadingWorker = ExtendedWorker
    utils.MockOffloadingSpec = ExtendedSpec
    utils.OffloadingManager = KVFerryManager
